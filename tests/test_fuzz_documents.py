"""YAML documents and traces of any content: what loads is what other readers read, all else is one
of our errors that names the file; a damaged configuration never gives a layout that overlaps."""

import datetime
import json
import math
import string

import pytest
import yaml
from config_edits import QUICKSTART
from hypothesis import example, given
from hypothesis import strategies as st

import ringslab as rs
from ringslab.engine.traces import TraceEntry, read_trace
from ringslab.errors import ConfigError, TraceError
from ringslab.layouts.rings import MAX_POSITION
from ringslab.layouts.yaml_source import Mapping, Scalar, parse_yaml

# Texts at which YAML readers part ways, and others that look like them.
WORDS = [
    *("on", "Off", "y", "NO", "true", "True", "null", "~", "", "0x1F", "0o17", "0b11", "017"),
    *("1e6", "1.0e6", "1.0e+6", "+1.", ".5", "-.inf", ".NaN", "12:30", "2024-01-01", "=", "<<"),
    *("1.5", "-3", "+7", "0", "-0", "00", "1_0", "1e400", "9" * 30, "a b", "*x", "&x 1", "!!int 3"),
    *('"\\x41"', "'on'", "[1, 2]", "{a: 1}", "- 1", "? a", "a: b", "# c", "|", ">", "%", "@", "`"),
    "\ufeff",
]  # fmt: skip
scalars = st.one_of(
    st.sampled_from(WORDS),
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(repr),
    st.text(string.printable, max_size=12),
    st.text(max_size=8),
)
keys = st.one_of(st.sampled_from(["a", "b", "on", "<<", "1", "id"]), scalars)


@st.composite
def documents(draw, depth=2):
    """Block and flow YAML of keys and scalars as they are written, right or wrong."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(scalars)
    parts = draw(st.lists(documents(depth - 1), max_size=4))
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return "[" + ", ".join(parts) + "]"
    names = [draw(keys) for _ in parts]
    if kind == 1:
        return "{" + ", ".join(f"{k}: {v}" for k, v in zip(names, parts, strict=True)) + "}"
    indented = [part.replace("\n", "\n  ") for part in parts]
    if kind == 2:
        return "\n".join(f"- {part}" for part in indented)
    return "\n".join(f"{k}:\n  {v}" for k, v in zip(names, indented, strict=True))


def plain(node):
    """A tree of ours as dicts, lists and values."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Mapping):
        return {entry.key: plain(entry.node) for entry in node.entries}
    return [plain(item) for item in node.items]


def same(ours, theirs):
    """Equal in value and type."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(v, theirs[k]) for k, v in ours.items())
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, float) and math.isnan(ours):
        return isinstance(theirs, float) and math.isnan(theirs)
    return type(ours) is type(theirs) and ours == theirs


def outcome(error, call):
    """(result, None) of a call, or (None, the lines of the error that it raised)."""
    try:
        return call(), None
    except error as raised:
        return None, str(raised).splitlines()


def parsed(data):
    """The tree of a document's bytes, or None, and its faults."""
    faults = []
    root, lines = outcome(ConfigError, lambda: parse_yaml(data, "f.yaml", faults))
    return root, faults if lines is None else lines


@given(documents())
@example("a: 1.0e+6\nb: [true, null, '1']")
@example("? [a]\n: 1")
@example("a: &x {b: *x}")
@example("&a [*a]")
@example("{a: 1, a: 2}")
@example("\x00")
@example("{a: true, 0: true, 0.0: 1.5}")  # one key to others, two to us before they were refused
@example("{1: a, true: b}")
def test_any_document(text):
    """Faults with the file's name, or a tree that PyYAML's safe loader reads in the same way."""
    root, faults = parsed(text.encode())
    assert all(line.startswith("f.yaml:") for line in faults), faults
    if root is not None and not faults:
        theirs = yaml.safe_load(text)
        assert same(plain(root), theirs), (plain(root), theirs)


@given(st.binary(max_size=60))
@example(b"\xff\xfe")
@example(b"\xef\xbb\xbfa: 1")
@example(b"a: \xf0\x9f\x98\x80")
def test_any_bytes(data):
    """Any bytes: the same, and nothing that is not UTF-8 is read."""
    root, faults = parsed(data)
    assert all(line.startswith("f.yaml:") for line in faults), faults
    if root is not None:
        data.decode("utf-8")


