"""Attention of a global layer: its new records go into the paged pool, then all are read.

A prefill reads them back as K and V of whole sequences, so that it sees the numbers that decode
steps will read, and attends without a window.
"""

from typing import Any

from ..layouts.config import LayerConfig
from ..schedules.batch import Batch
from .attention_options import score_options


def attend_global(
    tools: Any, layer: LayerConfig, batch: Batch, q: Any, kv: Any, out: Any, lse: Any
) -> None:
    """Fills out [T, num_q_heads, head_dim] and lse [T, num_q_heads]; kv = (k, v). `tools` are the
    engine's `StepTools`."""
    paged, arrays = tools.paged, batch.on_device
    ops = paged.ops
    size, stream = batch.num_tokens, tools.stream
    options = {**score_options(layer, tools.sinks[layer.id]), "stream": stream}
    with tools.watch.op("paged_store", layer.id, size):
        ops["paged_store"](
            paged.pool,
            paged.layout,
            layer.id,
            kv,
            arrays.block_tables,
            arrays.token_seq_ids,
            arrays.positions,
            rope=layer.rope,
            stream=stream,
        )
    if batch.kind == "decode":
        with tools.watch.op("paged_decode", layer.id, size):
            ops["paged_decode"](
                q,
                paged.pool,
                paged.layout,
                layer.id,
                arrays.block_tables,
                arrays.token_seq_ids,
                arrays.positions,
                out,
                lse,
                **tools.workspace.scratch.decode_options,
                **options,
            )
        return
    num_keys = int(batch.seqlens_k.sum())
    k, v = paged.k[:num_keys], paged.v[:num_keys]
    with tools.watch.op("paged_load", layer.id, num_keys):
        ops["paged_load"](
            paged.pool,
            paged.layout,
            layer.id,
            arrays.block_tables,
            arrays.cu_seqlens_k,
            k,
            v,
            stream=stream,
        )
    with tools.watch.op("window_attention", layer.id, size):
        ops["window_attention"](
            q, k, v, arrays.cu_seqlens_q, arrays.cu_seqlens_k, out, lse, window=None, **options
        )
