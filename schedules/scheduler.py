"""The scheduler: which sequences run in the next batch, and what becomes of them after it.

Pure host logic: no plans, no device, no model. One batch is in flight at a time.
"""

from typing import Any

import numpy as np

from ..layouts.errors import BatchError, RequestError
from .advance import append_results, begin_next_steps
from .batch import HostBatch
from .batch import Request as Request
from .blocks import BlockTables
from .counters import SchedulerCounters
from .limits import SchedulerLimits as SchedulerLimits
from .limits import check_request
from .pick import decode_batch, drafts_of, pick_chunks, pick_decodes, prefill_batch
from .prefix_hooks import NoPrefix, PrefixHooks
from .results import Ended, InFlight, check_results
from .room import Room
from .table import DECODE, PHASE_NAMES, PREFILL, WAITING, SequenceTable


class Scheduler:
    """Prefill and decode batches over a fixed number of state slots.

    Admission is first come, first served: a request takes a slot when one is free and all requests
    before it have one. Chunks are given out in the order of admission, so the oldest prompt always
    moves on: with a slot free, a request whose prompt has P tokens of others before it starts in
    the prefill batch number P / token_budget + 1 at the latest (rounded up; where the number of
    sequences in a batch does not bind before), and as prefill and decode alternate when both wait,
    within twice as many steps. A decoding sequence waits for at most one prefill batch between two
    decode batches, and where more decode than fit in a batch, those that waited longest go first.

    A slot serves one sequence after another without being cleared: a sequence starts (and, after a
    preemption, starts again) at position 0, and its plans never reach below it; or, after a prefix
    hit, behind what is restored into the slot or counts as missing (prefix_planner.py).

    Slots, and the blocks of a paged pool, are given out and taken back in room.py.

    What ended stays readable (`tokens`, `state`) until its id is submitted again or `forget`.
    """

    def __init__(self, limits: SchedulerLimits, prefix: PrefixHooks | None = None) -> None:
        self.limits = limits
        self._prefix = NoPrefix() if prefix is None else prefix
        self.counters = SchedulerCounters()
        self._draft_columns = limits.tokens_per_step - 1
        self._table = SequenceTable(self._draft_columns)
        self._row_of: dict[str, int] = {}
        self._room = Room(limits, self._table)
        self.blocks: BlockTables | None = self._room.blocks
        self._prefix.bind(self.blocks)
        self._ended: dict[str, Ended] = {}
        self._in_flight: InFlight | None = None
        self._steps = 0
        self._last_kind = "decode"

    @property
    def done(self) -> bool:
        """Nothing waits, nothing runs, and no batch is in flight."""
        return not self._row_of and self._in_flight is None

    @property
    def in_flight(self) -> HostBatch | None:
        """The batch that was given out last, where it is not committed."""
        return None if self._in_flight is None else self._in_flight.batch

    @property
    def free_slots(self) -> int:
        """State slots that no sequence holds."""
        return self._room.free_slots

    @property
    def free_blocks(self) -> int | None:
        """Blocks of the paged pool that no sequence holds; None where nothing is paged."""
        return None if self.blocks is None else self.blocks.num_free

    @property
    def num_waiting(self) -> int:
        """Requests without a state slot, preempted ones included."""
        return len(self._room.queue)

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue.

        Raises RequestError, and changes nothing, for an id that is live, a prompt that is empty,
        negative or outside the vocabulary, or more tokens than max_seq_len or the paged pool holds,
        with both numbers.
        """
        limits = self.limits
        try:
            prompt = check_request(
                request, limits.max_seq_len, limits.vocab_size, limits.paged_tokens
            )
            self._prefix.check(request.id, prompt, request.hash_ids)
            if request.id in self._row_of:
                raise RequestError(
                    f"request {request.id!r} is {self.state(request.id)}; wait until it ends, "
                    "abort it, or use another id"
                )
        except RequestError:
            self.counters.refused += 1
            raise
        row = self._table.add(request.id, prompt, int(request.max_new_tokens))
        self._prefix.submitted(row, prompt, request.hash_ids)
        self._ended.pop(request.id, None)
        self._row_of[request.id] = row
        self._room.queue.append(row)
        self.counters.submitted += 1

    def abort(self, id: str) -> None:
        """End a request in whatever state it is; its slot is free at once. What a batch in flight
        computes for it is dropped. Aborting what has ended does nothing. Raises RequestError for an
        id that was never submitted (or forgotten)."""
        if self._has_ended(id):
            return
        self._end(self._row(id, "abort"), "aborted")

    def abort_all(self) -> None:
        """End every request, and the batch in flight with them: nothing of it is computed."""
        self._in_flight = None
        for id in list(self._row_of):
            self.abort(id)

    def preempt(self, id: str) -> None:
        """Take a running request's slot and put it at the head of the queue. It keeps its generated
        tokens; prompt and generated tokens are computed again from position 0, or from the end of a
        cached prefix. What a batch in flight computes for it is dropped. Raises RequestError for a
        request that does not run."""
        row = self._row(id, "preempt")
        table = self._table
        if table.phase[row] == WAITING:
            raise RequestError(f"preempt: request {id!r} is waiting, it holds no state slot")
        self._send_back(row)

    def _send_back(self, row: int) -> None:
        table = self._table
        self._room.release(row)
        self.counters.preempted += 1
        self.counters.recomputed_tokens += int(table.num_computed[row] - table.start[row])
        table.phase[row] = WAITING
        table.rewind(row)
        self._prefix.preempted(row)
        table.epoch[row] += 1
        self._room.queue.appendleft(row)

    def next_batch(self) -> HostBatch | None:
        """The next batch to run, or None where nothing can. Prefill and decode alternate when both
        wait. Raises BatchError while a batch is in flight."""
        if self._in_flight is not None:
            raise BatchError(f"next_batch: batch {self._in_flight.batch.step} is not committed yet")
        self._prefix.picking()
        table = self._table
        prefills = table.rows_in(PREFILL).tolist()
        waiting = self._room.admissible()
        can_decode = bool(np.any(table.phase == DECODE))
        if (prefills or waiting) and (self._last_kind == "decode" or not can_decode):
            batch = self._prefill(prefills, waiting)
        elif can_decode:
            rows = self._decode_rows()
            if rows.size:
                batch = self._decode(rows)
            else:  # all of them gave way to older prompts, which have their blocks
                batch = self._prefill(table.rows_in(PREFILL).tolist(), [])
        else:
            return None
        self._last_kind = batch.kind
        self._steps += 1
        self._in_flight = InFlight(batch, table.epoch[batch.slots].copy())
        return batch

    def commit(
        self,
        batch: Any,
        accepted: Any,
        next_tokens: Any = None,
        drafts: Any = None,
        finished: Any = None,
    ) -> None:
        """Close the batch in flight (a `HostBatch`, or the `Batch` made of it).

        accepted     int [num_seqs]: drafts kept, 0 .. num_drafts; 0 in a prefill
        next_tokens  int [num_seqs]: the token after the kept ones, of each sequence with
                     is_last_chunk and tokens still to come; other values are not looked at. None
                     only where no sequence is due
        drafts       int [num_seqs, <= tokens_per_step - 1]: drafts of each sequence's next step,
                     then -1; None is no drafts
        finished     bool [num_seqs]: the sequence ends with the tokens of this step; None is none

        A sequence's next step starts at its position + accepted + 1. Tokens past max_new_tokens are
        dropped, and the sequence ends there. Sequences that were aborted or preempted since
        next_batch are passed over. So a batch whose computation failed is closed by preempting (or
        aborting) its requests and committing zeros.

        Raises BatchError for a batch that is not the one in flight and ArgumentError for shapes,
        dtypes and values; either changes nothing, the batch stays in flight.
        """
        flight = self._check_in_flight(batch)
        table, batch, rows = self._table, flight.batch, flight.batch.slots
        live = table.epoch[rows] == flight.epochs
        more = table.max_tokens[rows] > table.num_tokens[rows]
        due = live & batch.is_last_chunk & more
        results = check_results(
            batch,
            due,
            self._draft_columns,
            self.limits.vocab_size,
            accepted,
            next_tokens,
            drafts,
            finished,
        )
        self._in_flight = None
        kept, appended = append_results(table, batch, live, due, results)
        self.counters.drafts_accepted += kept
        self.counters.output_tokens += appended
        self._prefix.advanced(table, rows[live], (batch.seqlens_k - batch.seqlens_q)[live])
        for row in begin_next_steps(table, batch, live, due, results):
            self._end(row, "finished")

    def take_back(self, batch: HostBatch) -> None:
        """Close the batch in flight, of which nothing was computed: its requests are preempted and
        will be computed again. Raises BatchError for a batch that is not the one in flight."""
        flight = self._check_in_flight(batch)
        rows = flight.batch.slots
        live = rows[self._table.epoch[rows] == flight.epochs]
        for row in reversed(live.tolist()):  # so that the oldest is first in the queue again
            self._send_back(row)
        self.commit(batch, np.zeros(batch.num_seqs, np.int32))

    def tokens(self, id: str) -> np.ndarray:
        """Prompt and generated tokens so far, int32 [n]; a copy. Raises RequestError."""
        if self._has_ended(id):
            return self._ended[id].tokens.copy()
        return self._table.known(self._row(id, "tokens")).copy()

    def outputs(self, id: str) -> np.ndarray:
        """Generated tokens so far, int32 [n]; a copy. Raises RequestError."""
        if self._has_ended(id):
            ended = self._ended[id]
            return ended.tokens[ended.prompt_len :].copy()
        row = self._row(id, "outputs")
        return self._table.known(row)[self._table.prompt_len[row] :].copy()

    def state(self, id: str) -> str:
        """ "waiting" (also after a preemption), "prefill", "decode", "finished" or "aborted".
        Raises RequestError for an unknown id."""
        if self._has_ended(id):
            return self._ended[id].state
        return PHASE_NAMES[int(self._table.phase[self._row(id, "state")])]

    def forget(self, id: str) -> None:
        """Drop what is kept of a request that ended. Raises RequestError for any other."""
        if not self._has_ended(id):
            raise RequestError(f"forget: request {id!r} has not ended, or was never submitted")
        del self._ended[id]

    def _has_ended(self, id: str) -> bool:
        return isinstance(id, str) and id in self._ended  # a list cannot be looked up

    def _prefill(self, prefills: list[int], waiting: list[int]) -> HostBatch:
        """A batch of chunks: prompts that run, then those of `waiting` that have a chunk in it."""
        chosen = pick_chunks(self._table, prefills + waiting, self.limits, self._prefix)
        self._admit([row for row, _ in chosen[len(prefills) :]])
        batch = prefill_batch(self._table, chosen, self._steps, self.blocks)
        self.counters.prefill_batches += 1
        self.counters.prefill_tokens += batch.num_tokens
        return batch

    def _admit(self, rows: list[int]) -> None:
        """Gives rows, the first of the queue, their slots; none where one cannot have it."""
        admitted: list[int] = []
        try:
            for row in rows:
                self._room.admit(row)
                admitted.append(row)
                self._prefix.admitted(self._table, row)
        except BaseException:
            for row in reversed(admitted):
                self._send_back(row)
            raise

    def _decode(self, rows: np.ndarray) -> HostBatch:
        self._table.turn[rows] = self._steps
        batch = decode_batch(self._table, rows, self.limits, self._steps, self.blocks)
        self.counters.decode_batches += 1
        self.counters.decode_tokens += batch.num_tokens
        self.counters.drafts_offered += int(batch.num_drafts.sum())
        return batch

    def _decode_rows(self) -> np.ndarray:
        """Rows of a decode batch, with blocks for its tokens. Empty where every decoding sequence
        was preempted; then prompts run that are older."""
        table, limits = self._table, self.limits
        rows = pick_decodes(table, limits)
        if self.blocks is None:
            return rows
        while rows.size:
            seqlens = table.num_tokens[rows] + drafts_of(table, rows, limits)
            if (ready := self._room.grow(rows, seqlens, self._give_way)).size:
                return ready
            rows = pick_decodes(table, limits)
        return rows

    def _give_way(self, row: int) -> None:
        self._send_back(row)
        self.counters.block_preemptions += 1

    def _row(self, id: str, call: str) -> int:
        if not isinstance(id, str) or id not in self._row_of:
            raise RequestError(f"{call}: there is no request {id!r}")
        return self._row_of[id]

    def _end(self, row: int, state: str) -> None:
        table = self._table
        if table.phase[row] == WAITING:
            self._room.queue.remove(row)
        else:
            self._room.release(row)
        id = table.ids[row]
        self._ended[id] = Ended(state, table.known(row).copy(), int(table.prompt_len[row]))
        del self._row_of[id]
        table.free(row)
        self._prefix.ended(row)
        if state == "finished":
            self.counters.finished += 1
        else:
            self.counters.aborted += 1

    def _check_in_flight(self, batch: Any) -> InFlight:
        flight = self._in_flight
        if flight is None:
            raise BatchError("commit: no batch is in flight; call next_batch first")
        # An engine's batch holds the very arrays of ours; equal numbers are not enough.
        if getattr(batch, "state_ids", None) is not flight.batch.state_ids:
            step = getattr(batch, "step", None)
            raise BatchError(
                f"commit: batch step={step} is not the one in flight, step={flight.batch.step}"
            )
        return flight
