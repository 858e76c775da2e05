"""What an engine takes of its device when it is made."""

from typing import Any

import numpy as np

from ..layouts.config import Config
from ..rawkernels.memory import Memory
from ..rawkernels.operations import Backend, load_operations
from .activations import seeded_sinks
from .nvtx_ranges import load_ranges
from .paged_pool import take_paged
from .slab import take_slab
from .step import StepTools
from .watch import Watch
from .workspace import EngineSizes, take_workspace


def take_tools(cfg: Config, sizes: EngineSizes, memory: Memory, backend: Backend) -> StepTools:
    """Slab, paged pool, workspace and sinks, and the operations that work on them; within the
    memory's scope. Raises DeviceMemoryError where something does not fit."""
    slab = take_slab(cfg.slot_layout, sizes.slab_bytes, memory)
    paged = take_paged(cfg, sizes.paged, sizes.num_state_slots, memory, backend)
    return StepTools(
        ops=load_operations(backend),
        layout=cfg.slot_layout,
        slab=slab,
        workspace=take_workspace(cfg, sizes, memory),
        sinks=[upload_sink(memory, sink) for sink in seeded_sinks(cfg)],
        watch=Watch(load_ranges(), memory),
        stream=None,  # the current one: `memory.scope` makes the engine's own current
        paged=paged,
    )


def upload_sink(memory: Memory, sink: np.ndarray | None) -> Any:
    """A layer's sink on the device, float32 [num_q_heads]; None where it has none."""
    if sink is None:
        return None
    array = memory.empty(sink.shape, np.float32)
    memory.upload(array, sink)
    return array
