"""The strict YAML reader: nothing that YAML readers disagree about passes in silence."""

import time

import pytest
from config_edits import QUICKSTART

import ringslab as rs
from ringslab.errors import ConfigError
from ringslab.layouts.yaml_source import (
    MAX_ALIASES,
    Mapping,
    Scalar,
    Sequence,
    apply_override,
    float_text,
    parse_yaml,
    plain_value,
)


def plain(node):
    """A tree as Python values, without places."""
    if isinstance(node, Mapping):
        return {entry.key: plain(entry.node) for entry in node.entries}
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    return node.value


def parse(text: str | bytes):
    faults: list[str] = []
    data = text.encode() if isinstance(text, str) else text
    return parse_yaml(data, "a.yaml", faults), faults


def refused(text: str | bytes) -> str:
    """The message of a text that is refused, whether at once or as a list of faults."""
    try:
        _, faults = parse(text)
    except ConfigError as error:
        return str(error)
    assert faults, f"accepted: {text!r}"
    return "\n".join(faults)


def test_values_keep_their_type_and_place():
    """Plain decimals, dotted floats, true, false and null are values; quotes make text; a mark
    counts lines and columns from 1."""
    root, faults = parse(
        "a: 134\nb: -1.5\nc: 1.0e+6\nd: 1.0e-4\ne: true\nf: null\ng: 'on'\nh: [1, x y]\ni: .inf\n"
    )
    assert not faults
    assert plain(root) == {
        "a": 134,
        "b": -1.5,
        "c": 1e6,
        "d": 1e-4,
        "e": True,
        "f": None,
        "g": "on",
        "h": [1, "x y"],
        "i": float("inf"),
    }
    assert str(root.entries[7].node.items[1].mark) == "a.yaml:8:8"


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("0134", "write 134"),
        ("-007", "write -7"),
        ("00", "write 0"),
        ("1_000", "plain decimal"),
        ("0x86", "plain decimal"),
        ("0o17", "plain decimal"),
        ("0b11", "plain decimal"),
        ("1:30", "quote it"),
        ("2024-01-31", "quote it"),
        ("=", "quote it"),
        ("<<", "quote it"),
        ("~", "write null"),
        ("Null", "write null"),
        ("", "null where null is allowed"),
        ("5.", "write 5.0"),
        (".5", "write 0.5"),
        ("+.5e3", "write 500.0"),
    ],
)
def test_ambiguous_scalars(text, fix):
    """Each of these is one value to some YAML readers and another to others: one fault that shows
    place and text and says what to write."""
    message = refused(f"a: 1\nwindow: {text}\n")
    assert message.count("\n") == 0
    assert message.startswith("a.yaml:2:")
    assert text in message
    assert fix in message


@pytest.mark.parametrize("text", ["1e6", "1.0e6", "1E6", "1e+6"])
def test_y02_exponents_without_dot_and_sign(text):
    """Y02: 1e6 and 1.0e6 are text to YAML 1.1 readers, a number to YAML 1.2 ones; refused with the
    form that all read alike. 1.0e+6 is 1000000.0."""
    assert refused(f"theta: {text}") == (
        f"a.yaml:1:8: got {text}, text to some YAML readers, a number to others; write 1000000.0"
    )
    assert plain(parse("theta: 1.0e+6")[0]) == {"theta": 1000000.0}


@pytest.mark.parametrize("value", [1e-5, 1e16, 1.5e300, 0.1, -2.5e-7, 1e6])
def test_float_text_reads_back(value):
    """The form offered as a fix is accepted and gives the same float: 1e16 is 1.0e+16."""
    assert plain_value(float_text(value)) == (value, "")


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "y", "N", "True", "FALSE", "On"])
def test_y03_words_that_turn_boolean(word):
    """Y03: `layers: [local, local, no]`, `sink: off` and a key `on:` are faults that name entry and
    place; quoted they are text."""
    assert f"a.yaml:1:24: got {word}" in refused(f"layers: [local, local, {word}]")
    assert f"a.yaml:1:7: got {word}" in refused(f"sink: {word}")
    assert f"a.yaml:2:1: got {word}" in refused(f"a: 1\n{word}: 1")
    assert plain(parse(f"sink: '{word}'")[0]) == {"sink": word}


