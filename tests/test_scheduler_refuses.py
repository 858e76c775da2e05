"""The scheduler: calls out of order, wrong results, requests and limits; nothing is lost."""

import dataclasses

import pytest
from scheduler_model import limits, prompt, watched

import ringslab as rs
from ringslab.errors import ArgumentError, BatchError, RequestError
from ringslab.layouts.rings import MAX_POSITION
from ringslab.schedules.batch import BatchArrays, PlanKey, with_plans
from ringslab.schedules.scheduler import Scheduler


def test_calls_out_of_order():
    """next_batch twice, commit without a batch, of an old, a copied and another scheduler's batch:
    BatchError, and nothing is lost."""
    w, other = watched(), watched()
    with pytest.raises(BatchError, match="no batch is in flight"):
        w.scheduler.commit(None, [0])
    for each in (w, other):
        each.submit("a", prompt(5), 4)
    old = w.next_batch()
    w.commit(old, w.compute(old), lambda right: [])
    batch, foreign = w.next_batch(), other.next_batch()
    with pytest.raises(BatchError, match="batch 1 is not committed"):
        w.scheduler.next_batch()
    for wrong in (old, foreign, None, "batch"):
        with pytest.raises(BatchError, match="not the one in flight"):
            w.scheduler.commit(wrong, [0], [1])
    w.commit(batch, w.compute(batch), lambda right: [])
    w.run()