LINES = QUICKSTART.read_text().splitlines(keepends=True)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["value", "drop", "twice", "swap", "indent"]),
            st.integers(0, len(LINES) - 1),
            st.one_of(scalars, st.integers(-3, 300).map(str)),
        ),
        min_size=1,
        max_size=3,
    )
)
@example([("value", LINES.index("    kind: swa\n"), '"a\\nb"')])  # one fault was two lines
def test_a_damaged_configuration(tmp_path_factory, edits):
    """The packaged file with lines changed, dropped, doubled, swapped and moved: a ConfigError of
    lines that name the file, or a configuration whose rings lie side by side and hold a window."""
    lines = list(LINES)
    for kind, at, value in edits:
        at = min(at, len(lines) - 1)
        line = lines[at]
        if kind == "value" and ": " in line:
            lines[at] = line.split(": ", 1)[0] + f": {value}\n"
        elif kind == "drop":
            lines[at] = ""
        elif kind == "twice":
            lines[at] = line * 2
        elif kind == "swap":
            lines[at], lines[at - 1] = lines[at - 1], line
        else:
            lines[at] = "  " + line
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_bytes("".join(lines).encode("utf-8", "surrogatepass"))
    cfg, faults = outcome(ConfigError, lambda: rs.load_config(path))
    if faults:
        assert all(line.startswith(str(path)) for line in faults), faults
        return
    ends = 0
    for ring in cfg.slot_layout.rings:
        assert ring.offset == ends
        assert ring.offset % 16 == 0
        ends = ring.offset + ring.bytes
        assert ring.used_bytes <= ring.bytes
    assert ends == cfg.slot_layout.slot_bytes
    for layer in cfg.layers:
        assert layer.ring_len >= layer.window + cfg.tokens_per_step - 1 >= 1


entries = st.lists(
    st.tuples(st.integers(1, 3000), st.integers(0, MAX_POSITION), st.integers(0, 10**6)),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@given(entries, st.booleans())
def test_a_trace_reads_back(folder, wanted, is_mooncake):
    """Lengths and times that were written, as Mooncake lines or Azure rows, come back."""
    times = sorted(time for _, _, time in wanted)
    rows = [(n, new, time) for (n, new, _), time in zip(wanted, times, strict=True)]
    if is_mooncake:
        path = folder / "good.jsonl"
        lines = [
            json.dumps({"timestamp": t, "input_length": n, "output_length": new,
                        "hash_ids": list(range(-(-n // 512)))})
            for n, new, t in rows
        ]  # fmt: skip
    else:
        path = folder / "good.csv"
        epoch = datetime.datetime(2023, 11, 16)
        lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
        lines += [
            f"{epoch + datetime.timedelta(milliseconds=t):%Y-%m-%d %H:%M:%S.%f}0,{n},{new}"
            for n, new, t in rows
        ]
    path.write_text("\n".join(lines) + "\n")
    found = read_trace(path)
    assert [(e.prompt_len, e.max_new_tokens) for e in found] == [row[:2] for row in rows]
    for entry, (_, _, time) in zip(found, rows, strict=True):
        assert entry.arrival_s == pytest.approx((time - times[0]) / 1000, abs=1e-5)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
FIELDS = ["timestamp", "input_length", "output_length", "hash_ids", "other"]
json_lines = st.dictionaries(st.sampled_from(FIELDS), json_values).map(json.dumps)
cells = st.one_of(
    st.sampled_from(["2023-11-16 18:15:46.6805900", "2023-11-16 18:15:46", "1", "0", '"', ""]),
    st.integers(-(10**25), 10**25).map(str),
    st.text(max_size=6),
)
csv_lines = st.lists(cells, max_size=4).map(",".join)


@given(st.sampled_from([".jsonl", ".csv"]), st.data())
def test_any_trace(folder, suffix, data):
    """Entries whose numbers are in range and whose times do not fall, or a TraceError that names
    the file."""
    header = data.draw(st.sampled_from(["TIMESTAMP,ContextTokens,GeneratedTokens\n", "a,b\n", ""]))
    good = {
        ".jsonl": '{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [7]}',
        ".csv": "2023-11-16 18:15:46.6805900,3,1",
    }[suffix]
    lines = json_lines if suffix == ".jsonl" else csv_lines
    body = data.draw(st.lists(st.one_of(lines, st.just(good), st.text(max_size=9)), max_size=4))
    text = (header if suffix == ".csv" else "") + "\n".join(body)
    path = folder / f"any{suffix}"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    found, faults = outcome(TraceError, lambda: read_trace(path))
    if faults:
        assert faults[0].startswith(str(path)), faults
        return
    assert found
    for before, entry in zip([found[0], *found], found, strict=False):
        assert isinstance(entry, TraceEntry)
        assert 1 <= entry.prompt_len <= MAX_POSITION
        assert 0 <= entry.max_new_tokens <= MAX_POSITION
        assert before.arrival_s <= entry.arrival_s < math.inf
