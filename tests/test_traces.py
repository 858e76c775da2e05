"""Request traces and the token ids made from them."""

import json
from pathlib import Path

import numpy as np
import pytest

from ringslab.engine import tokens
from ringslab.engine.traces import read_trace, synthetic_trace
from ringslab.errors import TraceError

SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "traces"
GOOD = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def line(**changes) -> str:
    return json.dumps({**GOOD, **changes}) + "\n"


def write(tmp_path: Path, text: str, name: str = "trace.jsonl") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_mooncake_lines_become_requests(tmp_path):
    """Two lines 250 ms apart: arrivals 0 and 0.25 s, 600 tokens have 2 blocks of 512."""
    path = write(tmp_path, line(timestamp=1000) + "\n" + line(timestamp=1250, hash_ids=[0, 7]))
    first, second = read_trace(path)
    assert (first.id, first.prompt_len, first.max_new_tokens) == ("r00000", 600, 5)
    assert (first.arrival_s, second.arrival_s) == (0.0, 0.25)
    a, b = (e.prompt(seed=3, vocab_size=1000) for e in (first, second))
    assert a.dtype == np.int32
    assert a.shape == (600,)
    assert np.array_equal(a[:512], b[:512])
    assert not np.array_equal(a[512:], b[512:])


def test_a_partial_block_is_the_start_of_its_block():
    """Id 9 cut at 100 tokens gives the first 100 of its 512: a repeated prompt shares a prefix."""
    whole = tokens.prompt_from_hash_ids([9], 512, seed=1, vocab_size=50)
    assert np.array_equal(tokens.prompt_from_hash_ids([9], 100, seed=1, vocab_size=50), whole[:100])


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("", "", "no requests"),
        ("\n\n", "", "no requests"),
        (line() + '{"timestamp": 5, "input_len', ":2:", "cut off"),
        (line() + "nonsense\n", ":2:", "not a JSON record"),
        (line() + "[1, 2]\n", ":2:", "not a JSON object"),
        (line() + '{"timestamp": 1, "input_length": 5}\n', ":2:", "'output_length' is missing"),
        (line(input_length=-5), ":1:", "input_length=-5"),
        (line(input_length=0, hash_ids=[]), ":1:", "input_length=0"),
        (line(input_length=600.5), ":1:", "input_length=600.5"),
        (line(input_length=True), ":1:", "input_length=True"),
        (line(input_length=2**31), ":1:", "input_length=2147483648"),
        (line(output_length=-1), ":1:", "output_length=-1"),
        (line(timestamp=-1), ":1:", "timestamp=-1"),
        (line(timestamp="0"), ":1:", "timestamp='0'"),
        (line().replace("0,", "NaN,", 1), ":1:", "timestamp=nan"),
        (line(timestamp=10) + line(timestamp=9), ":2:", "time goes back"),
        (line(hash_ids=[0]), ":1:", "1 hash_ids for input_length=600, which has 2"),
        (line(hash_ids=[0, 1, 2]), ":1:", "3 hash_ids"),
        (line(hash_ids=[0, -1]), ":1:", "hash_ids[1]=-1"),
        (line(hash_ids="01"), ":1:", "hash_ids is str"),
        (line().replace('"hash_ids"', '"input_length"'), ":1:", "'input_length' is there twice"),
    ],
)
def test_bad_mooncake_traces_name_file_and_line(tmp_path, text, where, says):
    """Each fault is one TraceError with the file, the line and what is wrong."""
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert f"{path}{where}" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("", "", "is empty"),
        (AZURE, "", "no requests"),
        ("TIMESTAMP,ContextTokens\n", ":1:", "'GeneratedTokens' is missing"),
        (AZURE.replace("Generated", "Context"), ":1:", "'ContextTokens' is there 2 times"),
        (AZURE + "2023-11-16 18:15:46.68,374\n", ":2:", "has 2 fields"),
        (AZURE + "2023-11-16 18:15:46.68,374,-4\n", ":2:", "GeneratedTokens=-4"),
        (AZURE + "2023-11-16 18:15:46.68,1e3,4\n", ":2:", "ContextTokens='1e3'"),
        (AZURE + "2023-11-31 18:15:46.68,3,4\n", ":2:", "is not a time"),
        (AZURE + "2023-11-16 18:15:46.6x,3,4\n", ":2:", "is not a time"),
        (
            AZURE + "2023-11-16 18:15:46.2,3,4\n2023-11-16 18:15:46.1,3,4\n",
            ":3:",
            "time goes back",
        ),
        (AZURE + '2023-11-16 18:15:46.2,"3,4\n', ":2:", "is not CSV"),
    ],
)
def test_bad_azure_traces_name_file_and_line(tmp_path, text, where, says):
    path = write(tmp_path, text, "trace.csv")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert f"{path}{where}" in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize("digits", [4_000, 5_000])
