"""From the scheduler's batch to the engine's: plans, and arrays where the engine runs.

Plans are built on the host and travel in one copy with the batch's own arrays: a step then costs
one upload, where building them on the device costs a launch for each plan.
"""

from dataclasses import fields, replace

import numpy as np

from ..layouts.config import Config
from ..layouts.plans import DecodePlan, PrefillPlan
from ..schedules.batch import Batch, BatchArrays, HostBatch, PlanKey, with_plans
from ..schedules.limits import SchedulerLimits
from ..schedules.plan_decode import build_decode_plan
from ..schedules.plan_prefill import plan_prefill
from .paged_pool import PagedPool
from .workspace import Staging, plan_keys


def scheduler_limits(cfg: Config, num_state_slots: int) -> SchedulerLimits:
    """What a configuration and the number of an engine's state slots bound a schedule by."""
    engine, paged = cfg.engine, cfg.paged_layout
    return SchedulerLimits(
        num_state_slots=num_state_slots,
        token_budget=engine.token_budget,
        max_prefill_seqs=engine.max_prefill_seqs,
        max_decode_seqs=engine.max_decode_seqs,
        tokens_per_step=cfg.tokens_per_step,
        max_seq_len=cfg.max_seq_len,
        chunked_prefill=engine.chunked_prefill,
        vocab_size=cfg.vocab_size,
        num_blocks=engine.num_blocks,
        block_size=None if paged is None else paged.block_size,
    )


def build_batch(
    cfg: Config,
    host: HostBatch,
    staging: Staging,
    backend: str,
    paged: PagedPool | None = None,
    staged_places: np.ndarray | None = None,
) -> Batch:
    """The batch that `next_batch` returns. In a prefill the rows of the block tables are the
    batch's sequences, in a decode step state slots. staged_places: of the stage, by token."""
    plans = {key: _build_plan(host, key) for key in plan_keys(cfg, host.kind)}
    own = {
        "token_ids": host.token_ids,
        "positions": host.positions,
        "token_state_ids": host.token_state_ids,
        "cu_seqlens_q": host.cu_seqlens_q,
    }
    by_state = host.kind == "decode" and paged is not None
    if host.kind == "prefill" and paged is not None:
        own |= _paged_arrays(host)
    if staged_places is not None:
        own["staged_places"] = staged_places
    if backend != "cuda":
        arrays = BatchArrays(**own)
        return with_plans(host, plans, paged.name_states(arrays) if by_state else arrays)
    names = {key: _array_names(plan) for key, plan in plans.items()}
    planned = [getattr(plans[key], name) for key in plans for name in names[key]]
    uploaded = iter(staging.upload([*own.values(), *planned]))
    on_device = BatchArrays(**{name: next(uploaded) for name in own})
    on_device = paged.name_states(on_device) if by_state else on_device
    plans = {
        key: replace(plan, **{name: next(uploaded) for name in names[key]})
        for key, plan in plans.items()
    }
    return with_plans(host, plans, on_device)


def _paged_arrays(host: HostBatch) -> dict[str, np.ndarray]:
    """Sequence of each token, bounds of each sequence's keys, and the block tables, int32."""
    seqs = np.arange(host.num_seqs, dtype=np.int32)
    cu_seqlens_k = np.zeros(host.num_seqs + 1, np.int32)
    np.cumsum(host.seqlens_k, out=cu_seqlens_k[1:])
    return {
        "token_seq_ids": np.repeat(seqs, host.seqlens_q),
        "cu_seqlens_k": cu_seqlens_k,
        "block_tables": host.block_tables,
    }


def _build_plan(host: HostBatch, key: PlanKey) -> DecodePlan | PrefillPlan:
    if host.kind == "prefill":
        return plan_prefill(
            host.state_ids,
            host.seqlens_q,
            host.seqlens_k,
            window=key.window,
            ring_len=key.ring_len,
            sink_tokens=key.sink_tokens,
            swa_valid_start=host.swa_valid_start,
        )
    return build_decode_plan(
        host.token_state_ids,
        host.positions,
        window=key.window,
        ring_len=key.ring_len,
        mode=key.mode,
        cu_seqlens_q=host.cu_seqlens_q,
        sink_tokens=key.sink_tokens,
    )


def _array_names(plan: DecodePlan | PrefillPlan) -> list[str]:
    return [
        field.name for field in fields(plan) if isinstance(getattr(plan, field.name), np.ndarray)
    ]
