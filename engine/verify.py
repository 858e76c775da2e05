"""`--verify`: outputs and log-sum-exps of a run against the float64 reference.

Nothing of the run's state is trusted: for each sampled query token the request's history is made
again from its tokens and the activation source, encoded by the reference, and attended in float64
over every key that the token may see. The bounds are those of `rawkernels/reference/bound.py`.

In a stacked run the inputs of a layer are the outputs of the layer before, so a sample is computed
again from those outputs as the run made them. Every layer has its own tight check then. Some
samples of the first layers are computed from layer 0 up as well, exactly and with what tensor cores
are given, so that the bound grows through the layers as the error does (outputs alone).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ..layouts.config import Config, LayerConfig
from ..layouts.plans import PrefillPlan
from ..rawkernels.memory import Memory
from ..rawkernels.operations import Operations, load_operations
from ..rawkernels.reference.bound import (
    Expected,
    attention_bound,
    expected_prefill,
    lse_bound,
)
from ..rawkernels.reference.window_prefill import window_prefill
from ..schedules.plan_prefill import plan_prefill
from .activations import ActivationSource, seeded_sinks
from .attention_options import window_options
from .samples import Capture, Sample, Seen


@dataclass(frozen=True)
class Verdict:
    """Error and bound of the sample that came closest to its bounds, or furthest past them, and
    of the log-sum-exp that did."""

    checked: int
    worst_error: float
    bound: float
    worst_lse_error: float
    lse_bound: float
    passed: bool
    worst_sample: Sample | None

    def as_report(self) -> dict:
        fraction = self.worst_error / self.bound if self.bound > 0 else None
        finite, lse_finite = np.isfinite(self.worst_error), np.isfinite(self.worst_lse_error)
        sample = self.worst_sample
        return {
            "checked": self.checked,
            "worst_error": self.worst_error if finite else None,
            "bound": self.bound,
            "worst_fraction": fraction if finite else None,
            "worst_lse_error": self.worst_lse_error if lse_finite else None,
            "lse_bound": self.lse_bound,
            "passed": self.passed,
            "worst_sample": None
            if sample is None
            else {
                "request": sample.request_id,
                "layer": sample.layer,
                "position": sample.position,
            },
        }


@dataclass(frozen=True)
class Check:
    """Errors and bounds of one sample's output and log-sum-exp (both 0 where it is not looked at);
    a NaN where the reference has none counts as infinite."""

    sample: Sample
    error: float
    bound: float
    lse_error: float = 0.0
    lse_bound: float = 0.0

    @property
    def passed(self) -> bool:
        return self.error <= self.bound and self.lse_error <= self.lse_bound

    @property
    def fraction(self) -> float:
        return max(_share(self.error, self.bound), _share(self.lse_error, self.lse_bound))


def _share(error: float, bound: float) -> float:
    if bound > 0:
        return error / bound
    return 0.0 if error <= bound else np.inf


def verify_capture(
    cfg: Config,
    capture: Capture,
    memory: Memory,
    source: ActivationSource,
    tokens_of: Callable[[str, int], np.ndarray],
    sinks: list | None = None,
) -> Verdict:
    """Checks every captured sample. `tokens_of(id, n)` gives the first n tokens of a request,
    int32; `sinks` are the engine's, where they are not the seeded ones."""
    outputs = memory.to_host(capture.outputs).view(ml_dtypes.bfloat16)
    lses = memory.to_host(capture.lses)
    sinks = seeded_sinks(cfg) if sinks is None else sinks
    judge = Judge(cfg, load_operations("reference"), source, sinks, tokens_of)
    checks: list[Check] = []
    stacked = source.kind == "stacked"
    bounded = cfg.prefix is not None and cfg.prefix.contract == "bounded"
    for i in sorted(capture.seen):
        if stacked and capture.samples[i].layer > 0 and i in capture.blind:
            continue  # the rows it was made from were computed for another request
        expected = judge.from_inputs(capture, i)
        checks.append(
            Check(
                capture.samples[i],
                _output_error(outputs[i], expected.out[0]),
                attention_bound(expected.out, expected.rounded),
                _largest_error(lses[i], expected.lse[0]),
                lse_bound(expected.lse),
            )
        )
    ground = [i for i in sorted(capture.seen) if capture.samples[i].whole_stack]
    if bounded:  # a hit under this contract is not what the whole stack gives
        ground = [i for i in ground if i not in capture.rebuilt]
    for i, (exact, bound) in zip(
        ground, judge.from_layer_0([capture.samples[i] for i in ground]), strict=True
    ):
        checks.append(Check(capture.samples[i], _output_error(outputs[i], exact), bound))
    return _verdict(checks)


def _output_error(output: np.ndarray, exact: np.ndarray) -> float:
    """Largest error of bf16 outputs."""
    return _largest_error(output.astype(np.float64), exact)


def _verdict(checks: list[Check]) -> Verdict:
    if not checks:
        return Verdict(0, 0.0, 0.0, 0.0, 0.0, False, None)
    worst = max(checks, key=lambda check: check.fraction)
    worst_lse = max(checks, key=lambda check: _share(check.lse_error, check.lse_bound))
    return Verdict(
        checked=len(checks),
        worst_error=worst.error,
        bound=worst.bound,
        worst_lse_error=worst_lse.lse_error,
        lse_bound=worst_lse.lse_bound,
        passed=all(check.passed for check in checks),
        worst_sample=worst.sample,
    )


