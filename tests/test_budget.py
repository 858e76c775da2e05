"""`ringslab budget` and `kv_bytes`: bytes of one sequence's caches against its context."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

import ringslab as rs
from ringslab.errors import ArgumentError, LayoutError
from ringslab.layouts.budget import cache_shape, make_cache_shape, shape_bytes, smallest_ratio
from ringslab.tools.main import main

GIB = 2**30
# The published table: model, local/global, context, all-global GiB, hybrid GiB, saving.
TABLE = """
mistral_7b                         32/0    8192            1.00        0.50    2.0x
mistral_7b                         32/0   32768            4.00        0.50    8.0x
mistral_7b                         32/0  131072           16.00        0.50   32.0x
gemma2_27b                        23/23    8192            2.88        2.16    1.3x
gemma2_27b                        23/23   32768           11.50        6.47    1.8x
gemma2_27b                        23/23  131072           46.00       23.72    1.9x
gpt_oss_120b                      18/18    8192            0.56        0.29    2.0x
gpt_oss_120b                      18/18   32768            2.25        1.13    2.0x
gpt_oss_120b                      18/18  131072            9.00        4.50    2.0x
Gemma-2-27B shape, 5:1 W=1024      39/7    8192            2.88        0.74    3.9x
Gemma-2-27B shape, 5:1 W=1024      39/7   32768           11.50        2.05    5.6x
Gemma-2-27B shape, 5:1 W=1024      39/7  131072           46.00        7.30    6.3x
""".strip().splitlines()
HEADER = "model                               L/G     ctx  all-global GiB  hybrid GiB  saving"
SHAPE = ["--layers", "46", "--kv-heads", "16", "--head-dim", "128", "--window", "1024"]


def output_of(capsys, *arguments: str) -> str:
    assert main(["budget", *arguments]) == 0
    return capsys.readouterr().out


def json_of(capsys, *arguments: str) -> dict:
    return json.loads(output_of(capsys, *arguments, "--json"))


@pytest.mark.parametrize("name", ["mistral_7b", "gemma2_27b", "gpt_oss_120b"])
def test_the_published_table(capsys, name):
    """The three models' rows digit for digit, under the same heading."""
    lines = output_of(capsys, name).splitlines()
    assert lines[:4] == [HEADER, *(row for row in TABLE if row.startswith(name))]


def test_the_row_of_a_shape_by_flags(capsys):
    """Five local layers for each global one in 46: 39 local, 7 global, window 1,024; by the ratio
    and by the number of local layers."""
    name = "Gemma-2-27B shape, 5:1 W=1024"
    for split in (["--ratio", "5:1"], ["--local", "39"]):
        lines = output_of(capsys, "--name", name, *SHAPE, *split).splitlines()
        assert lines[:4] == [HEADER, *TABLE[-3:]]


def test_kv_bytes_of_gemma_2():
    """16 KV heads of 128 in bf16 are 8,192 B a token and layer: 46 layers at 131,072 tokens take
    46 GiB, of which 23 with a window of 4,096 leave 23.72 GiB."""
    cfg = rs.load_config("gemma2_27b")
    found = rs.kv_bytes(cfg, 131_072)
    assert found.all_global_bytes == 46 * 131_072 * 8192 == 46 * GIB
    assert found.hybrid_bytes == 23 * 8192 * (131_072 + 4096)
    assert found.saving == pytest.approx(1.9394, abs=1e-4)
    short = rs.kv_bytes(cfg, 100)
    assert short.hybrid_bytes == short.all_global_bytes == 46 * 100 * 8192


def test_what_is_really_taken():
    """gpt-oss at 1,000 tokens: 18 rings of 128 records of 2,048 B, and 63 blocks of 16 tokens (8 of
    them unused), 589,824 B each. quickstart_hybrid adds 3 records a ring for a decode step's
    tokens; DeepSeek's rings are 6 longer than the window and its state is in the slot."""
    found = rs.kv_bytes(rs.load_config("gpt_oss_120b"), 1000)
    assert (found.slot_bytes, found.step_bytes, found.padding_bytes) == (18 * 128 * 2048, 0, 0)
    assert (found.num_blocks, found.block_bytes) == (63, 589_824)
    assert found.real_bytes == 18 * 128 * 2048 + 63 * 589_824
    small = rs.load_config("quickstart_hybrid")
    found = rs.kv_bytes(small, 500)
    assert found.slot_bytes == small.slot_layout.slot_bytes
    assert found.step_bytes == 5 * 3 * 1056
    assert found.paged_bytes == 32 * small.paged_layout.block_bytes
    flash = rs.load_config("deepseek_v4_1_flash")
    found = rs.kv_bytes(flash, 10**6)
    assert found.slot_bytes == flash.slot_layout.slot_bytes == 3_128_352
    assert found.step_bytes == 43 * 6 * 528
    assert found.hybrid_bytes == 43 * 128 * 528
    assert (found.num_blocks, found.paged_bytes) == (0, 0)


def test_padding_is_counted():
    """One KV head of 32 in MXFP8 is 66 B; a ring of 5 is 330 B, padded to 352."""
    shape = make_cache_shape(
        "x",
        num_layers=3,
        num_kv_heads=1,
        head_dim=32,
        local_layers=2,
        window=5,
        record_type="mxfp8",
    )
    found = shape_bytes(shape, 17)
    assert (found.slot_bytes, found.padding_bytes) == (2 * 352, 2 * 22)
    assert (found.num_blocks, found.paged_bytes) == (2, 2 * 1056)
    assert found.hybrid_bytes == found.mxfp8_bytes == 66 * (2 * 5 + 17)


