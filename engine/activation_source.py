"""What an activation source is: a struct of functions, so that the step loop and the verification
ask the same one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..schedules.batch import Batch


@dataclass(frozen=True)
class ActivationSource:
    """kind: "seeded", "stacked" or "file".

    fill(layer, batch, q, kv, previous)          fills uint16 q [T, H, D] and kv, [T, D] or the
                                                 pair (k, v), on the engine's device; `previous` is
                                                 the output of the layer before (used by "stacked"
                                                 above layer 0)
    rows(layer, request_id, token_ids, positions, previous, q_from=0) -> (q, kv)
                                                 the same numbers on the host, by the reference; q
                                                 of positions[q_from:] only
    prepare(batch)                               what `fill` needs of a batch's host side; called
                                                 once a batch, before its first layer
    check_lengths(ids, lengths)                  ActivationError where a request has more positions
                                                 than the source
    on_device   `fill` queues device work only, so that a step can be captured in a graph
    """

    kind: str
    on_device: bool
    fill: Callable[[int, Batch, Any, Any, Any], None]
    rows: Callable[..., tuple[np.ndarray, Any]]
    prepare: Callable[[Batch], None]
    check_lengths: Callable[[list[str], list[int]], None]
