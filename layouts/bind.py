"""Binds a tree of YAML nodes to frozen dataclasses, collecting every fault with its place.

A field's annotation is its schema: int, float, str, bool, Literal, `X | None`, `tuple[X, ...]`,
`tuple[X, Y]`, another dataclass, each perhaps `Annotated[..., Bound(...)]`. A field with a default
may be left out of the YAML; any other must be there.
"""

import math
import types
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from .yaml_source import Bad, Mapping, Mark, Node, Scalar, Sequence

BAD = Bad()  # stands for a value that was reported; never leaves a bound tree without a fault


@dataclass(frozen=True)
class Bound:
    """Smallest and largest value of a number, and what to write instead."""

    least: int | float | None = None
    most: int | float | None = None
    above: float | None = None
    fix: str = ""

    def expected(self, noun: str) -> str:
        parts = [
            f"{sign} {value}"
            for sign, value in ((">=", self.least), (">", self.above), ("<=", self.most))
            if value is not None
        ]
        return " ".join([noun, " and ".join(parts)]).strip()

    def holds(self, value: int | float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
        )


@dataclass
class Binder:
    """Faults found so far, and where each bound value was written."""

    faults: list[str]
    marks: dict[str, Mark]
    root: type

    def fault(self, path: str, got: Any, expected: str, fix: str = "", mark: Mark | None = None):
        """Adds `file:line:column: path: got VALUE, expected ...; fix`."""
        tail = f"; {fix}" if fix else ""
        where = mark or self.marks[path]
        self.faults.append(f"{where}: {path}: got {got}, expected {expected}{tail}")

    def derived(self, path: str, stated: Any, derived: Any, why: str = "") -> None:
        """Adds a fault where a stated number differs from the derived one."""
        if stated != derived:
            reason = f" ({why})" if why else ""
            got = _yaml_word(stated)
            expected = f"the derived value {_yaml_word(derived)}{reason}"
            fix = f"write {_yaml_word(derived)}, or change what it follows from"
            self.fault(path, got, expected, fix)

    def bind(self, node: Node, schema: Any, path: str) -> Any:
        """The value of a node, or BAD where a fault was added."""
        self.marks[path] = node.mark
        bound = Bound()
        if get_origin(schema) is Annotated:
            schema, bound = get_args(schema)
        if get_origin(schema) in (Union, types.UnionType):
            options = [option for option in get_args(schema) if option is not types.NoneType]
            assert len(options) == 1, schema  # only `X | None` is used
            if isinstance(node, Scalar) and node.value is None:
                return None
            return self.bind_one(node, options[0], bound, path, or_null=" or null")
        return self.bind_one(node, schema, bound, path, or_null="")

    def bind_one(self, node: Node, schema: Any, bound: Bound, path: str, or_null: str) -> Any:
        if get_origin(schema) is Annotated:
            schema, bound = get_args(schema)
        if isinstance(node, Scalar) and isinstance(node.value, Bad):
            return BAD
        if is_dataclass(schema):
            return self.bind_mapping(node, schema, path, or_null)
        if get_origin(schema) is tuple:
            return self.bind_tuple(node, get_args(schema), path, or_null)
        if get_origin(schema) is Literal:
            words = get_args(schema)
            if isinstance(node, Scalar) and node.value in words:
                return node.value
            near = get_close_matches(_shown(node), words, 1)
            fix = f"did you mean {near[0]}?" if near else ""
            return self.refuse(node, path, f"one of {', '.join(words)}{or_null}", fix)
        return self.bind_scalar(node, schema, bound, path, or_null)

    def bind_scalar(self, node: Node, schema: Any, bound: Bound, path: str, or_null: str) -> Any:
        noun = {int: "an integer", float: "a number", str: "text", bool: "true or false"}[schema]
        value = node.value if isinstance(node, Scalar) else None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        expected = bound.expected(noun) + or_null
        if schema in (int, float):
            right = is_number and (schema is float or isinstance(value, int))
            if right and not math.isfinite(value):
                return self.refuse(node, path, f"a finite number{or_null}", bound.fix)
            if not right or not bound.holds(value):
                return self.refuse(node, path, expected, bound.fix)
            return schema(value)
        if not isinstance(value, schema) or value == "":
            return self.refuse(node, path, expected, bound.fix)
        return value

    def bind_tuple(self, node: Node, items: tuple, path: str, or_null: str) -> Any:
        open_ended = items[-1] is Ellipsis
        if not isinstance(node, Sequence) or not (open_ended or len(node.items) == len(items)):
            size = "" if open_ended else f" of {len(items)}"
            return self.refuse(node, path, f"a list{size}{or_null}", "")
        schemas = [items[0]] * len(node.items) if open_ended else items
        values = tuple(
            self.bind(item, schema, f"{path}[{i}]")
            for i, (item, schema) in enumerate(zip(node.items, schemas, strict=True))
        )
        return BAD if any(value is BAD for value in values) else values

    def bind_mapping(self, node: Node, schema: type, path: str, or_null: str) -> Any:
        if not isinstance(node, Mapping):
            names = ", ".join(f.name for f in fields(schema))
            return self.refuse(node, path, f"a mapping of {names}{or_null}", "")
        hints = get_type_hints(schema, include_extras=True)
        found = {entry.key: entry for entry in node.entries}
        prefix = f"{path}." if path else ""
        values: dict[str, Any] = {}
        for field in fields(schema):
            if field.name in found:
                entry = found.pop(field.name)
                values[field.name] = self.bind(entry.node, hints[field.name], prefix + field.name)
            elif field.default is MISSING:
                self.faults.append(
                    f"{node.mark}: {prefix}{field.name}: got no such key, expected it here; "
                    f"add {field.name}"
                )
                values[field.name] = BAD
        written = {entry.key for entry in node.entries}
        free = [name for name in hints if name not in written]
        for entry in found.values():
            self.faults.append(
                f"{entry.mark}: {prefix}{entry.key}: got an unknown key, "
                f"expected one of {', '.join(hints)}{self.hint(entry.key, free)}"
            )
        if found or any(value is BAD for value in values.values()):
            return BAD
        return schema(**values)

    def hint(self, key: str, names: list[str]) -> str:
        """The nearest of the keys that could still be written here, or else the place where a key
        of this very name belongs."""
        near = get_close_matches(key, names, 1)
        places = [place for place in _key_places(self.root, "") if place.rpartition(".")[2] == key]
        if near:
            return f"; did you mean {near[0]}?"
        if places:
            return f"; {key} belongs at {places[0]}"
        return "; remove it"

    def refuse(self, node: Node, path: str, expected: str, fix: str) -> Any:
        self.fault(path, _shown(node), expected, fix, mark=node.mark)
        return BAD


def _yaml_word(value: Any) -> Any:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else value


def _shown(node: Node) -> str:
    if isinstance(node, Scalar):
        return node.text or "nothing"
    if isinstance(node, Sequence):
        return f"a list of {len(node.items)}"
    return "a mapping"


def _key_places(schema: Any, prefix: str) -> list[str]:
    """Every key of a schema with its path, lists shown as `[]`."""
    if is_dataclass(schema):
        hints = get_type_hints(schema)
        places = [prefix + name for name in hints]
        for name, hint in hints.items():
            places += _key_places(hint, f"{prefix}{name}.")
        return places
    if get_origin(schema) is tuple:
        return _key_places(get_args(schema)[0], f"{prefix.rstrip('.')}[].")
    if get_origin(schema) in (Union, types.UnionType):
        return _key_places(get_args(schema)[0], prefix)
    return []
