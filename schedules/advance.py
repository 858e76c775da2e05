"""What a committed batch makes of its sequences' rows in the table."""

import numpy as np

from .batch import HostBatch
from .results import StepResults
from .table import DECODE, PREFILL, SequenceTable


def append_results(
    table: SequenceTable, batch: HostBatch, live: np.ndarray, due: np.ndarray, results: StepResults
) -> tuple[int, int]:
    """Moves the live sequences of a batch past what it computed; those that are due get the drafts
    they kept and their next token. live, due: bool [num_seqs]. Returns how many drafts were kept
    and how many tokens appended."""
    rows, due, kept = batch.slots[live], due[live], results.accepted[live]
    table.num_computed[rows] = batch.seqlens_k[live] - batch.num_drafts[live] + kept
    # The kept drafts, then the next token; cut where the request's tokens end.
    new = np.concatenate([table.drafts[rows], np.zeros((rows.shape[0], 1), np.int32)], axis=1)
    new[np.arange(rows.shape[0]), kept] = results.next_tokens[live]
    room = table.max_tokens[rows] - table.num_tokens[rows]
    count = np.where(due, np.minimum(kept + 1, room), 0)
    table.append(rows, new, count)
    return int(kept.sum()), int(count.sum())


def begin_next_steps(
    table: SequenceTable, batch: HostBatch, live: np.ndarray, due: np.ndarray, results: StepResults
) -> list[int]:
    """Makes the due sequences ready to decode, with the drafts of their next step, once their
    tokens were appended. Returns the rows that end instead."""
    rows, due = batch.slots[live], due[live]
    full = batch.is_last_chunk[live] & (table.num_tokens[rows] == table.max_tokens[rows])
    ends = full | results.finished[live]
    goes_on = due & ~ends
    going = rows[goes_on]
    table.turn[going[table.phase[going] == PREFILL]] = batch.step
    table.phase[going] = DECODE
    table.drafts[going] = results.drafts[live][goes_on]
    table.num_drafts[going] = results.num_drafts[live][goes_on]
    return rows[ends].tolist()