def test_lengths_of_thousands_of_digits(tmp_path, digits):
    """Python reads integers of at most 4,300 digits: a longer length is a bad trace like any other,
    and its message is short."""
    long = "1" * digits
    mooncake = f'{{"timestamp": 0, "input_length": {long}, "output_length": 1, "hash_ids": [0]}}\n'
    azure = AZURE + f"2023-11-16 18:15:46.2,{long},4\n"
    for text, name, number in ((mooncake, "trace.jsonl", 1), (azure, "trace.csv", 2)):
        path = write(tmp_path, text, name)
        with pytest.raises(TraceError) as caught:
            read_trace(path)
        assert f"{path}:{number}:" in str(caught.value)
        assert len(str(caught.value)) < len(str(path)) + 300


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match="cannot tell the kind"):
        read_trace(tmp_path / "trace.txt")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_trace(tmp_path / "binary.jsonl")


def test_azure_times_have_seven_digits(tmp_path):
    path = write(
        tmp_path,
        AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,9,1\n",
        "trace.csv",
    )
    first, second = read_trace(path)
    assert (first.prompt_len, first.max_new_tokens, second.prompt_len) == (374, 44, 9)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-5)


def test_caps_cut_prompts_and_their_block_ids(tmp_path):
    """A cap of 500 keeps 1 of 2 blocks; num_requests=1 does not read line 2, broken or not."""
    path = write(tmp_path, line() + "nonsense\n")
    (entry,) = read_trace(path, num_requests=1, max_prompt_len=500)
    assert (entry.prompt_len, entry.hash_ids) == (500, (0,))


def test_synthetic_traces_are_seeded():
    kwargs = {"num_requests": 50, "prompt_len": (3, 9), "output_len": (0, 4)}
    entries = synthetic_trace(seed=7, **kwargs)
    assert entries == synthetic_trace(seed=7, **kwargs)
    assert entries != synthetic_trace(seed=8, **kwargs)
    assert {e.prompt_len for e in entries} == set(range(3, 10))
    assert {e.max_new_tokens for e in entries} == set(range(5))
    with pytest.raises(TraceError, match="prompt_len"):
        synthetic_trace(seed=7, num_requests=1, prompt_len=(5, 4), output_len=(0, 1))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not beside the repository")
def test_the_public_traces_read_whole():
    """2,000 Mooncake requests with median prompt 7,965 and 20 of Azure's."""
    entries = read_trace(SHARED / "mooncake_conversation_first2000.jsonl")
    assert len(entries) == 2000
    assert np.median([e.prompt_len for e in entries]) == pytest.approx(7965, abs=1)
    assert len(read_trace(SHARED / "azure_conv_first20.csv")) == 20


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_drafts_are_right_at_the_accept_rate(rate):
    rules = tokens.TokenRules(seed=5, vocab_size=100, accept_rate=rate, tokens_per_step=6)
    key, positions = tokens.request_key("a"), np.arange(4000)
    right = rules.drafts(key, positions) == rules.next_tokens(key, positions)
    assert np.mean(right) == pytest.approx(rate, abs=0.03)


def test_the_leading_run_of_right_drafts_is_accepted():
    """Drafts right, right, wrong, right, right: 2 are kept and the next token is at p + 3."""
    rules = tokens.TokenRules(seed=5, vocab_size=100, accept_rate=1.0, tokens_per_step=6)
    key = tokens.request_key("a")
    truth = rules.next_tokens(key, np.arange(11, 16))
    drafts = truth.copy()
    drafts[2] = (drafts[2] + 1) % 100
    step = tokens.decide_step(
        rules,
        np.array([key, key, key]),
        np.array([10, 10, 10]),
        np.array([5, 1, 0], np.int32),
        np.stack([drafts, truth, truth]),
    )
    assert step.accepted.tolist() == [2, 1, 0]
    assert step.next_tokens.tolist() == rules.next_tokens(key, np.array([13, 12, 11])).tolist()
    assert np.array_equal(step.drafts[0], rules.next_tokens(key, np.arange(14, 19)))
