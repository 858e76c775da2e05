"""`ringslab bench`: every benchmark runs small on the CPU, and its report says what is so."""

import json
from dataclasses import replace

import numpy as np
import pytest

import ringslab as rs
from ringslab.errors import ArgumentError
from ringslab.rawkernels.timing import Replay
from ringslab.tools import main as cli
from ringslab.tools.bench import common, runs, table
from ringslab.tools.bench.common import BenchError, Ceilings, Work

CEILINGS = Ceilings(4000.0, 800.0, "bfloat16", 1 << 32, 8192)
ROW_KEYS = {"op", "shape", "median_us", "floor_us", "times_floor", "gbps", "tflops"}
ROW_KEYS |= {"peer", "peer_us", "min_us", "p90_us", "kernel", "check", "checksum"}


def smoke(capsys, *argv):
    """Status and JSON report of `ringslab bench ... --smoke --json` on the CPU."""
    status = cli.main(["bench", *argv, "--smoke", "--json", "--backend", "cpu"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("op", runs.OPERATIONS)
def test_every_bench_runs(capsys, op):
    """The smoke shape of each operation on the CPU: the result is checked, the row has the fixed
    keys, and time over floor is times_floor."""
    status, report = smoke(capsys, op)
    assert status == 0, report["rows"]
    assert {"device", "copy_gbps", "matmul_tflops", "rows", "environment"} <= set(report)
    assert report["copy_gbps"] > 0
    (row,) = report["rows"]
    assert row.keys() >= ROW_KEYS
    assert row["op"] == op
    assert row["shape"] == runs.bench_of(op).SMOKE
    assert row["median_us"] > 0
    assert row["floor_us"] > 0
    assert row["min_us"] <= row["median_us"] <= row["p90_us"]
    # Both times are rounded to a nanosecond.
    ratio = row["median_us"] / row["floor_us"]
    assert row["times_floor"] == pytest.approx(ratio, rel=5e-4 / row["floor_us"] + 1e-2)
    assert row["peer"] is None
    assert row["peer_us"] is None
    assert row["kernel"] == "cpu"


def test_every_operation_has_a_bench():
    """The benches are the operations of a backend and the two plans, and each has the parts that
    the package's docstring names; smoke values name the same axes as the real ones."""
    from ringslab.rawkernels.operations import OPERATION_NAMES

    assert set(runs.OPERATIONS) == {*OPERATION_NAMES, "plan_decode", "plan_prefill"}
    for op in runs.OPERATIONS:
        bench = runs.bench_of(op)
        assert "Bound by" in bench.__doc__, op
        assert list(bench.SMOKE) == list(bench.AXES), op
        assert set(bench.AXES) <= set(runs.AXES), op
        assert callable(bench.prepare), op


def test_real_shapes():
    """The default shapes of attention: 2 x 3 x 5 for decode, 2 x 2 x 2 for prefill, among them 6
    queries of 128 heads in 512 sequences, and 32,768 tokens in 16 sequences."""
    wish = runs.Wish(("window_decode", "window_prefill"), {}, False, False, False, 15, 0)
    decode = list(runs.shapes_of("window_decode", wish))
    prefill = list(runs.shapes_of("window_prefill", wish))
    assert len(decode) == 30
    assert len(prefill) == 8
    assert {"heads": 128, "queries": 6, "sequences": 512} in decode
    assert {"heads": 64, "tokens": 32768, "sequences": 16} in prefill


@pytest.mark.parametrize(
    ("op", "shape", "size", "flops"),
    [
        # 3,072 tokens x 64 heads x 512 x 2 B of q and of out; 133 records of 528 B a sequence.
        (
            "window_decode",
            {"heads": 64, "queries": 6, "sequences": 512},
            402_653_184 + 512 * 133 * 528,
            3072 * 128 * 4 * 512 * 64,
        ),
        # 127 records of history and 32,768 new ones.
        (
            "window_prefill",
            {"heads": 64, "tokens": 32768, "sequences": 1},
            4_294_967_296 + 32_895 * 528,
            32768 * 128 * 4 * 512 * 64,
        ),
        # q and out of 32 heads, k and v of 8; 128 keys a query but for the first 127.
        (
            "window_attention",
            {"layer": "mistral", "window": 128, "sequences": 1, "tokens": 32768},
            2 * 32768 * (32 + 8) * 128 * 2,
            (32768 * 128 - 127 * 64) * 4 * 128 * 32,
        ),
        (
            "window_attention",
            {"layer": "gpt_oss", "window": "none", "sequences": 8, "tokens": 32768},
            2 * 32768 * (64 + 8) * 64 * 2,
            8 * (4096 * 4097 // 2) * 4 * 64 * 64,
        ),
        ("quantize_mxfp8", {"rows": 65536, "rule": "ceil"}, 65536 * 1552, 0),
        ("dequantize_mxfp8", {"rows": 65536, "dtype": "float32"}, 65536 * 2576, 0),
        ("dequantize_mxfp8", {"rows": 65536, "dtype": "bf16"}, 65536 * 1552, 0),
        ("encode_records", {"tokens": 65536}, 65536 * (1024 + 4 + 528), 0),
        ("ring_store", {"sequences": 512, "queries": 128}, 65536 * (1024 + 8 + 528), 0),
        ("store_records", {"sequences": 512, "queries": 128}, 65536 * (528 + 8 + 528), 0),
        ("load_history", {"sequences": 512}, 65536 * (528 + 528), 0),
    ],
)
def test_bytes_and_flops_are_counted(monkeypatch, op, shape, size, flops):
    """The counts of DeepSeek V4.1's shapes, worked by hand; nothing is filled or run."""
    place = UnbackedPlace(monkeypatch, op)
    cfg = rs.load_config("deepseek_v4_1_flash.yaml")
    work = runs.bench_of(op).prepare(place, cfg, shape, np.random.default_rng(1))
    assert work.bytes == size
    assert work.flops == flops


class UnbackedPlace:
    """A place whose arrays are one byte, repeated by strides of 0, and whose inputs stay unset."""

    backend = "cpu"

    def __init__(self, monkeypatch, op):
        bench = runs.bench_of(op)
        for name, fake in {
            "fill_ring": lambda *_: None,
            "poisoned_slab": lambda *_: None,
            "random_bf16": lambda place, shape, rng: place.empty(shape, np.uint16),
            "new_vectors": lambda *_: None,
            "random_records": lambda rows, fmt, rng: np.zeros((1, fmt.record_bytes), np.uint8),
            "_repeated": lambda *_: (None, None),
        }.items():
            if hasattr(bench, name):
                monkeypatch.setattr(bench, name, fake)
        self.memory = self
        self.ops = common.load_operations("cpu")

    def empty(self, shape, dtype):
        return np.broadcast_to(np.zeros((), dtype), shape)

    def upload(self, target, source):
        pass


def test_floor_is_the_larger_one():
    """4 MB at 4,000 GB/s are 1 us; 1.6 GFLOP at 800 TFLOP/s are 2 us; without a matrix rate the
    bytes decide."""
    work = Work((), (), 4 * 10**6, 0, dict)
    assert common.floor_us(work, CEILINGS) == pytest.approx(1.0)
    work = replace(work, flops=1_600_000_000)
    assert common.floor_us(work, CEILINGS) == pytest.approx(2.0)
    assert common.floor_us(work, replace(CEILINGS, matmul_tflops=None)) == pytest.approx(1.0)


def test_numbers_of_a_row():
    """Times 4, 1, 2, 3, 5 us of 8 MB: median 3 us, 2,667 GB/s, 1.5 times the floor of 2 us."""
    work = Work((), (), 8 * 10**6, 0, dict)
    row = common.numbers([4.0, 1.0, 2.0, 3.0, 5.0], work, CEILINGS)
    assert (row["median_us"], row["min_us"], row["repeats"]) == (3.0, 1.0, 5)
    assert row["p90_us"] == pytest.approx(4.6)
    assert row["gbps"] == pytest.approx(2666.7)
    assert (row["floor_us"], row["times_floor"]) == (2.0, 1.5)
    assert row["tflops"] == 0.0
    assert row["matmul_fraction"] is None


def test_input_sets():
    """Small sets stop at 32, large ones at 4, and sets of more than 8 GB at 1."""
    assert common.num_sets(1) == 32
    assert common.num_sets(10 * 10**6) == 16
    assert common.num_sets(400 * 10**6) == 4
    assert common.num_sets(3 * 10**9) == 2
    assert common.num_sets(9 * 10**9) == 1
    assert common.num_sets(1, most=6) == 6


def test_an_unwritten_element_is_found():
    """One of 8 floats left as poison is an error that counts it; all written is none."""
    output = np.zeros(8, np.float32)
    work = Work((), (output,), 0, 0, dict)
    common.refuse_unwritten(work)
    common.poison(work)
    output[:7] = 1.0
    with pytest.raises(BenchError, match="1 of 8 elements of output 0 were not written"):
        common.refuse_unwritten(work)


def test_checksum_is_of_all_bits():
    """Two outputs of 16-bit and 32-bit elements: the sum of their integers, in hexadecimal."""
    outputs = (np.array([1, 2, 0xFFFF], np.uint16), np.array([1.0], np.float32))
    assert int(common.sum_of_bits(outputs), 16) == 3 + 0xFFFF + 0x3F800000


def wrong_result(monkeypatch, op):
    """Make an operation's bench check fail."""
    bench = runs.bench_of(op)
    prepare = bench.prepare

    def check():
        raise BenchError("12 of 99 differ from the reference")

    monkeypatch.setattr(bench, "prepare", lambda *args: replace(prepare(*args), check=check))


def test_a_wrong_result_has_no_time(monkeypatch, capsys):
    """A failed check is an `error` in its row, null times, status 1; the other rows stand."""
    wrong_result(monkeypatch, "quantize_mxfp8")
    status, report = smoke(capsys, "quantize_mxfp8", "dequantize_mxfp8")
    assert status == 1
    wrong, right = report["rows"]
    assert wrong["error"] == "BenchError: 12 of 99 differ from the reference"
    assert wrong["median_us"] is None
    assert "error" not in right
    assert right["median_us"] > 0


def test_a_peers_fault_leaves_our_time(monkeypatch):
    """Where a peer fails, the row keeps our time, has no peer_us, says why, and the table too."""

    def fail(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(runs, "measure_peer", fail)
    wish = runs.Wish(("quantize_mxfp8",), {}, True, True, False, 3, 0)
    cfg = rs.load_config("quickstart.yaml")
    report = runs.run_benches("cpu", 0, cfg, wish, lambda text: None)
    (row,) = report["rows"]
    assert row["median_us"] > 0
    assert row["peer_us"] is None
    assert row["peer_error"] == "RuntimeError: no compiler"
    assert "peer: RuntimeError: no compiler" in table.render([report])


def test_a_wrong_kernel_is_caught(monkeypatch, capsys):
    """A window_decode that adds 1 to an output is outside the bound."""
    load = common.load_operations

    def broken(backend):
        ops = load(backend)

        def window_decode(q, slab, layout, layer, plan, out, lse, **options):
            ops.window_decode(q, slab, layout, layer, plan, out, lse, **options)
            out[0, 0, 0] += 0x0400

        return replace(ops, window_decode=window_decode)

    monkeypatch.setattr(common, "load_operations", broken)
    status, report = smoke(capsys, "window_decode")
    assert status == 1
    assert "outside the bound" in report["rows"][0]["error"]


def test_inputs_do_not_depend_on_what_else_runs(capsys):
    """A row's checksum is the same alone and behind another operation."""
    _, alone = smoke(capsys, "encode_records")
    _, both = smoke(capsys, "quantize_mxfp8", "encode_records")
    assert alone["rows"][0]["checksum"] == both["rows"][1]["checksum"]


def test_shapes_from_flags_and_config(capsys, tmp_path):
    """--rows 33,64 --rule floor are two rows; a configuration's heads and tokens_per_step replace
    the defaults of heads and queries."""
    from ringslab.tools import bench_cmd

    _, report = smoke(capsys, "quantize_mxfp8", "--rows", "33,64", "--rule", "floor")
    assert [row["shape"] for row in report["rows"]] == [
        {"rows": 33, "rule": "floor"},
        {"rows": 64, "rule": "floor"},
    ]
    cfg = rs.load_config("quickstart.yaml")
    assert bench_cmd._axes_of_config(cfg) == {"heads": (8,), "queries": (1, 4)}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["window_decod"], "there is no operation 'window_decod'"),
        (["quantize_mxfp8", "--heads", "64"], "has no axis 'heads'; there are: rows, rule"),
        (["window_decode", "--heads", "64,x"], "must be counts"),
        (["window_decode", "--heads", "0"], "each must be at least 1"),
        (["quantize_mxfp8", "--rule", "up"], "must be ceil or floor"),
        (["--repeats", "0"], "at least 1"),
        (["--peers"], "--peers needs a GPU"),
        (["apply_rope", "--kernel", "portable"], "apply_rope on cpu has one kernel"),
    ],
)
def test_mistakes_are_told(capsys, argv, words):
    """A wrong operation, axis, value or wish is one line on stderr and status 2."""
    assert cli.main(["bench", *argv, "--smoke", "--backend", "cpu"]) == 2
    assert words in capsys.readouterr().err


def test_a_run_cut_short_leaves_its_rows(monkeypatch, tmp_path):
    """Ctrl-C in the second of two operations: status 130, and the file holds the first one's row,
    marked as not complete."""
    path = tmp_path / "report.json"

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs.bench_of("apply_rope"), "prepare", stop)
    argv = ["bench", "load_history", "apply_rope", "--smoke", "--backend", "cpu"]
    assert cli.main([*argv, "--out", str(path)]) == 130
    report = json.loads(path.read_text())
    assert [row["op"] for row in report["rows"]] == ["load_history"]
    assert report["complete"] is False
    assert list(tmp_path.iterdir()) == [path]


