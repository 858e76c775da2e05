"""Random plan inputs and the plans that a backend's filling functions make of them."""

from types import SimpleNamespace

import numpy as np

from ringslab.layouts.plans import MAX_SEGMENTS
from ringslab.layouts.rings import MAX_POSITION
from ringslab.rawkernels.plan_checks import index_width

DECODE_ARRAYS = ("cu_seqlens_q", "state_ids", "positions", "offset_len", "index")
PREFILL_ARRAYS = (
    "cu_seqlens_q",
    "state_ids",
    "seqlens_k",
    "positions",
    "token_state_ids",
    "segments",
    "num_segments",
    "pivots",
)


def i32(values):
    return np.asarray(values, dtype=np.int32)


def random_start(rng, room):
    """A first position: young, anywhere, or so that `room` more positions end at the largest."""
    kind = rng.integers(0, 4)
    if kind == 0:
        return int(rng.integers(0, 12))
    if kind == 3:
        return MAX_POSITION - room
    return int(rng.integers(0, 100_000))


def random_decode(seed):
    """Ragged decode batch: empty sequences, padding after tokens and whole padded sequences,
    a swa_valid_start for each token or one for all, positions up to 2^31 - 2."""
    rng = np.random.default_rng(seed)
    window = int(rng.choice([1, 2, 3, 4, 7, 16]))
    mode = str(rng.choice(["causal", "block", "draft_step"]))
    most_q = int(rng.integers(1, 7))
    ring_len = window + most_q + int(rng.integers(0, 4))
    states, positions, valid, cu = [], [], [], [0]
    for _ in range(int(rng.integers(0, 7))):
        count = int(rng.integers(0, most_q + 1))
        padding = int(rng.integers(0, count + 1)) if rng.random() < 0.3 else 0
        real = count - padding
        start = random_start(rng, max(real - 1, 0))
        state = int(rng.integers(0, 50))
        states += [state] * real + [-1] * padding
        positions += list(range(start, start + real)) + rng.integers(-5, 99, padding).tolist()
        valid_start = start - int(rng.integers(-2, window + 3))  # perhaps past the first token
        valid += [min(max(0, valid_start), MAX_POSITION)] * count
        cu.append(len(states))
    return SimpleNamespace(
        window=window,
        ring_len=ring_len,
        mode=mode,
        state_ids=i32(states),
        positions=i32(positions),
        cu_seqlens_q=i32(cu),
        swa_valid_start=i32(valid) if rng.random() < 0.5 else int(rng.integers(0, 30)),
        max_seqlen_q=max(np.diff(cu).tolist(), default=0),
    )


def random_prefill(seed):
    """Prefill batch: empty and padded sequences, chunks longer than the ring, a swa_valid_start
    for each sequence or 0, sequences that end at the largest position."""
    rng = np.random.default_rng(seed)
    window = int(rng.choice([1, 2, 3, 4, 7, 16]))
    ring_len = window + int(rng.integers(0, 7))
    num_seqs = int(rng.integers(0, 7))
    q = np.array([int(rng.choice([0, 1, 2, 5, 20])) for _ in range(num_seqs)], dtype=np.int64)
    start = np.array([random_start(rng, int(n) - 1 if n else -1) for n in q], dtype=np.int64)
    valid = np.maximum(start - rng.integers(0, window + 4, num_seqs), 0)
    return SimpleNamespace(
        window=window,
        ring_len=ring_len,
        state_ids=i32(rng.integers(-1, 40, num_seqs)),
        seqlens_q=i32(q),
        seqlens_k=i32(start + q),
        swa_valid_start=i32(valid) if rng.random() < 0.6 else 0,
        num_tokens=int(q.sum()),
        max_seqlen_q=int(q.max(initial=0)),
    )


def fill_decode(plan_decode, case, xp=np, extra=0, **options):
    """Arrays of a decode plan by a backend's filling function, in poisoned memory (`xp` is numpy or
    cupy); `extra` more columns of index."""
    inputs = [xp.asarray(case.state_ids), xp.asarray(case.positions), xp.asarray(case.cu_seqlens_q)]
    valid = case.swa_valid_start
    valid = valid if isinstance(valid, int) else xp.asarray(valid)
    num_tokens = case.positions.shape[0]
    width = index_width(case.mode, case.window, case.max_seqlen_q) + extra
    out = SimpleNamespace(
        state_ids=inputs[0],
        positions=inputs[1],
        cu_seqlens_q=inputs[2],
        offset_len=xp.full((num_tokens, 2), -77, dtype=np.int32),
        index=xp.full((num_tokens, width), -77, dtype=np.int32),
    )
    plan_decode(
        *inputs,
        valid,
        out.offset_len,
        out.index,
        window=case.window,
        ring_len=case.ring_len,
        mode=case.mode,
        **options,
    )
    return out


def fill_prefill(plan_prefill, case, xp=np, extra=0, **options):
    """Arrays of a prefill plan by a backend's filling function, in poisoned memory; `extra` more
    tokens than the sequences have, which are padding."""
    inputs = [xp.asarray(case.state_ids), xp.asarray(case.seqlens_q), xp.asarray(case.seqlens_k)]
    valid = case.swa_valid_start
    valid = valid if isinstance(valid, int) else xp.asarray(valid)
    num_seqs, num_tokens = case.state_ids.shape[0], case.num_tokens + extra

    def poisoned(*shape):
        return xp.full(shape, -77, dtype=np.int32)

    out = SimpleNamespace(
        cu_seqlens_q=poisoned(num_seqs + 1),
        positions=poisoned(num_tokens),
        token_state_ids=poisoned(num_tokens),
        segments=poisoned(MAX_SEGMENTS * num_seqs, 3),
        num_segments=poisoned(1),
        pivots=poisoned(num_tokens, 4),
    )
    plan_prefill(
        *inputs, valid, *vars(out).values(), window=case.window, ring_len=case.ring_len, **options
    )
    out.state_ids, out.seqlens_k = inputs[0], inputs[2]
    return out


def assert_same_decode(got, want, context=""):
    """Equal arrays of equal dtypes, whatever memory they are in."""
    for name in DECODE_ARRAYS:
        assert_same(name, getattr(got, name), getattr(want, name), context)


def assert_same_prefill(got, want, context=""):
    """As `assert_same_decode`; segments may have unused rows behind, which are (-1, 0, 0)."""
    for name in PREFILL_ARRAYS:
        a, b = to_host(getattr(got, name)), to_host(getattr(want, name))
        if name == "segments":
            count = int(to_host(want.num_segments)[0])
            for unused in (a[count:], b[count:]):
                assert (unused == (-1, 0, 0)).all(), f"{context} unused segments {unused}"
            a, b = a[:count], b[:count]
        assert_same(name, a, b, context)


def assert_same(name, a, b, context):
    a, b = to_host(a), to_host(b)
    assert a.dtype == b.dtype == np.int32, f"{context} {name}: {a.dtype} and {b.dtype}"
    np.testing.assert_array_equal(a, b, err_msg=f"{context} {name}")


def to_host(array):
    return array.get() if hasattr(array, "get") else array
