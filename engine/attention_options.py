"""What attention operations are told of a layer: the configuration's words in the operations'."""

from typing import Any

from ..layouts.config import LayerConfig


def score_options(layer: LayerConfig, sink: Any) -> dict[str, Any]:
    """Options of every attention operation; sink float32 [num_q_heads], or None."""
    return {
        "softmax_scale": layer.softmax_scale,
        "softcap": layer.softcap or 0.0,  # null in a configuration
        "sink": sink,
    }


def window_options(layer: LayerConfig, sink: Any) -> dict[str, Any]:
    """Options of those that read windows of records, which may rotate their outputs back."""
    rope_out = layer.rope if layer.inverse_rope_out else None
    return {**score_options(layer, sink), "rope_out": rope_out}
