"""Activation sources: recorded arrays and what they refuse; seeded sinks."""

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ringslab as rs
from ringslab.engine.activations import open_source, seeded_sinks
from ringslab.engine.finite import check_finite_bits
from ringslab.engine.recorded import open_recorded
from ringslab.errors import ActivationError, ConfigError
from ringslab.rawkernels.memory import load_memory
from ringslab.rawkernels.operations import load_operations

LAYERS, HEADS, DIM, ROWS = 4, 4, 128, 20
TINY = Path(__file__).with_name("tiny.yaml")


def recorded(rows: int = ROWS, prefix: str = "", seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = {}
    for layer in range(LAYERS):
        for name, shape in (("q", (rows, HEADS, DIM)), ("kv", (rows, DIM))):
            values = rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
            arrays[f"{prefix}{name}.{layer}"] = values.view(np.uint16)
    return arrays


def save(tmp_path: Path, arrays: dict[str, np.ndarray]) -> Path:
    path = tmp_path / "recorded.npz"
    np.savez(path, **arrays)
    return path


def open_tiny(path: Path):
    return open_recorded(path, LAYERS, HEADS, DIM)


def test_a_file_and_a_folder_hold_the_same(tmp_path):
    """One .npz, and q.L.npy / kv.L.npy in a folder, bfloat16 or its bits: the same rows."""
    arrays = recorded()
    path = save(tmp_path, arrays)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array.view(ml_dtypes.bfloat16))
    from_file, from_folder = open_tiny(path), open_tiny(folder)
    for layer in range(LAYERS):
        for a, b in zip(
            from_file.arrays(layer, "any"), from_folder.arrays(layer, "other"), strict=True
        ):
            assert a.dtype == np.uint16
            assert np.array_equal(a, b)


def test_requests_may_have_arrays_of_their_own(tmp_path):
    """Request "a" reads a/q.0, every other q.0; a request longer than its 5 rows is refused."""
    own = recorded(5, "a/", seed=1)
    source = open_tiny(save(tmp_path, {**recorded(), **own}))
    assert np.array_equal(source.arrays(2, "a")[1], own["a/kv.2"])
    assert source.arrays(2, "b")[1].shape == (ROWS, DIM)
    source.check_lengths(["a", "b"], [5, 20])
    with pytest.raises(ActivationError, match=r"'a' has 6 positions but 5 are recorded"):
        source.check_lengths(["a"], [6])
    alone = open_tiny(save(tmp_path, own))
    with pytest.raises(ActivationError, match=r"no array 'q.0' for request 'b'"):
        alone.check_lengths(["b"], [1])


@pytest.mark.parametrize(("value", "name"), [(np.nan, "NaN"), (np.inf, "Inf"), (-np.inf, "-Inf")])
def test_values_that_are_not_finite_are_refused_by_place(tmp_path, value, name):
    arrays = recorded()
    arrays["kv.2"].view(ml_dtypes.bfloat16)[7, 100] = value
    path = save(tmp_path, arrays)
    with pytest.raises(ActivationError) as caught:
        open_tiny(path)
    assert str(caught.value) == f"{path}: kv.2[7, 100] is {name}"


