"""Where the scheduler asks a prefix cache, and what answers where there is none."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .blocks import BlockTables
from .table import SequenceTable


class PrefixHooks(Protocol):
    """What the scheduler calls. Rows are those of its table."""

    def bind(self, blocks: BlockTables | None) -> None:
        """The block tables of the scheduler; None where nothing is paged. Called once."""

    def check(self, id: str, prompt: np.ndarray, hash_ids: Sequence[int]) -> None:
        """Raises RequestError for hash ids that do not fit the prompt; changes nothing."""

    def submitted(self, row: int, prompt: np.ndarray, hash_ids: Sequence[int]) -> None:
        """A request that was checked has a row."""

    def picking(self) -> None:
        """A batch is about to be picked; what was picked before and never became a batch is void,
        and so is what an earlier one left to be done."""

    def prepare(self, table: SequenceTable, row: int) -> None:
        """A row's next chunk is about to be cut. Sets num_computed, start, swa_valid_start and
        first_output of a waiting row, and stop of any."""

    def picked(self, table: SequenceTable, row: int, count: int) -> None:
        """A row that was prepared gets a chunk of `count` tokens in the batch to come."""

    def admitted(self, table: SequenceTable, row: int) -> None:
        """A row has a state slot now, and begins where it was prepared."""

    def advanced(self, table: SequenceTable, rows: np.ndarray, starts: np.ndarray) -> None:
        """Rows have computed positions starts .. num_computed - 1; their slots still hold them."""

    def preempted(self, row: int) -> None:
        """A row has lost its slot, and waits."""

    def ended(self, row: int) -> None:
        """A row is free."""


class NoPrefix:
    """Every sequence begins at position 0, and its chunks end where the budget says."""

    def bind(self, blocks: BlockTables | None) -> None: ...

    def check(self, id: str, prompt: np.ndarray, hash_ids: Sequence[int]) -> None: ...

    def submitted(self, row: int, prompt: np.ndarray, hash_ids: Sequence[int]) -> None: ...

    def picking(self) -> None: ...

    def prepare(self, table: SequenceTable, row: int) -> None: ...

    def picked(self, table: SequenceTable, row: int, count: int) -> None: ...

    def admitted(self, table: SequenceTable, row: int) -> None: ...

    def advanced(self, table: SequenceTable, rows: np.ndarray, starts: np.ndarray) -> None: ...

    def preempted(self, row: int) -> None: ...

    def ended(self, row: int) -> None: ...