def test_y01_duplicate_keys():
    """Y01: the same key twice is a fault with both lines, at the top, inside one mapping, beside a
    merge key, and for the merge key itself."""
    top = refused("swa: {w: 128}\nb: 1\nswa: {w: 1024}")
    assert "a.yaml:3:1: duplicate key swa, first at line 1" in top
    assert "a.yaml:3:3: duplicate key w, first at line 2" in refused("swa:\n  w: 1\n  w: 2")
    merged = "base: &b {w: 1, x: 2}\nswa:\n  <<: *b\n  w: 3\n  w: 4\n"
    assert "a.yaml:5:3: duplicate key w, first at line 4" in refused(merged)
    assert "a.yaml:4:3: duplicate key <<" in refused("b: &b {w: 1}\nc:\n  <<: *b\n  <<: *b\n")
    assert "duplicate key on" in refused("'on': 1\n\"on\": 2")


def test_y01_merge_keys_still_work():
    """Y01: a merge gives its keys, a key written out wins over a merged one, the first of several
    merged mappings wins over later ones."""
    root, faults = parse("base: &b {w: 1, x: 2}\nswa:\n  <<: *b\n  w: 3\n")
    assert not faults
    assert plain(root)["swa"] == {"w": 3, "x": 2}
    root, faults = parse("a: &a {x: 1}\nb: &b {x: 2, z: 3}\nc: {<<: [*a, *b]}\n")
    assert not faults
    assert plain(root)["c"] == {"x": 1, "z": 3}
    assert "expected one to merge" in refused("c: {<<: 5}")


@pytest.mark.parametrize("text", ["", "\n\n", "# only\n# comments\n", "---\n", "\ufeff"])
def test_y06_empty(text):
    """Y06: zero bytes, only comments, an empty document: one line that names the file."""
    message = refused(text)
    assert message.startswith("a.yaml")
    assert "\n" not in message


@pytest.mark.parametrize("text", ["- a\n- b\n", "[1, 2]", "only text", "12"])
def test_y06_no_mapping_at_the_top(text):
    """Y06: a list or a scalar at the top is refused by name."""
    assert "at the top, expected a mapping" in refused(text)


def alias_bomb(levels: int, width: int) -> str:
    lines = ["a0: &a0 [" + ", ".join(["x"] * width) + "]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [" + ", ".join([f"*a{level - 1}"] * width) + "]")
    return "\n".join(lines)


def test_y08_alias_bomb():
    """Y08: nine levels of nine aliases would be 387,420,489 leaves; refused within a second, by the
    number of aliases or of written-out values, whichever comes first."""
    start = time.perf_counter()
    assert "more than" in refused(alias_bomb(9, 9))
    assert "more than 20000 values" in refused(alias_bomb(6, 10))
    many = "a: &a 1\nb: [" + ", ".join(["*a"] * (MAX_ALIASES + 1)) + "]"
    assert f"more than {MAX_ALIASES} aliases" in refused(many)
    assert time.perf_counter() - start < 5.0  # not a timing test: the bomb takes hours