def test_mxfp8_is_33_64ths_of_bf16():
    """A byte a value and one for 32 in place of two bytes a value; head_dim 80 cannot be MXFP8."""
    found = rs.kv_bytes(rs.load_config("gemma3_27b"), 50_000)
    assert found.mxfp8_bytes * 64 == found.hybrid_bytes * 33
    sizes = {"num_layers": 2, "num_kv_heads": 1, "local_layers": 1, "window": 4}
    assert shape_bytes(make_cache_shape("x", head_dim=80, **sizes), 9).mxfp8_bytes is None


def test_blocks_of_paged_windows(capsys):
    """Window 128 in blocks of 16: at most 9 live blocks a layer; at 20 tokens 2."""
    assert "up to 9 live blocks a layer" in output_of(capsys, "gpt_oss_120b")
    shape = cache_shape(rs.load_config("gpt_oss_120b"))
    assert shape_bytes(shape, 131_072).window_blocks == 9
    assert shape_bytes(shape, 131_072).paged_local_bytes == 18 * 9 * 16 * 2048
    assert shape_bytes(shape, 20).window_blocks == 2


def test_smallest_ratio(capsys):
    """Gemma 2 27B's shape under 10 GiB at 131,072 tokens and a window of 1,024: 37 local and 9
    global layers, 9.29 GiB; 36 and 10 would take 10.28. By its name and by flags."""
    line = "under 10 GiB at 131,072: 37 local and 9 global layers, 9.29 GiB"
    asked = ["--context", "131072", "--under", "10"]
    assert line in output_of(capsys, "gemma2_27b", "--window", "1024", *asked).splitlines()
    assert line in output_of(capsys, *SHAPE, *asked).splitlines()
    found = json_of(capsys, *SHAPE, *asked)["smallest_ratios"]
    [row] = found
    assert (row["local_layers"], row["global_layers"]) == (37, 9)
    assert row["hybrid_bytes"] == 8192 * (9 * 131_072 + 37 * 1024)
    shape = cache_shape(rs.load_config("gemma2_27b"))
    assert smallest_ratio(shape, 131_072, row["hybrid_bytes"], 1024).local_layers == 38  # not under
    assert smallest_ratio(shape, 1000, 46 * GIB, 1024).local_layers == 0
    assert smallest_ratio(shape, 131_072, 46 * 1024 * 8192, 1024) is None
    text = output_of(capsys, "mistral_7b", "--under", "0.1")
    assert "under 0.1 GiB at 8,192: no ratio" in text


def test_json(capsys):
    """--json prints the fixed keys and the same numbers, and nothing else."""
    report = json_of(capsys, "gemma2_27b", "--context", "8192", "131072")
    assert report["model"] == "gemma2_27b"
    assert [row["context"] for row in report["rows"]] == [8192, 131_072]
    cfg = rs.load_config("gemma2_27b")
    for row in report["rows"]:
        found = rs.kv_bytes(cfg, row["context"])
        assert {"context", "all_global_bytes", "hybrid_bytes", "saving"} <= set(row)
        assert row["all_global_bytes"] == found.all_global_bytes
        assert row["hybrid_bytes"] == found.hybrid_bytes
        assert row["saving"] == found.all_global_bytes / found.hybrid_bytes
        assert row["real_bytes"] == found.slot_bytes + found.paged_bytes


def test_plot(capsys, tmp_path):
    """An SVG with a line for each kind of bytes; the hybrid line's last point lies below the
    all-global one's (y grows downwards)."""
    path = tmp_path / "bytes.svg"
    output_of(capsys, "gpt_oss_120b", "--plot", str(path))
    root = ElementTree.parse(path).getroot()
    names = {"svg": "http://www.w3.org/2000/svg"}
    lines = root.findall("svg:polyline", names)
    assert len(lines) == 4
    ends = [float(line.get("points").split()[-1].split(",")[1]) for line in lines]
    assert ends == sorted(ends)
    assert ends[0] < ends[-1]
    texts = [text.text for text in root.findall("svg:text", names)]
    assert any("18 local and 18 global layers" in text for text in texts)
    assert main(["budget", "gpt_oss_120b", "--plot", str(tmp_path / "no" / "x.svg")]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a CONFIG, or flags with --layers, --kv-heads, --head-dim, --window"),
        ([*SHAPE], "give --local or --ratio"),
        (["gemma2_27b", "--local", "3"], "--local describe a shape; give CONFIG or flags"),
        (["gemma2_27b", "--window", "3"], "--window describe a shape"),
        ([*SHAPE, "--local", "47"], "local_layers=47 but must be 0 .. 46"),
        ([*SHAPE, "--ratio", "5"], "--ratio='5' but must be L:G"),
        ([*SHAPE, "--ratio", "0:1"], "--ratio='0:1' but must be L:G"),
        ([*SHAPE, "--ratio", "5:1", "--context", "0"], "context=0"),
        (["nope"], "no such file"),
        (["mistral_7b", "--under", "nan"], "--under=nan but must be above 0"),
        (["mistral_7b", "--under", "inf"], "--under=inf but must be above 0"),
        (["mistral_7b", "--under", "-1"], "--under=-1.0 but must be above 0"),
    ],
)
def test_wrong_arguments(capsys, arguments, message):
    """What describes no model is one line on stderr and status 2."""
    assert main(["budget", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_wrong_numbers():
    """A context that is no positive integer, and a ratio without a window."""
    cfg = rs.load_config("mistral_7b")
    for context in (0, -1, 1.5, True, "8192"):
        with pytest.raises(ArgumentError, match="context="):
            rs.kv_bytes(cfg, context)
    wide = make_cache_shape(
        "wide", num_layers=2, num_kv_heads=1, head_dim=32, local_layers=0, window=8
    )
    with pytest.raises(LayoutError, match="wide has no window; say which one"):
        smallest_ratio(wide, 10, GIB)
