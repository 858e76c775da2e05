"""Which attention kernels serve a layer: what the launchers choose, asked beforehand."""

from ..layouts.rope import Rope
from ..layouts.slots import RingKind, SlotLayout
from .ring_access import ring_access


def attention_variant(
    backend: str,
    layout: SlotLayout,
    layer: int,
    num_q_heads: int,
    *,
    softmax_scale: float,
    rope_out: Rope | None = None,
    kind: RingKind = "swa",
) -> str:
    """On backend "cuda": "gqa" for rings of K and V, whose decode is the same kernel on every GPU,
    "sm_90a" or "portable" for latent ones on the current GPU. Else the backend's name.

    Raises LayoutError where the layer has no such ring.
    """
    if backend != "cuda":
        return backend
    from .cuda.attention_shapes import choose_variant
    from .cuda.window_decode_sm90 import supports
    from .device.probe import current_device

    access = ring_access("attention_variant", layout, layer, kind)
    if not access.format.latent:
        return "gqa"
    hopper = supports(access, num_q_heads, rope_out, softmax_scale)
    return choose_variant("attention_variant", current_device(), hopper, None)
