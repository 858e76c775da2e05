"""load_history: the window before each prefill chunk, out of the rings into one buffer."""

from typing import Any

import numpy as np

from ..layouts.plans import PrefillPlan
from ..layouts.slots import RingKind, SlotLayout
from .arrays import as_array, backend_of, empty_like_backend
from .checks import check_plan
from .operations import operation
from .ring_access import ring_access


def load_history(
    slab: Any,
    layout: SlotLayout,
    layer: int,
    plan: PrefillPlan,
    out: Any = None,
    *,
    kind: RingKind = "swa",
    stream: Any = None,
) -> Any:
    """Records of the `window` positions before each sequence's chunk, uint8
    [num_seqs * window, record_bytes]; returns `out`.

    slab: flat uint8. Missing positions are records of zeros. Records are whole (of each part the
    values, then the scales) even where the ring is planar. `out` may have more rows; those past the
    history are untouched, so the joint buffer of a layer can be passed.
    Raises ArgumentError for other shapes, or a plan made for another ring_len.
    """
    check_plan("load_history", plan, PrefillPlan)
    slab = as_array(slab, "slab")
    if out is None:
        record_bytes = ring_access("load_history", layout, layer, kind).format.record_bytes
        out = empty_like_backend((plan.history_rows, record_bytes), np.uint8, slab)
    target = as_array(out, "out")
    operation(backend_of(slab=slab, out=target, segments=plan.segments), "load_history")(
        slab, layout, layer, plan, target, kind=kind, stream=stream
    )
    return out
