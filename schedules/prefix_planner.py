"""Prefix caching as the scheduler sees it: where an admitted sequence begins, where its chunks end,
and which snapshots and restores follow from a step. Host logic only: what moves bytes reads the
orders that are left here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layouts.errors import RequestError
from ..layouts.sizes import align_down, is_count
from .blocks import BlockTables
from .prefix_index import Entry, PrefixIndex
from .prefix_keys import extend_keys, keys_of_hash_ids
from .prefix_orders import (
    RINGS,
    Claim,
    PlannerCounters,
    RestoreOrder,
    SnapshotOrder,
    Stage,
    StagedBoundary,
)
from .prefix_rules import Resume, ResumeRule
from .table import DECODE, NO_STOP, WAITING, SequenceTable


@dataclass
class _Row:
    """What is known of a live row: keys of its whole blocks so far, and its hit."""

    keys: list[bytes]
    claim: Claim | None = None
    replaying: Claim | None = None
    counted: bool = False
    probed: int = 0  # keys that the store was asked for


class PrefixPlanner:
    """rule        of the model and contract
    index       what is cached
    block_size  tokens of a block, a multiple of rule.ratio
    interval    blocks between snapshots
    root        the key of the empty prefix
    fetch       the snapshot of the prefix that keys[blocks - 1] names, or None where something of
                it is gone, which the index has forgotten then; called when a request is about to be
                admitted, so that what cannot be read is a miss and not a broken slot
    probe       enters a prefix that a store which outlives the index may have, and says whether it
                has it; None without such a store
    stage       None: a chunk ends where a snapshot is due. Else it ends only where the stage has no
                place for it, or the boundary comes too soon after the chunk's first token
    """

    def __init__(
        self,
        rule: ResumeRule,
        index: PrefixIndex,
        *,
        block_size: int,
        interval: int,
        root: bytes,
        fetch: Callable[[Sequence[bytes], int], Any],
        probe: Callable[[Sequence[bytes], int], bool] | None = None,
        stage: Stage | None = None,
    ) -> None:
        assert block_size % rule.ratio == 0
        self.rule, self.index, self.root = rule, index, root
        self.block_size, self.interval = block_size, interval
        self.fetch, self.probe = fetch, probe
        self._step = block_size * interval  # tokens from one snapshot to the next
        assert stage is None or self._step >= stage.ring_len  # they share no tokens
        self.stage = stage
        self.staged: list[StagedBoundary] = []  # of the batch in flight
        self.counters = PlannerCounters()
        self.snapshots: list[SnapshotOrder] = []
        self.restores: list[RestoreOrder] = []
        # Every key of a prompt so far, where a run asks for `best_blocks`: it only grows.
        self.seen: set[bytes] | None = None
        self._rows: dict[int, _Row] = {}
        self._tables: BlockTables | None = None

    @property
    def idle(self) -> bool:
        """No request is live."""
        return not self._rows

    def bind(self, blocks: BlockTables | None) -> None:
        self._tables = blocks

    def check(self, id: str, prompt: np.ndarray, hash_ids: Sequence[int]) -> None:
        """Raises RequestError where hash ids are given and do not cover the prompt's blocks, or are
        no integers of 64 bits."""
        blocks = len(prompt) // self.block_size  # whole ones
        if not hasattr(hash_ids, "__len__"):
            raise RequestError(f"request {id!r}: hash_ids={hash_ids!r:.80} but must be a sequence")
        wrong = [n for n in hash_ids if not is_count(n) or not 0 <= n < 2**64]
        if wrong:
            raise RequestError(
                f"request {id!r}: hash id {wrong[0]!r:.80} but must be an integer in 0 .. 2^64 - 1"
            )
        if 0 < len(hash_ids) < blocks:
            raise RequestError(
                f"request {id!r}: {len(hash_ids)} hash_ids for {blocks} whole blocks of "
                f"{self.block_size} tokens"
            )

    def submitted(self, row: int, prompt: np.ndarray, hash_ids: Sequence[int]) -> None:
        """A new row of the table, which `check` has passed."""
        blocks = len(prompt) // self.block_size  # whole ones
        keys = keys_of_hash_ids(self.root, hash_ids, blocks)
        extend_keys(keys, self.root, prompt, self.block_size)
        self._rows[row] = _Row(keys)
        self.counters.whole_blocks += blocks
        if self.seen is not None:
            known = next((k for k, key in enumerate(keys) if key not in self.seen), blocks)
            self.counters.best_blocks += known
            self.seen.update(keys)

    def picking(self) -> None:
        """Before a batch is picked: what an earlier one left is void. Slots and places have moved
        on."""
        self.staged, self.snapshots = [], []

    def prepare(self, table: SequenceTable, row: int) -> None:
        """Before a chunk of a row is cut: a waiting row gets its start, every row the position
        where its chunk must end."""
        state = self._rows[row]
        if table.phase[row] == WAITING:
            self._look_up(table, row, state)
        table.stop[row] = self._stop(table, row, state)

    def picked(self, table: SequenceTable, row: int, count: int) -> None:
        """A row gets a chunk: what is due inside it is staged. What is due at its end is taken from
        the slot."""
        if self.stage is None:
            return
        state, at = self._rows[row], int(table.num_computed[row])
        if self._replay_end(state, at) is not None:
            return
        for boundary in self._due(state, at, at + count - 1):
            self.staged.append(StagedBoundary(row, boundary, len(self.staged)))

    def admitted(self, table: SequenceTable, row: int) -> None:
        """A row got its state slot, and begins where `prepare` put it."""
        state = self._rows[row]
        claim, state.claim = state.claim, None
        if claim is not None and claim.resume.restore_first:
            state_id = int(table.state_id[row])
            pages = self._pages(state_id, claim.blocks)
            self.restores.append(RestoreOrder(row, state_id, claim.snapshot, pages))
        elif claim is not None:
            state.replaying = claim
        self._count(state, claim)

    def _count(self, state: _Row, claim: Claim | None) -> None:
        """An admission, and the hit that it began with."""
        counters = self.counters
        counters.admissions += 1
        is_new, state.counted = not state.counted, True  # the hits of a preempted row are its own
        self.index.count_lookup(state.keys)
        if claim is None:
            return
        self.index.use(state.keys, claim.blocks)
        if is_new:
            counters.hits += 1
            counters.hit_blocks += claim.blocks
            counters.hit_tokens += claim.resume.boundary
        counters.replayed_tokens += claim.resume.boundary - claim.resume.start

    def advanced(self, table: SequenceTable, rows: np.ndarray, starts: np.ndarray) -> None:
        """Rows have computed positions starts .. num_computed - 1, which their slots hold now."""
        staged, self.staged = self.staged, []
        live = set(rows.tolist())
        for one in staged:
            if one.row in live:
                self._order(table, one.row, one.boundary, one.place)
        step = self._step
        passed = table.num_computed[rows] // step > starts // step  # whole steps: rounded down
        looked_at = passed | (starts < table.first_output[rows])
        for i in np.flatnonzero(looked_at).tolist():
            self._advance(table, int(rows[i]), int(starts[i]))

    def _advance(self, table: SequenceTable, row: int, before: int) -> None:
        """Leaves the orders of a row that passed a boundary, or replays."""
        state, after = self._rows[row], int(table.num_computed[row])
        claim = state.replaying
        if claim is not None:
            # Until the boundary the rings hold a replay, of which no snapshot may be taken.
            assert after <= claim.resume.boundary
            if after == claim.resume.boundary:
                self.restores.append(RestoreOrder(row, int(table.state_id[row]), claim.snapshot))
                state.replaying = None
            return
        boundary = align_down(after, self._step)
        # A decode step may be past its boundary by its kept drafts. What a chunk passes was cached
        # when it was cut, or is staged.
        if boundary <= before or (boundary < after and table.phase[row] != DECODE):
            return
        self._extend(table, row, state)
        if not self._is_cached(state, boundary):
            self._order(table, row, boundary)

    def _order(
        self, table: SequenceTable, row: int, boundary: int, place: int | None = None
    ) -> None:
        """Leaves the order of a snapshot."""
        state_id, blocks = int(table.state_id[row]), self._index_of(boundary) + 1
        pages = self._pages(state_id, blocks)
        keys = self._rows[row].keys
        self.snapshots.append(SnapshotOrder(state_id, keys, blocks, pages, place))

    def preempted(self, row: int) -> None:
        """A row lost its slot."""
        state = self._rows[row]
        state.claim = state.replaying = None
        self._forget_restores(row)

    def ended(self, row: int) -> None:
        """A row is free."""
        del self._rows[row]
        self._forget_restores(row)

    def _forget_restores(self, row: int) -> None:
        """A row's slot may be another's before a copy into it is made."""
        self.restores = [order for order in self.restores if order.row != row]

    def take_snapshots(self) -> list[SnapshotOrder]:
        orders, self.snapshots = self.snapshots, []
        return orders

    def _look_up(self, table: SequenceTable, row: int, state: _Row) -> None:
        """Puts a waiting row behind the longest prefix that it can use."""
        self._extend(table, row, state)
        claim = self._find(state, int(table.num_tokens[row]))
        state.claim = claim
        resume = Resume(0, 0, 0, 0, restore_first=False) if claim is None else claim.resume
        table.num_computed[row] = table.start[row] = resume.start
        table.swa_valid_start[row] = resume.swa_valid_start
        table.first_output[row] = resume.first_output

    def _find(self, state: _Row, num_tokens: int) -> Claim | None:
        if self.probe is not None and state.probed < len(state.keys):
            self._adopt(state)
        while True:
            blocks, resume = self._longest(state.keys, num_tokens)
            if resume is None:
                return None
            if state.claim is not None and state.claim.blocks == blocks:
                return Claim(resume, blocks, state.claim.snapshot)
            snapshot = self.fetch(state.keys, blocks)
            if snapshot is not None:
                return Claim(resume, blocks, snapshot)
            self.counters.failed_reads += 1

    def _longest(self, keys: list[bytes], num_tokens: int) -> tuple[int, Resume | None]:
        """Blocks of the longest prefix that is worth using, and how; 0 and None where none is."""
        for blocks in self.index.boundaries(keys):
            resume = self.rule.resume(blocks * self.block_size, num_tokens)
            if resume is not None:
                return blocks, resume
        return 0, None

    def _pages(self, state_id: int, blocks: int) -> np.ndarray | None:
        """Pages that hold the first `blocks` blocks of the sequence in a state slot, int32; a
        copy."""
        if self._tables is None:
            return None
        pages = self._tables.blocks_of(blocks * self.block_size)
        return self._tables.tables[state_id, :pages].copy()

    def _adopt(self, state: _Row) -> None:
        """Enters the longest prefix that the store has from elsewhere; each key is asked for once a
        request, since a store may be a network away."""
        keys, asked = state.keys, state.probed
        state.probed = len(keys)
        for blocks in range(len(keys), asked, -1):
            if blocks % self.interval:
                continue
            if Entry(RINGS, keys[blocks - 1]) in self.index:
                return
            if self.probe(keys, blocks):
                return

    def _stop(self, table: SequenceTable, row: int, state: _Row) -> int:
        """Where the next chunk of a row must end: at the boundary of its replay, or at the first
        one where a snapshot is due that cannot be staged."""
        at, known = int(table.num_computed[row]), int(table.num_tokens[row])
        end = self._replay_end(state, at)
        if end is not None:
            return end
        places = 0 if self.stage is None else self.stage.places - len(self.staged)
        for boundary in self._due(state, at, known):
            if places == 0 or boundary - at < self.stage.ring_len:
                return boundary
            places -= 1
        return NO_STOP

    def _replay_end(self, state: _Row, at: int) -> int | None:
        """The boundary up to which a row at position `at` rebuilds its rings, if it does."""
        claim = state.claim or state.replaying
        return claim.resume.boundary if claim is not None and at < claim.resume.boundary else None

    def _due(self, state: _Row, at: int, last: int) -> Iterator[int]:
        """Boundaries in at + 1 .. last of which there is no snapshot, and none is staged."""
        staged = {self._rows[one.row].keys[self._index_of(one.boundary)] for one in self.staged}
        step = self._step
        for boundary in range(align_down(at, step) + step, last + 1, step):
            is_staged = state.keys[self._index_of(boundary)] in staged
            if not is_staged and not self._is_cached(state, boundary):
                yield boundary

    def _is_cached(self, state: _Row, boundary: int) -> bool:
        return Entry(RINGS, state.keys[self._index_of(boundary)]) in self.index

    def _index_of(self, boundary: int) -> int:
        """Of the key that names the prefix up to a boundary."""
        return boundary // self.block_size - 1  # exact: boundaries are whole blocks

    def _extend(self, table: SequenceTable, row: int, state: _Row) -> None:
        extend_keys(state.keys, self.root, table.known(row), self.block_size)
