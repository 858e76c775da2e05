"""Token sums that wait on a device which runs late: none is lost, counted twice or torn."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from device_model import Device
from hypothesis import given, settings
from hypothesis import strategies as st

from ringslab.engine.digests import open_digests
from ringslab.rawkernels.reference.activation_hash import GOLDEN64, splitmix64

LENGTHS = [9, 14, 6]


def token_sum(request, position):
    return np.uint64(1000 * request + position + 1)


def wanted():
    """Sums of whole requests."""
    positions = [np.arange(length, dtype=np.uint64) for length in LENGTHS]
    with np.errstate(over="ignore"):
        return [
            int(np.sum(splitmix64(token_sum(request, p) ^ (p * GOLDEN64))))
            for request, p in enumerate(positions)
        ]


def batch_of(starts, counts):
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return SimpleNamespace(
        seqlens_k=np.add(starts, counts),
        seqlens_q=np.array(counts),
        cu_seqlens_q=cu,
        num_tokens=int(cu[-1]),
        first_outputs=np.zeros(len(starts), np.int32),
    )


class Steps:
    """Steps of requests that are computed a few tokens at a time, on a device that runs late."""

    def __init__(self, seed, half):
        self.device = Device(seed)
        self.array = np.full(2 * half + seed % 2, 77, np.uint64)  # of an earlier run
        self.waits = []
        memory = replace(self.device.memory, wait=self.wait)
        self.log = open_digests(self.array, LENGTHS, memory)
        self.half, self.at = half, [0] * len(LENGTHS)
        self.begun = []  # what steps found in their part of the log

    def wait(self, event):
        self.waits.append(event)
        self.device.wait(event)

    def step(self, requests, most, rejected):
        """The next 1 .. most tokens of requests, of which the last `rejected` do not stay."""
        counts = [min(most, self.half // len(requests)) for _ in requests]
        starts = [self.at[r] for r in requests]
        batch = batch_of(starts, counts)
        view = self.log.begin(batch.num_tokens)
        assert view.shape == (batch.num_tokens,)
        sums = np.concatenate(
            [
                token_sum(r, np.arange(s, s + n))
                for r, s, n in zip(requests, starts, counts, strict=True)
            ]
        ).astype(np.uint64)

        def compute():
            self.begun.append(view.copy())
            view[...] += sums

        self.device.queue(compute)
        kept = [max(n - rejected, 1) for n in counts]
        self.log.keep(batch, np.array(requests), np.array(kept))
        for request, n in zip(requests, kept, strict=True):
            self.at[request] += n

    def end(self):
        while any(at < length for at, length in zip(self.at, LENGTHS, strict=True)):
            late = [r for r, length in enumerate(LENGTHS) if self.at[r] < length]
            self.step(late, 2, 0)
        self.log.flush()


ACTS = st.one_of(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True),
        st.integers(1, 5),
        st.integers(0, 2),
    ),
    st.integers(0, 6),  # the device runs so far
    st.just("flush"),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(5, 11), st.lists(ACTS, max_size=30))
def test_sums_arrive_whole_in_any_order(seed, half, acts):
    """Halves turn over at any step, a step takes up to a whole one, flushes come between, requests
    start again: each request's sum is that of its positions, and every step found zeros."""
    steps = Steps(seed, half)
    for act in acts:
        if act == "flush":
            steps.log.flush()
        elif isinstance(act, int):
            for _ in range(act):
                steps.device.step()
        else:
            steps.step(*act)
            if seed % 5 == 0 and steps.at[0] > 3:
                steps.at[0] = 1  # preempted: its positions are computed again
    steps.end()
    while steps.device.step():
        pass
    assert steps.log.sums.tolist() == wanted()
    assert not any(found.any() for found in steps.begun)
    assert steps.log.counted.tolist() == LENGTHS


def test_no_step_waits_for_the_half_that_it_leaves():
    """A step that turns the halves over waits for nothing at first, and later for the half that was
    sent a half ago, of which the copy comes before any work of the steps that follow it."""
    steps = Steps(seed=4, half=4)
    for at in range(5):
        steps.step([1], 2, 0)
        assert steps.waits == ([] if at < 4 else steps.waits[:1])
    assert len(steps.waits) == 1
    assert len(steps.begun) == 2  # of the two steps of the first half, which was waited for
