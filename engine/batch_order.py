"""Which batch is open, and which layers it and the batches before it lack."""

from collections.abc import Iterable

from ..layouts.errors import BatchError
from ..schedules.batch import Batch, HostBatch
from .decode_inputs import StepArrays


class BatchOrder:
    """Calls in their order: one batch at a time, each layer of it once, and none that was left out
    of an earlier batch of the same sequence, whose records it would lack."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.host: HostBatch | None = None  # the scheduler's batch, and
        self.batch: Batch | None = None  # ours; both None while none is open
        self.step: StepArrays | None = None  # the open batch in the fixed buffers, if it is
        self._attended: set[int] = set()
        self._missing: dict[int, set[int]] = {}  # layer: state ids that lack records of it

    def open(self, host: HostBatch, batch: Batch) -> None:
        """A batch begins; sequences that begin with it lack nothing."""
        fresh = host.state_ids[host.is_first_chunk].tolist()
        for states in self._missing.values():
            states.difference_update(fresh)
        self._missing = {layer: states for layer, states in self._missing.items() if states}
        self.host, self.batch, self._attended = host, batch, set()

    def close(self) -> None:
        """The open batch, if any, is over."""
        self.host = self.batch = self.step = None

    def attended(self, layers: Iterable[int]) -> None:
        """Layers of the open batch are stored and attended."""
        self._attended.update(layers)

    def lacking(self) -> set[int]:
        """State ids that lack records of some layer, those of the open batch that is about to be
        closed included."""
        for layer in range(self._num_layers):
            if layer not in self._attended:
                states = self._missing.setdefault(layer, set())
                states.update(self.batch.state_ids.tolist())
        return set().union(*self._missing.values())

    def check_none_open(self) -> None:
        """Raises BatchError while a batch is open."""
        if self.batch is not None:
            raise BatchError(
                f"next_batch: batch {self.batch.step} is not committed; call commit first, or "
                "abort_all"
            )

    def check_open(self, call: str, batch: Batch) -> None:
        """Raises BatchError for a batch that is not the open one; the open one in the fixed buffers
        will do, but for commit."""
        if self.batch is None:
            raise BatchError(f"{call}: no batch is open; call next_batch first")
        padded = None if self.step is None else self.step.batch
        is_padded = batch is padded and padded is not None and call != "commit"
        if batch is not self.batch and not is_padded:
            step = getattr(batch, "step", None)
            raise BatchError(
                f"{call}: batch {step} is not the open one ({self.batch.step}); a batch is used "
                "until it is committed, and never after"
            )

    def check_layer(self, layer: int, *, again: bool) -> None:
        """Raises BatchError for a layer that was attended already, or that lacks records.

        `again`: a layer that was attended already may be so once more: what it stores is the same,
        and a capture stores nothing.
        """
        if layer in self._attended and not again:
            step = self.batch.step
            raise BatchError(f"attend: layer {layer} was attended already in batch {step}")
        self.check_records((layer,))

    def check_records(self, layers: Iterable[int]) -> None:
        """Raises BatchError where one of the layers lacks records of the open batch's sequences."""
        batch = self.batch
        for layer in self._missing.keys() & set(layers):  # rarely any
            hit = self._missing[layer].intersection(batch.state_ids.tolist())
            if hit:
                row = batch.state_ids.tolist().index(min(hit))
                raise BatchError(
                    f"attend: layer {layer} was left out of an earlier batch of request "
                    f"{batch.request_ids[row]!r}, so its records are missing; attend every layer "
                    "of every batch"
                )