def test_y08_cycles_depth_and_size():
    """An alias inside its own anchor, an unknown anchor, 100,000 nested lists and a file above
    1 MiB are refused, none by a stack overflow."""
    assert "no finished anchor &a" in refused("a: &a [*a]")
    assert "no finished anchor &nope" in refused("a: *nope")
    assert "nested deeper than 32" in refused("a: " + "[" * 100_000)
    assert "nested deeper than 32" in refused("a: " + "{b: " * 1000)
    assert "more than 1048576 bytes" in refused("a: " + "x" * (1 << 20))


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['touch {made}']",
        "a: !!python/name:os.system",
        "a: !!binary aGk=",
        "a: !custom {b: 1}",
        "!!python/object:x.Y {b: 1}",
        "a: !!str 1",
        "a: ! x",
    ],
)
def test_y09_tags_are_refused_and_nothing_runs(text, tmp_path):
    """Y09: every tag is a fault; the tree is built from events, so no constructor can run."""
    made = tmp_path / "made"
    assert "tag" in refused(text.replace("{made}", str(made)))
    assert not made.exists()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: [1, 2\nb: 3\n", "a.yaml:2:"),
        ("a: 1\n\tb: 2\n", "a.yaml:2:1"),
        ("a: b: c\n", "a.yaml:1:5"),
        ("a: 'open\n", "a.yaml:"),
        ("a: \x07\n", "a.yaml"),
        (b"a: 1\nb: \xff\xfe\n", "a.yaml:2:1: not UTF-8"),
        ("a: 1\n---\nb: 2\n", "a.yaml:2:1: a second document"),
        ("? [a, b]\n: 1\n", "a.yaml:1:3: got a list or mapping as a key"),
    ],
)
def test_broken_text(text, place):
    """Text that is no YAML, or not one document, gives one line with the place."""
    message = refused(text)
    assert message.startswith(place)
    assert "\n" not in message


def test_overrides():
    """`a.b.c=value` replaces one value; lists by index, in brackets or by id; later ones win."""
    root, faults = parse(
        "run: {seed: 1, lens: [1, 2], name: x}\ngroups:\n  - {id: x, w: 1}\n  - {id: z, w: 2}"
    )
    for override in (
        "run.seed=3",
        "run.lens=[4, 5]",
        "groups.z.w=7",
        "groups[0].w=8",
        "run.seed=4",
        "run.name= memory: ",
        "run.new=5",
    ):
        root = apply_override(root, override, faults)
    assert not faults
    assert plain(root) == {
        "run": {"seed": 4, "lens": [4, 5], "name": "memory:", "new": 5},
        "groups": [{"id": "x", "w": 8}, {"id": "z", "w": 7}],
    }
    seed = root.entries[0].node.entries[0].node
    assert isinstance(seed, Scalar)
    assert str(seed.mark) == "--set run.seed=4"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed.x=3", "got the unknown key x, expected nothing"),
        ("groups.z.w=3", "got the unknown key z, expected one of x"),
        ("groups.5.w=3", "got the unknown key 5, expected one of x"),
        ("run.seed", "got no key=value"),
        ("=3", "got no key=value"),
        ("run.seed=", "got no value"),
        ("run.seed=on", "got on, a boolean to some"),
        ("run.seed=0134", "write 134"),
        ("run.seed=!!int 3", "got the tag"),
    ],
)
def test_bad_overrides(override, message):
    """An override that names nothing, or whose value is not plain, is a fault that shows it."""
    root, faults = parse("run: {seed: 1}\ngroups: [{id: x, w: 1}]")
    apply_override(root, override, faults)
    assert len(faults) == 1
    assert faults[0].startswith(f"--set {override}")
    assert message in faults[0]


def test_override_that_is_no_yaml():
    """A value that is no YAML is refused with the override shown."""
    root, faults = parse("run: {seed: 1}")
    with pytest.raises(ConfigError, match=r"--set run.seed=\[1: not YAML"):
        apply_override(root, "run.seed=[1", faults)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('"a\\nb.yaml:1:1: fine"', '"a\\nb.yaml:1:1: fine"'),
        ('"\\e[2J\\a"', '"\\x1b[2J\\x07"'),
        ('"\\u2028\\u202E"', '"\\u2028\\u202e"'),
        ('"\\uD800"', '"\\ud800"'),
    ],
)
def test_what_a_file_holds_is_one_line(tmp_path, text, shown):
    """A value with a line end, an escape sequence, a reversal of the text or half a character: one
    line, in which it is written out."""
    path = tmp_path / "odd.yaml"
    path.write_text(QUICKSTART.read_text().replace("kind: swa", f"kind: {text}", 1))
    with pytest.raises(ConfigError) as caught:
        rs.load_config(path)
    (line,) = str(caught.value).splitlines()
    assert f"layer_groups[0].kind: got {shown}, expected one of" in line
    with pytest.raises(ConfigError) as caught:
        rs.load_config("quickstart", (f"run.activations={text}",))
    assert len(str(caught.value).splitlines()) == 1
