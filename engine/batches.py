"""From the scheduler's batch to the engine's: plans, and arrays where the engine runs.

Plans are built on the host and travel in one copy with the batch's own arrays: a step then costs
one upload, where building them on the device costs a launch for each plan.
"""

from dataclasses import fields, replace

import numpy as np

from ..layouts.config import Config
from ..layouts.plans import DecodePlan, PrefillPlan
from ..schedules.batch import Batch, BatchArrays, HostBatch, PlanKey, with_plans
from ..schedules.plan_decode import build_decode_plan
from ..schedules.plan_prefill import plan_prefill
from .workspace import Staging, plan_keys


def build_batch(cfg: Config, host: HostBatch, staging: Staging, backend: str) -> Batch:
    """The batch that `next_batch` returns."""
    plans = {key: _build_plan(host, key) for key in plan_keys(cfg, host.kind)}
    own = [host.token_ids, host.positions, host.token_state_ids, host.cu_seqlens_q]
    if backend != "cuda":
        return with_plans(host, plans, BatchArrays(*own))
    names = {key: _array_names(plan) for key, plan in plans.items()}
    arrays = own + [getattr(plans[key], name) for key in plans for name in names[key]]
    uploaded = iter(staging.upload(arrays))
    on_device = BatchArrays(*(next(uploaded) for _ in own))
    plans = {
        key: replace(plan, **{name: next(uploaded) for name in names[key]})
        for key, plan in plans.items()
    }
    return with_plans(host, plans, on_device)


def _build_plan(host: HostBatch, key: PlanKey) -> DecodePlan | PrefillPlan:
    if host.kind == "prefill":
        return plan_prefill(
            host.state_ids,
            host.seqlens_q,
            host.seqlens_k,
            window=key.window,
            ring_len=key.ring_len,
        )
    return build_decode_plan(
        host.token_state_ids,
        host.positions,
        window=key.window,
        ring_len=key.ring_len,
        mode=key.mode,
        cu_seqlens_q=host.cu_seqlens_q,
    )


def _array_names(plan: DecodePlan | PrefillPlan) -> list[str]:
    return [
        field.name for field in fields(plan) if isinstance(getattr(plan, field.name), np.ndarray)
    ]