def visible_positions(layer: LayerConfig, position: int, seen: Seen) -> tuple[int, int]:
    """First and last position that a query sees. Drafts of a draft layer see the whole step, and
    the window of the committed token that it hangs on; global layers see all before them."""
    if layer.window is None:
        return 0, position
    step_last = seen.first_position + len(seen.token_ids) - 1
    in_block = layer.role == "draft" and seen.kind == "decode" and position > seen.first_position
    anchor = seen.first_position if in_block else position
    return max(0, anchor - layer.window + 1), step_last if in_block else position


@dataclass(frozen=True)
class Judge:
    """Computes outputs again, by the reference."""

    cfg: Config
    reference: Operations
    source: ActivationSource
    sinks: list
    tokens_of: Callable[[str, int], np.ndarray]

    def from_inputs(self, capture: Capture, i: int) -> Expected:
        """What the reference says of a sample: arrays with one row."""
        sample, seen = capture.samples[i], capture.seen[i]
        layer = self.cfg.layers[sample.layer]
        first, last = visible_positions(layer, sample.position, seen)
        history = self.tokens_of(sample.request_id, seen.first_position)
        token_ids = np.concatenate([history, seen.token_ids]).astype(np.int32)
        pinned = np.arange(min(layer.sink_tokens, first), dtype=np.int32)
        positions = np.concatenate([pinned, np.arange(first, last + 1, dtype=np.int32)])
        stacked = self.source.kind == "stacked" and sample.layer > 0
        previous = None
        if stacked:
            start = int(positions[0])
            rows = capture.input_rows(i, start, last)
            previous = np.ascontiguousarray(rows[positions - start])
        own = len(pinned) + sample.position - first
        q, kv = self.source.rows(
            sample.layer, sample.request_id, token_ids[positions], positions, previous, q_from=own
        )
        records = np.empty((len(positions), layer.record_format.record_bytes), np.uint8)
        self.reference.encode_records(
            kv, positions, records, record_format=layer.record_format, rope=layer.rope
        )
        return expected_prefill(
            np.ascontiguousarray(q[:1]),
            *_one_query(records, sample.position, layer),
            layer.record_format,
            **window_options(layer, self.sinks[sample.layer]),
        )

    def from_layer_0(self, samples: list[Sample]) -> list[tuple[np.ndarray, float]]:
        """Exact output and bound of each sample (all of one request) from the whole stack below
        it, computed over the request's positions from 0 on."""
        if not samples:
            return []
        request_id = samples[0].request_id
        assert all(sample.request_id == request_id for sample in samples)
        count = max(sample.position for sample in samples) + 1
        token_ids = self.tokens_of(request_id, count)
        positions = np.arange(count, dtype=np.int32)
        found: dict[Sample, tuple[np.ndarray, float]] = {}
        outputs: dict[bool, Any] = {False: None, True: None}  # by rounding of weights, bf16 bits
        for layer in self.cfg.layers[: max(sample.layer for sample in samples) + 1]:
            results = {}
            for rounded in (False, True):
                q, kv = self.source.rows(
                    layer.id, request_id, token_ids, positions, outputs[rounded]
                )
                result = _whole_layer(self.reference, layer, q, kv, self.sinks[layer.id], rounded)
                outputs[rounded] = result.astype(ml_dtypes.bfloat16).view(np.uint16)
                results[rounded] = result
            bound = attention_bound(results[False], results[True])
            for sample in samples:
                if sample.layer == layer.id:
                    found[sample] = results[False][sample.position], bound
        return [found[sample] for sample in samples]


def _one_query(
    records: np.ndarray, position: int, layer: LayerConfig
) -> tuple[np.ndarray, PrefillPlan]:
    """A joint buffer and a plan in which one query sees all the records, by their order."""
    count = len(records)
    int32 = np.int32
    window = count if layer.window is None else layer.window
    spare = np.zeros((window + 1, records.shape[1]), np.uint8)
    plan = PrefillPlan(
        window=window,
        ring_len=layer.ring_len or count,
        num_seqs=1,
        max_seqlen_q=1,
        cu_seqlens_q=np.array([0, 1], int32),
        state_ids=np.zeros(1, int32),
        seqlens_k=np.array([position + 1], int32),
        positions=np.array([position], int32),
        token_state_ids=np.zeros(1, int32),
        segments=np.zeros((0, 3), int32),
        num_segments=np.zeros(1, int32),
        pivots=np.array([[0, 0, 0, count]], int32),
    )
    return np.concatenate([records, spare]), plan


def _whole_layer(
    reference: Operations, layer: LayerConfig, q: Any, kv: Any, sink: Any, rounded: bool
) -> np.ndarray:
    """Output float64 [n, num_q_heads, head_dim] of a layer for a sequence from position 0 on."""
    count, fmt = len(q), layer.record_format
    sizes = {"window": layer.window or count, "ring_len": layer.ring_len or count}
    sizes["sink_tokens"] = layer.sink_tokens
    plan = plan_prefill([0], [count], [count], **sizes)
    joint = np.zeros((plan.history_rows + count, fmt.record_bytes), np.uint8)
    reference.encode_records(
        kv, plan.positions, joint[plan.history_rows :], record_format=fmt, rope=layer.rope
    )
    out = np.empty(q.shape, np.float64)
    window_prefill(
        q,
        joint,
        plan,
        fmt,
        out,
        np.empty(q.shape[:2], np.float32),
        round_weights=rounded,
        **window_options(layer, sink),
    )
    return out


def _largest_error(found: np.ndarray, exact: np.ndarray) -> float:
    """max|found - exact|; infinite where one is NaN or infinite and the other is not."""
    same = np.isnan(found) == np.isnan(exact)
    same &= np.isinf(found) == np.isinf(exact)
    if not same.all():
        return float("inf")
    finite = np.isfinite(exact)
    return float(np.abs(found - exact).max(where=finite, initial=0.0))
