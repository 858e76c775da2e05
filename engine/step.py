"""Attention of one layer for one batch: store and attend, in the order that each kind needs."""

from dataclasses import dataclass
from typing import Any

from ..layouts.config import LayerConfig
from ..layouts.slots import SlotLayout
from ..rawkernels.operations import Operations
from ..schedules.batch import Batch, BatchArrays
from .attention_options import window_options
from .paged_pool import PagedPool
from .snapshot_stage import SnapshotStage
from .step_global import attend_global
from .watch import Watch
from .workspace import Workspace, plan_key


@dataclass(frozen=True)
class StepTools:
    """What a step works with; the same for every layer and batch of an engine."""

    ops: Operations
    layout: SlotLayout
    slab: Any
    workspace: Workspace
    sinks: list[Any]  # float32 [num_q_heads] of each layer, or None
    watch: Watch
    stream: Any
    paged: PagedPool | None = None  # of global layers
    stage: SnapshotStage | None = None  # where a prefix cache takes snapshots inside chunks


def attend_layer(
    tools: StepTools, layer: LayerConfig, batch: Batch, q: Any, kv: Any, out: Any, lse: Any
) -> None:
    """Fills out [T, num_q_heads, head_dim] and lse [T, num_q_heads] of one layer and stores the
    batch's records in the layer's rings or pages. kv: [T, head_dim], or (k, v)."""
    if layer.kind == "global":
        attend_global(tools, layer, batch, q, kv, out, lse)
    elif batch.kind == "decode":
        _attend_decode(tools, layer, batch, q, kv, out, lse)
    else:
        _attend_prefill(tools, layer, batch, q, kv, out, lse)


def _attend_decode(
    tools: StepTools, layer: LayerConfig, batch: Batch, q: Any, kv: Any, out: Any, lse: Any
) -> None:
    """`ring_store` puts the step's records into their rings, then `window_decode` reads them."""
    ops, stream, size = tools.ops, tools.stream, batch.num_tokens
    arrays = batch.on_device
    with tools.watch.op("ring_store", layer.id, size):
        ops.ring_store(
            tools.slab,
            tools.layout,
            layer.id,
            kv,
            arrays.token_state_ids,
            arrays.positions,
            rope=layer.rope,
            stream=stream,
        )
    with tools.watch.op("window_decode", layer.id, size):
        ops.window_decode(
            q,
            tools.slab,
            tools.layout,
            layer.id,
            batch.plans[plan_key(layer, "decode")],
            out,
            lse,
            **window_options(layer, tools.sinks[layer.id]),
            **tools.workspace.scratch.decode_options,
            stream=stream,
        )


def _attend_prefill(
    tools: StepTools, layer: LayerConfig, batch: Batch, q: Any, kv: Any, out: Any, lse: Any
) -> None:
    """The joint buffer takes the history of each sequence and the batch's new records; attention
    reads it, and the last of the same new records go into the rings."""
    ops, stream, size = tools.ops, tools.stream, batch.num_tokens
    arrays = batch.on_device
    plan = batch.plans[plan_key(layer, "prefill")]
    record_format = layer.record_format
    rows = plan.history_rows + size
    joint = tools.workspace.joint_rows(rows, record_format.record_bytes)
    new_records = joint[plan.history_rows :]
    with tools.watch.op("load_history", layer.id, size):
        ops.load_history(tools.slab, tools.layout, layer.id, plan, joint, stream=stream)
    with tools.watch.op("encode_records", layer.id, size):
        ops.encode_records(
            kv,
            arrays.positions,
            new_records,
            record_format=record_format,
            rope=layer.rope,
            stream=stream,
        )
    with tools.watch.op("window_prefill", layer.id, size):
        ops.window_prefill(
            q,
            joint,
            plan,
            record_format,
            out,
            lse,
            **window_options(layer, tools.sinks[layer.id]),
            **tools.workspace.scratch.prefill_options,
            stream=stream,
        )
    with tools.watch.op("store_records", layer.id, size):
        ops.store_records(
            tools.slab,
            tools.layout,
            layer.id,
            new_records,
            arrays.token_state_ids,
            arrays.positions,
            stage=_stage_of(tools, layer, arrays),
            stream=stream,
        )


def _stage_of(tools: StepTools, layer: LayerConfig, arrays: BatchArrays) -> tuple | None:
    """Where snapshots of boundaries inside the batch's chunks take a layer's records before them;
    None where there are none, or they do not hold the layer's ring."""
    if arrays.staged_places is None or layer.id not in tools.stage.layers:
        return None
    return tools.stage.slab, arrays.staged_places
