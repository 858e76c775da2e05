"""Which sequences of the table make up the next batch, and the batch's arrays."""

import numpy as np

from .batch import HostBatch
from .blocks import BlockTables
from .limits import SchedulerLimits
from .prefix_hooks import PrefixHooks
from .table import DECODE, SequenceTable


def pick_chunks(
    table: SequenceTable,
    rows: list[int],
    limits: SchedulerLimits,
    prefix: PrefixHooks,
) -> list[tuple[int, int]]:
    """(row, new tokens) of a prefill batch from `rows`, which are served in their order. `prefix`
    may move a row's start and stop before its chunk is cut, and is told of the chunk.

    Never empty where `rows` is not: a chunk of at least one token, or, where prompts are not cut,
    the first prompt alone however long it is.
    """
    chosen: list[tuple[int, int]] = []
    budget = limits.token_budget
    for row in rows[: limits.max_prefill_seqs]:
        prefix.prepare(table, row)
        end = min(int(table.num_tokens[row]), int(table.stop[row]))
        missing = end - int(table.num_computed[row])
        assert missing > 0
        take = min(missing, budget) if limits.chunked_prefill else missing
        if take > budget and chosen:
            break
        prefix.picked(table, row, take)
        chosen.append((row, take))
        budget -= take
        if budget <= 0:
            break
    return chosen


def prefill_batch(
    table: SequenceTable, chosen: list[tuple[int, int]], step: int, blocks: BlockTables | None
) -> HostBatch:
    """The batch of these chunks: each sequence's next tokens from where it stands."""
    rows = np.array([row for row, _ in chosen])
    take = np.array([count for _, count in chosen], dtype=np.int64)
    start = table.num_computed[rows]
    pieces = [
        table.tokens[row][begin : begin + count]
        for row, begin, count in zip(rows, start, take, strict=True)
    ]
    return _batch(
        table,
        step,
        "prefill",
        rows,
        take,
        start + take,
        is_last_chunk=start + take == table.num_tokens[rows],
        token_ids=np.concatenate(pieces),
        num_drafts=np.zeros(rows.shape[0], np.int32),
        blocks=blocks,
    )


def pick_decodes(table: SequenceTable, limits: SchedulerLimits) -> np.ndarray:
    """Rows of a decode batch: those that waited longest, in the order of their admission."""
    rows = np.flatnonzero(table.phase == DECODE)
    longest_first = np.lexsort((table.order[rows], table.turn[rows]))
    rows = rows[longest_first[: limits.max_decode_seqs]]
    return rows[np.argsort(table.order[rows])]


def drafts_of(table: SequenceTable, rows: np.ndarray, limits: SchedulerLimits) -> np.ndarray:
    """Drafts of each sequence's next step, int32 [num_seqs], cut so that no position passes
    max_seq_len - 1 and no draft, once accepted, passes the tokens that the request asked for."""
    position = table.num_tokens[rows] - 1
    room = np.minimum(
        table.max_tokens[rows] - table.num_tokens[rows], limits.max_seq_len - 1 - position
    )
    return np.minimum(table.num_drafts[rows], room).astype(np.int32)


def decode_batch(
    table: SequenceTable,
    rows: np.ndarray,
    limits: SchedulerLimits,
    step: int,
    blocks: BlockTables | None,
) -> HostBatch:
    """The batch of one step of these sequences: the last token and its drafts."""
    position = table.num_tokens[rows] - 1
    num_drafts = drafts_of(table, rows, limits)
    table_of_tokens = np.concatenate([table.last_token[rows, None], table.drafts[rows]], axis=1)
    used = np.arange(table_of_tokens.shape[1]) <= num_drafts[:, None]
    take = num_drafts.astype(np.int64) + 1
    return _batch(
        table,
        step,
        "decode",
        rows,
        take,
        position + take,
        is_last_chunk=np.ones(rows.shape[0], bool),
        token_ids=table_of_tokens[used],
        num_drafts=num_drafts,
        blocks=blocks,
    )


def _batch(
    table: SequenceTable,
    step: int,
    kind: str,
    rows: np.ndarray,
    take: np.ndarray,
    seqlens_k: np.ndarray,
    *,
    is_last_chunk: np.ndarray,
    token_ids: np.ndarray,
    num_drafts: np.ndarray,
    blocks: BlockTables | None,
) -> HostBatch:
    cu = np.concatenate([[0], np.cumsum(take)])
    first = np.repeat(seqlens_k - take - cu[:-1], take)
    return HostBatch(
        step=step,
        kind=kind,
        request_ids=tuple(table.ids[row] for row in rows),
        slots=rows.astype(np.int32),
        state_ids=table.state_id[rows],
        cu_seqlens_q=cu.astype(np.int32),
        seqlens_k=seqlens_k.astype(np.int32),
        is_last_chunk=is_last_chunk,
        token_ids=token_ids.astype(np.int32, copy=False),
        positions=(first + np.arange(cu[-1])).astype(np.int32),
        token_state_ids=np.repeat(table.state_id[rows], take),
        num_drafts=num_drafts,
        start_positions=table.start[rows].astype(np.int32),
        swa_valid_start=table.swa_valid_start[rows].astype(np.int32),
        first_outputs=table.first_output[rows].astype(np.int32),
        block_tables=None if blocks is None else blocks.rows(table.state_id[rows]),
    )
