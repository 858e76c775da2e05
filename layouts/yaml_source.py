"""YAML text to a tree of nodes that know where they were written, with nothing left to guess.

YAML readers disagree about `on`, `0134`, `1e6`, tags, duplicate keys and aliases. Here each of
these is a fault with file, line and fix, or is bounded before anything walks the tree. The tree is
built from parser events, so no constructor of the YAML package ever runs.
"""

import re
from dataclasses import dataclass, replace

import yaml

from .errors import ConfigError

# Bounds of a file; the largest packaged configuration has 9 KB, 500 nodes, depth 6.
MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_ALIASES = 64
MAX_NODES = 20_000  # after aliases are written out


@dataclass(frozen=True)
class Mark:
    """Where a node was written; line and column count from 1, and line 0 is an override."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True)
class Bad:
    """The value of a scalar that was already reported as a fault."""


@dataclass(frozen=True)
class Scalar:
    """`text` as written (quotes shown), `value` a bool, int, float, None, str or Bad."""

    mark: Mark
    text: str
    value: bool | int | float | str | Bad | None


@dataclass(frozen=True)
class Sequence:
    mark: Mark
    items: tuple["Node", ...]


@dataclass(frozen=True)
class Entry:
    mark: Mark
    key: str
    node: "Node"


@dataclass(frozen=True)
class Mapping:
    mark: Mark
    entries: tuple[Entry, ...]


Node = Scalar | Sequence | Mapping

_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)\.[0-9]+(?:[eE][-+][0-9]+)?")
_LOOSE_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_NUMBER_LIKE = re.compile(r"[-+]?(?:[0-9][0-9_]*|0[xX][0-9a-fA-F_]+|0o[0-7_]+|0b[01_]+)")
_OTHER = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?|\d{4}-\d\d?-\d\d?.*|=|<<")
_BOOL_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false"}
_NON_FINITE = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf")}


def faults_error(faults: list[str]) -> ConfigError:
    """One line a fault. What a file holds is shown with control characters and line ends written
    out, so that it cannot pass for a line of ours, nor steer the terminal that shows it."""
    lines = (
        "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in fault
        )
        for fault in faults
    )
    return ConfigError("\n".join(lines))


def float_text(value: float) -> str:
    """A float as every YAML reader takes for a float: with a dot, its exponent signed."""
    text = repr(value)
    if "e" not in text:
        return text
    digits, exponent = text.split("e")
    return f"{digits if '.' in digits else digits + '.0'}e{int(exponent):+d}"


def plain_value(text: str) -> tuple[bool | int | float | str | Bad | None, str]:
    """Value of an unquoted scalar and, where it means different things to different YAML readers,
    what is wrong with it and the fix (else "")."""
    if text in ("true", "false"):
        return text == "true", ""
    if text == "null":
        return None, ""
    if _INT.fullmatch(text):
        return int(text), ""
    if _FLOAT.fullmatch(text):
        return float(text), ""
    if text.lower() in _NON_FINITE:
        return _NON_FINITE[text.lower()], ""
    if text.lower() == ".nan":
        return float("nan"), ""
    if text == "":
        return Bad(), "expected a value; write one, or null where null is allowed"
    if text == "~" or text.lower() == "null":
        return Bad(), "expected one spelling of null; write null"
    if text.lower() in _BOOL_WORDS:
        return Bad(), (
            "a boolean to some YAML readers, text to others; write true or false, or quote it"
        )
    if re.fullmatch(r"[-+]?0[0-9]+", text):
        sign = "-" if text[0] == "-" else ""
        return Bad(), (
            "octal to some YAML readers, decimal to others; "
            f"write {sign}{text.lstrip('+-').lstrip('0') or '0'}"
        )
    if _NUMBER_LIKE.fullmatch(text):
        return Bad(), "not read alike by all YAML readers; write the number in plain decimal digits"
    if _LOOSE_FLOAT.fullmatch(text):
        number = float_text(float(text.replace("_", "")))
        return Bad(), f"text to some YAML readers, a number to others; write {number}"
    if _OTHER.fullmatch(text):
        return Bad(), "not text to all YAML readers; quote it if it is text"
    return text, ""


class _Builder:
    """Builds the tree from parser events; faults that do not hide others are collected."""

    def __init__(self, text: str, source: str, faults: list[str], fixed_mark: bool) -> None:
        self.source, self.faults, self.fixed_mark = source, faults, fixed_mark
        self.loader = yaml.SafeLoader(text)
        self.anchors: dict[str, tuple[Node | None, int]] = {}
        self.aliases = self.nodes = 0

    def mark(self, at) -> Mark:
        if self.fixed_mark:
            return Mark(self.source)
        return Mark(self.source, at.line + 1, at.column + 1)

    def stop(self, mark: Mark, text: str) -> ConfigError:
        return faults_error([*self.faults, f"{mark}: {text}"])

    def document(self) -> Node | None:
        self.loader.get_event()  # stream start
        if self.loader.check_event(yaml.StreamEndEvent):
            return None
        self.loader.get_event()  # document start
        root = self.node(0)
        self.loader.get_event()  # document end
        if not self.loader.check_event(yaml.StreamEndEvent):
            mark = self.mark(self.loader.peek_event().start_mark)
            raise self.stop(mark, "a second document begins here; write one document in a file")
        return root

    def count(self, mark: Mark, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise self.stop(
                mark, f"more than {MAX_NODES} values, aliases written out; write a smaller file"
            )

    def node(self, depth: int, *, is_key: bool = False) -> Node:
        event = self.loader.get_event()
        mark = self.mark(event.start_mark)
        if depth > MAX_DEPTH:
            raise self.stop(mark, f"nested deeper than {MAX_DEPTH} levels; write a flatter file")
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event.anchor, mark)
        before = self.nodes
        self.count(mark, 1)
        if event.anchor is not None:
            self.anchors[event.anchor] = (None, 0)
        if event.tag is not None:
            self.faults.append(f"{mark}: got the tag {event.tag}, expected none; remove the tag")
        if isinstance(event, yaml.ScalarEvent):
            node: Node = self.scalar(event, mark, is_key)
        elif isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not self.loader.check_event(yaml.SequenceEndEvent):
                items.append(self.node(depth + 1))
            self.loader.get_event()
            node = Sequence(mark, tuple(items))
        else:
            node = self.mapping(mark, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = (node, self.nodes - before)
        return node

    def alias(self, anchor: str, mark: Mark) -> Node:
        self.aliases += 1
        if self.aliases > MAX_ALIASES:
            raise self.stop(mark, f"more than {MAX_ALIASES} aliases; write the values out")
        node, size = self.anchors.get(anchor, (None, 0))
        if node is None:
            raise self.stop(mark, f"got *{anchor}, but no finished anchor &{anchor} precedes it")
        self.count(mark, size)
        return node

    def scalar(self, event: yaml.ScalarEvent, mark: Mark, is_key: bool) -> Scalar:
        if event.style is not None:
            return Scalar(mark, f'"{event.value}"', event.value)
        value, wrong = plain_value(event.value)
        if wrong and not (is_key and event.value == "<<"):  # a merge is the mapping's business
            self.faults.append(f"{mark}: got {event.value or 'nothing'}, {wrong}")
        return Scalar(mark, event.value, value)

    def mapping(self, mark: Mark, depth: int) -> Mapping:
        entries: dict[str, Entry] = {}
        merged: dict[str, Entry] = {}
        first_merge: Mark | None = None
        while not self.loader.check_event(yaml.MappingEndEvent):
            key = self.node(depth + 1, is_key=True)
            node = self.node(depth + 1)
            if not isinstance(key, Scalar):
                self.faults.append(f"{key.mark}: got a list or mapping as a key, expected a word")
            elif key.text == "<<":
                if first_merge is not None:
                    self.faults.append(f"{key.mark}: duplicate key <<, first at {first_merge}")
                first_merge = key.mark
                self.merge(node, merged)
            elif isinstance(key.value, Bad):
                continue  # reported where it was read
            elif not isinstance(key.value, str):
                self.faults.append(
                    f"{key.mark}: got the key {key.text}, no text to other YAML readers; write a "
                    "word, or quote it"
                )
            else:
                name = key.value
                if name in entries:
                    first = entries[name].mark
                    self.faults.append(
                        f"{key.mark}: duplicate key {name}, first at line {first.line}; "
                        "keep one of the two"
                    )
                else:
                    entries[name] = Entry(key.mark, name, node)
        self.loader.get_event()
        kept = tuple(e for name, e in merged.items() if name not in entries)
        return Mapping(mark, (*entries.values(), *kept))

    def merge(self, node: Node, merged: dict[str, Entry]) -> None:
        for part in node.items if isinstance(node, Sequence) else (node,):
            if isinstance(part, Mapping):
                for entry in part.entries:
                    merged.setdefault(entry.key, entry)
            else:
                self.faults.append(f"{part.mark}: got no mapping, expected one to merge with <<")


def _build(text: str, source: str, faults: list[str], *, fixed_mark: bool = False) -> Node | None:
    try:
        return _Builder(text, source, faults, fixed_mark).document()
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        mark = Mark(source, at.line + 1, at.column + 1) if at and not fixed_mark else Mark(source)
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise faults_error([*faults, f"{mark}: not YAML: {problem}"]) from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise faults_error([*faults, f"{source}: not YAML: {problem}"]) from None


def parse_yaml(data: bytes, source: str, faults: list[str]) -> Mapping:
    """The tree of a file's bytes; `source` is the name that marks show.

    Appends faults (text with file, line, column) that leave the rest readable; raises ConfigError
    for text that is no YAML mapping, and for a file past the bounds at the top of this module.
    """
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{source}: more than {MAX_FILE_BYTES} bytes, expected a smaller file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{source}:{line}:1: not UTF-8; save the file as UTF-8") from None
    root = _build(text, source, faults)
    if root is None:
        raise ConfigError(
            f"{source}: the file is empty, or holds only comments; expected a mapping"
        )
    if not isinstance(root, Mapping):
        kind = "a list" if isinstance(root, Sequence) else f"{root.text or 'nothing'}"
        raise faults_error([f"{root.mark}: got {kind} at the top, expected a mapping of keys"])
    return root


def apply_override(root: Mapping, override: str, faults: list[str]) -> Mapping:
    """The tree with one value replaced, or added to a mapping; `override` is `a.b.c=value`, value
    being YAML. A word with a colon, as the address `memory:`, is text.

    Elements of a list are named by index or by their `id`: `layer_groups.drafts.window=32`.
    Appends a fault and returns the tree as it was where the path names nothing.
    """
    path, equals, text = override.partition("=")
    source = f"--set {override}"
    if not equals or not path.strip():
        faults.append(f"{source}: got no key=value, expected for example run.seed=3")
        return root
    if re.fullmatch(r"\s*\w+:\s*", text):
        text = f'"{text.strip()}"'  # `memory:` is an address here: no value is a key alone
    value = _build(text, source, faults, fixed_mark=True)
    if value is None:
        faults.append(f"{source}: got no value, expected one after =")
        return root
    parts = path.strip().replace("[", ".").replace("]", "").split(".")
    if len(parts) > MAX_DEPTH:
        faults.append(f"{source:.60}: got {len(parts)} parts, expected {MAX_DEPTH} at most")
        return root
    return _replaced(root, parts, value, source, faults)


def _replaced(node: Node, parts: list[str], value: Node, source: str, faults: list[str]) -> Node:
    if not parts:
        return value
    head, rest = parts[0], parts[1:]
    if isinstance(node, Scalar) and node.value is None:
        node = Mapping(value.mark, ())  # null is a section that is left out
    if isinstance(node, Mapping):
        names = [entry.key for entry in node.entries]
        if head in names:
            at = names.index(head)
            entry = node.entries[at]
            new = replace(
                entry, node=_replaced(entry.node, rest, value, source, faults), mark=value.mark
            )
            return replace(node, entries=node.entries[:at] + (new,) + node.entries[at + 1 :])
        # An optional key, or section, that the file leaves out; the schema knows the others.
        new = _replaced(Mapping(value.mark, ()), rest, value, source, faults) if rest else value
        return replace(node, entries=(*node.entries, Entry(value.mark, head, new)))
    elif isinstance(node, Sequence):
        names = [_id_of(item) or str(i) for i, item in enumerate(node.items)]
        numbers = {str(i): i for i in range(len(names))}
        at = names.index(head) if head in names else numbers.get(head, len(names))
        if at < len(names):
            new_item = _replaced(node.items[at], rest, value, source, faults)
            return replace(node, items=node.items[:at] + (new_item,) + node.items[at + 1 :])
    else:
        names = []
    known = f"one of {', '.join(names)}" if names else "nothing: the part before it is one value"
    faults.append(f"{source}: got the unknown key {head}, expected {known}")
    return node


def _id_of(node: Node) -> str:
    if isinstance(node, Mapping):
        for entry in node.entries:
            value = entry.node.value if isinstance(entry.node, Scalar) else None
            if entry.key == "id" and isinstance(value, str):
                return value
    return ""