def test_a_batch_with_plans_is_the_same_batch():
    """commit takes the engine's batch, which holds the arrays of the scheduler's own."""
    s = Scheduler(limits())
    s.submit(rs.Request("a", [1, 2], 1))
    host = s.next_batch()
    on_device = BatchArrays(host.token_ids, host.positions, host.token_state_ids, host.cu_seqlens_q)
    batch = with_plans(host, {PlanKey(4, 8): None}, on_device)
    for field in dataclasses.fields(host):
        assert getattr(batch, field.name) is getattr(host, field.name)
    assert (batch.num_seqs, batch.num_tokens) == (1, 2)
    assert batch.seqlens_q.tolist() == [2]
    assert batch.is_first_chunk.tolist() == [True]
    s.commit(batch, [0], [3])
    assert s.done


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": [0, 4]}, r"accepted\[1\]=4 .*num_drafts=2"),
        ({"accepted": [-1, 0]}, r"accepted\[0\]=-1"),
        ({"accepted": [0]}, r"accepted.shape=\(1,\)"),
        ({"accepted": [0.0, 1.0]}, "accepted.dtype=float64"),
        ({"accepted": [[0], [0, 1]]}, "accepted is no array"),
        ({"accepted": None}, r"accepted.shape=\(\)"),
        ({"next_tokens": None}, "next_tokens is None but request 'a'"),
        ({"next_tokens": [1, -1]}, r"next_tokens\[1\]=-1 for request 'b'"),
        ({"next_tokens": [1, 2, 3]}, r"next_tokens.shape=\(3,\)"),
        ({"next_tokens": [1, 2**31]}, "past int32"),
        ({"drafts": [[1, 2, 3, 4]] * 2}, r"drafts.shape=\(2, 4\) .*room for 3"),
        ({"drafts": [[1, -1, 3], [1, 2, 3]]}, r"drafts\[0\]=\[1, -1, 3\]"),
        ({"drafts": [[1, 2, 3], [1, -2, -1]]}, r"drafts\[1\]=\[1, -2, -1\]"),
        ({"drafts": [1, 2]}, r"drafts.shape=\(2,\)"),
        ({"finished": [0, 1]}, "finished is int64"),
        ({"finished": [True]}, r"finished is bool \(1,\)"),
    ],
)
def test_wrong_results_change_nothing(change, message):
    """ArgumentError, the batch stays in flight, and the right results then count in full."""
    s = Scheduler(limits())
    s.submit(rs.Request("a", [1, 2], 10))
    s.submit(rs.Request("b", [3, 4], 10))
    s.commit(s.next_batch(), [0, 0], [5, 6], [[7, 8, 9], [10, 11, -1]])
    batch = s.next_batch()
    right = {"accepted": [2, 1], "next_tokens": [12, 13], "drafts": [[1, -1]] * 2}
    with pytest.raises(ArgumentError, match=message):
        s.commit(batch, **right | change)
    assert s.outputs("a").tolist() == [5]
    s.commit(batch, **right)
    assert s.outputs("a").tolist() == [5, 7, 8, 12]
    assert s.outputs("b").tolist() == [6, 10, 13]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"next_tokens": [12, 50]}, r"next_tokens\[1\]=50 for request 'b' but vocab_size=50"),
        ({"next_tokens": [2**31 - 1, 0]}, r"next_tokens\[0\]=2147483647 .* vocab_size=50"),
        ({"drafts": [[1, -1], [49, 50]]}, r"drafts\[1, 1\]=50 for request 'b' but vocab_size=50"),
    ],
)
def test_committed_tokens_lie_in_the_vocabulary(change, message):
    """Vocabulary of 50: 49 is the last token at commit as in a prompt; 50 is refused with value and
    limit, the batch stays in flight. What is not looked at (a prompt that goes on) may be any."""
    s = Scheduler(limits(vocab_size=50, num_state_slots=3))
    s.submit(rs.Request("a", [1, 2], 10))
    s.submit(rs.Request("b", [49, 3], 10))
    s.submit(rs.Request("c", [4] * 20, 10))  # 4 of its 20 fit the budget of 8
    s.commit(s.next_batch(), [0] * 3, [49, 6, 1000], [[49], [-1], [-1]])
    batch = s.next_batch()
    right = {"accepted": [1, 0], "next_tokens": [0, 49], "drafts": [[1, -1], [49, 0]]}
    with pytest.raises(ArgumentError, match=message):
        s.commit(batch, **right | change)
    s.commit(batch, **right)
    assert s.outputs("a").tolist() == [49, 49, 0]
    assert s.outputs("b").tolist() == [6, 49]


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        (lambda: rs.Request("", [1], 1), "id=''"),
        (lambda: rs.Request(7, [1], 1), "id=7"),
        (lambda: rs.Request("a", [], 1), r"prompt.shape=\(0,\)"),
        (lambda: rs.Request("a", [[1]], 1), r"prompt.shape=\(1, 1\)"),
        (lambda: rs.Request("a", [1.5], 1), "prompt.dtype=float64"),
        (lambda: rs.Request("a", [1, -1], 1), r"run -1 .. 1"),
        (lambda: rs.Request("a", [2**31], 1), "2147483648"),
        (lambda: rs.Request("a", [1], -1), "max_new_tokens=-1"),
        (lambda: rs.Request("a", [1], 1.0), "max_new_tokens=1.0"),
        (lambda: rs.Request("a", [1], True), "max_new_tokens=True"),
        (lambda: rs.Request("a", [1], 1, float("nan")), "arrival_s=nan"),
        (lambda: rs.Request("a", [1], 1, -1.0), "arrival_s=-1.0"),
        (lambda: ("a", [1], 1), "got tuple"),
    ],
)
def test_requests_refused_at_submit(request_of, message):
    """Each with a RequestError; nothing is queued."""
    s = Scheduler(limits())
    with pytest.raises(RequestError, match=message):
        s.submit(request_of())
    assert s.done
    assert s.next_batch() is None


@pytest.mark.parametrize(
    "change",
    [
        {"num_state_slots": 0},
        {"token_budget": 0},
        {"max_seq_len": MAX_POSITION + 2},
        {"tokens_per_step": True},
        {"max_decode_seqs": 1.5},
        {"max_prefill_seqs": -1},
    ],
)
def test_limits_refused(change):
    with pytest.raises(ArgumentError, match=next(iter(change))):
        limits(**change)


def test_what_is_asked_of_a_wrong_request():
    """preempt of a waiting, an ended and an unknown request; tokens, outputs, state and forget."""
    s = Scheduler(limits())
    s.submit(rs.Request("a", [1, 2], 1))
    with pytest.raises(RequestError, match="is waiting"):
        s.preempt("a")
    with pytest.raises(RequestError, match="has not ended"):
        s.forget("a")
    s.commit(s.next_batch(), [0], [3])
    with pytest.raises(RequestError, match="no request 'a'"):
        s.preempt("a")
    assert s.tokens("a").tolist() == [1, 2, 3]
    s.forget("a")
    for call in (s.tokens, s.outputs, s.state, s.abort, s.preempt, s.forget):
        with pytest.raises(RequestError):
            call("a")
