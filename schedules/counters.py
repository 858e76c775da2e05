"""What a scheduler counts."""

from dataclasses import dataclass


@dataclass
class SchedulerCounters:
    """Totals since the start. `recomputed_tokens` were computed once before a preemption;
    `block_preemptions` of the preemptions made room in the paged pool."""

    submitted: int = 0
    refused: int = 0
    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    prefill_batches: int = 0
    decode_batches: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    output_tokens: int = 0
    drafts_offered: int = 0
    drafts_accepted: int = 0
    recomputed_tokens: int = 0
    block_preemptions: int = 0