def test_finite_check_counts_rows_across_its_pieces():
    """Row 5000 lies in the second piece of 4096 rows; the largest finite bf16 passes."""
    bits = np.full((6000, 2), 0x7F7F, np.uint16)
    check_finite_bits(bits, "x")
    bits[5000, 1] = 0xFFC0
    with pytest.raises(ActivationError, match=r"x\[5000, 1\] is NaN"):
        check_finite_bits(bits, "x")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda a: a.update({"q.1": a["q.1"].astype(np.float32)}), "q.1.dtype=float32"),
        (lambda a: a.update({"kv.0": a["kv.0"].view(np.int16)}), "kv.0.dtype=int16"),
        (lambda a: a.update({"kv.3": a["kv.3"][:, :64]}), r"kv.3.shape=(20, 64)"),
        (lambda a: a.update({"q.3": a["q.3"][:, :2]}), r"q.3.shape=(20, 2, 128)"),
        (lambda a: a.update({"q.0": a["q.0"][0]}), r"q.0.shape=(4, 128)"),
        (lambda a: a.update({"kv.1": a["kv.1"][:19]}), "q.1 has 20 positions but kv.1 has 19"),
        (lambda a: a.pop("kv.3"), "'kv.3' is missing"),
        (lambda a: a.update({"q.4": a["q.0"]}), "'q.4' is not one of"),
        (lambda a: a.update({"keys": a["q.0"]}), "'keys' is not one of"),
        (lambda a: a.update({"q.0": np.array([{}])}), "not a whole .npz"),
        (lambda a: a.clear(), "holds no arrays"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(tmp_path, change, says):
    arrays = recorded()
    change(arrays)
    path = save(tmp_path, arrays)
    with pytest.raises(ActivationError) as caught:
        open_tiny(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_are_not_whole_are_refused(tmp_path):
    path = save(tmp_path, recorded())
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ActivationError, match=r"not a whole \.npz"):
        open_tiny(path)
    with pytest.raises(ActivationError, match="cannot be read"):
        open_tiny(tmp_path / "absent.npz")
    one = tmp_path / "one.npy"
    np.save(one, np.zeros(3))
    with pytest.raises(ActivationError, match=r"is one \.npy array"):
        open_tiny(one)
    folder = tmp_path / "folder"
    folder.mkdir()
    np.save(folder / "q.0.npy", np.zeros((3, HEADS, DIM), np.uint16))
    whole = (folder / "q.0.npy").read_bytes()
    (folder / "q.0.npy").write_bytes(whole[:-10])
    with pytest.raises(ActivationError, match=r"q.0.npy: is not a whole .npy"):
        open_tiny(folder)


def test_damaged_bytes_of_a_compressed_file_are_refused(tmp_path):
    """Every byte of a small compressed .npz, one after the other, is turned over: the file is
    refused, or reads as the arrays it held (a date, a name that is there twice)."""
    path = tmp_path / "recorded.npz"
    q = np.arange(2 * 2 * 4, dtype=np.uint16).reshape(2, 2, 4)
    np.savez_compressed(path, **{"q.0": q, "kv.0": q[:, 0]})
    whole = path.read_bytes()
    refused = 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            source = open_recorded(path, 1, 2, 4)
        except ActivationError:
            refused += 1
        else:
            assert np.array_equal(source.arrays(0, "a")[0], q)
    assert refused > len(whole) // 2


def test_a_file_source_needs_a_path():
    with pytest.raises(ConfigError, match="activations_path"):
        rs.load_config(TINY, overrides=("run.activations=file",))


def test_seeded_rows_are_the_hash_of_two_seeds():
    """Keys come from seed 2s and queries from 2s + 1, also where 2s wraps at 2^64."""
    cfg = rs.load_config(TINY)
    cfg = replace(cfg, run=replace(cfg.run, seed=2**63 + 5))
    source = open_source(cfg, load_operations("reference"), load_memory("cpu"), None)
    ids, positions = np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32)
    q, kv = source.rows(1, "a", ids, positions, None)
    want_kv, want_q = (
        rs.seeded_activations(seed, 1, ids, positions, width)
        for seed, width in ((10, DIM), (11, HEADS * DIM))
    )
    assert np.array_equal(kv, want_kv.view(np.uint16))
    assert np.array_equal(q.reshape(3, -1), want_q.view(np.uint16))


def test_sinks_are_seeded_for_layers_that_have_them():
    cfg = rs.load_config(TINY, overrides=("layer_groups.consumers.sink=false",))
    sinks = seeded_sinks(cfg)
    assert sinks[2] is None
    assert sinks[0].dtype == np.float32
    assert sinks[0].shape == (HEADS,)
    assert not np.array_equal(sinks[0], sinks[1])
