"""The embedding example of docs/embedding.md: a model of NumPy or CuPy arrays drives the engine."""

import numpy as np
import pytest
from engine_runs import tiny

import ringslab as rs
from ringslab.tools.embedding_example import (
    from_bf16,
    generate,
    guess_drafts,
    main,
    make_model,
    to_bf16,
)

PROMPTS = {name: np.arange(n, dtype=np.int32) % 64 for name, n in (("a", 3), ("b", 20), ("c", 41))}
NEW = 16


def tell(backend, xp, *, drafts):
    cfg = tiny()
    with rs.Engine(cfg, backend) as engine:
        return generate(make_model(cfg, xp), engine, PROMPTS, NEW, drafts=drafts)


def test_drafts_change_the_steps_and_not_the_tokens(backend):
    """3 prompts, 16 new tokens each: greedy tokens with drafts are those without, and some drafts
    were accepted. Host arrays, on every backend."""
    plain, none_kept = tell(backend, np, drafts=False)
    drafted, kept = tell(backend, np, drafts=True)
    assert none_kept == 0
    assert kept > 0
    for name, prompt in PROMPTS.items():
        assert len(plain[name]) == len(prompt) + NEW
        assert np.array_equal(plain[name], drafted[name])


@pytest.mark.gpu
def test_cupy_arrays_drive_it_too():
    """The same model in CuPy arrays: the tokens that NumPy arrays give on the same GPU."""
    import cupy

    from_numpy, _ = tell("cuda", np, drafts=True)
    from_cupy, kept = tell("cuda", cupy, drafts=True)
    assert kept > 0
    for name in PROMPTS:
        assert np.array_equal(from_numpy[name], from_cupy[name])


def test_the_command_prints_continuations(capsys):
    assert main(["--backend", "reference", "--new-tokens", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("backend reference")
    assert [len(line.split()) for line in lines[1:]] == [6, 6, 6]


def test_bf16_bits_round_to_nearest_even():
    """1 + 2^-8 lies between 1 and 1 + 2^-7 and goes to the even 1; 1 + 3 * 2^-8 goes up."""
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, -2.5], np.float32)
    assert to_bf16(x).tolist() == [0x3F80, 0x3F82, 0xC020]
    assert from_bf16(np, to_bf16(x)).tolist() == [1.0, 1.015625, -2.5]


def test_drafts_are_what_followed_before():
    assert guess_drafts([1, 2, 3, 1], 2) == [2, 3]
    assert guess_drafts([1, 2, 3], 2) == []