def test_sustained_on_the_host(monkeypatch, capsys):
    """--sustained adds a sustained time to each row and to both rates."""
    monkeypatch.setattr(common, "SUSTAIN_SECONDS", 0.02)
    monkeypatch.setattr("ringslab.tools.bench.ceilings.SUSTAIN_SECONDS", 0.02)
    _, report = smoke(capsys, "apply_rope", "--sustained")
    assert report["rows"][0]["sustained_us"] > 0
    assert report["sustained_copy_gbps"] > 0
    assert report["sustained_matmul_tflops"] > 0


def test_wish_is_measured_by_the_clock_given(monkeypatch):
    """A graph of 4 calls that takes 8 us is 2 us a call."""
    with common.open_place("cpu", 0) as place:
        watch = replace(place.watch, time_us=lambda run, repeats, flush: [8.0] * repeats)
        timed = common.times_of(replace(place, watch=watch), Replay(print, 4, None), 3)
    assert timed == [2.0, 2.0, 2.0]


def test_a_kernel_is_forced():
    """A launcher with an argument `variant` is called with it, and with its own arguments."""
    seen = {}

    def window_decode(q, *, softmax_scale, variant=None):
        seen.update(q=q, softmax_scale=softmax_scale, variant=variant)

    with common.open_place("cpu", 0) as place:
        place = replace(place, ops=replace(place.ops, window_decode=window_decode))
        forced = common.force_kernel(place, ("window_decode",), "portable")
        forced.ops.window_decode(7, softmax_scale=0.5)
    assert seen == {"q": 7, "softmax_scale": 0.5, "variant": "portable"}


def test_unknown_operation_from_python():
    """bench_of names what there is."""
    with pytest.raises(ArgumentError, match="there are: window_decode"):
        runs.bench_of("flash")
