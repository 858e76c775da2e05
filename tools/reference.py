"""The reference page, written from docstrings: `python -m ringslab.tools.reference [--check]`.

Reads the sources and imports nothing of them. The public names are those of the root's
TYPE_CHECKING block, their order and headings those of the README's table of names. `--check` writes
nothing, and ends with status 1 where docs/reference.md is not what would be written.
"""

import ast
import re
import sys
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

PAGE = "docs/reference.md"
MAX_COLUMNS = 100
TITLE = "# Reference"
HEAD = """
Every public name of `import ringslab as rs`, and the types that they take and return. This page is
written from the docstrings by `python -m ringslab.tools.reference`; a test fails where it is out
of date. The words are explained in [architecture.md](architecture.md#words), the rules for bytes
and bounds in [numerics.md](numerics.md). Operations take NumPy arrays, CuPy arrays, or anything
with one of their protocols; `stream` is a CuPy stream, or None for the current one, and the host
ignores it.
"""
# Types that no caller makes by hand, but meets: where each is defined.
MET_TYPES = {
    "Config": "layouts/config_types.py",
    "LayerConfig": "layouts/config_types.py",
    "Ring": "layouts/slots.py",
    "PagedLayer": "layouts/paged.py",
    "Field": "layouts/formats.py",
    "DecodePlan": "layouts/plans.py",
    "PrefillPlan": "layouts/plans.py",
    "Batch": "schedules/batch.py",
    "HostBatch": "schedules/batch.py",
    "TileCounts": "layouts/tiles.py",
    "KvBytes": "layouts/budget.py",
    "Store": "engine/store.py",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def reference_page(root: Path) -> str:
    """The text of docs/reference.md for the sources under `root`."""
    homes = public_homes(root)
    blocks = [TITLE, " ".join(HEAD.split())]
    for names, what in name_groups((root / "README.md").read_text()):
        blocks.append(f"## {what[0].upper()}{what[1:]}")
        for name in names:
            blocks.extend(_describe(root / homes[name], name))
    blocks.append("## Types that are met")
    blocks.append("No caller makes these by hand; public names take and return them.")
    for name, home in MET_TYPES.items():
        blocks.extend(_describe(root / home, name, prefix=""))
    return "\n\n".join(blocks) + "\n"


def public_homes(root: Path) -> dict[str, str]:
    """{public name: file, from the root}, as the root's TYPE_CHECKING imports say."""
    homes = {}
    for node in ast.walk(ast.parse((root / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for alias in node.names:
                homes[alias.name] = f"{(node.module or alias.name).replace('.', '/')}.py"
    return homes


def name_groups(readme: str) -> Iterator[tuple[list[str], str]]:
    """(names, what they are for) of each row of the README's table of names."""
    table = readme[readme.index("| names | what |") :].split("\n\n")[0]
    for row in table.splitlines()[2:]:
        names, what = row.strip("| ").split(" | ")
        yield re.findall(r"`(\w+)`", names), what.split(":")[0]


def _describe(path: Path, name: str, prefix: str = "rs.") -> Iterator[str]:
    """Heading, signature and docstring of a function, of a class with its methods and properties,
    or of a module of exceptions."""
    tree = ast.parse(path.read_text(), str(path))
    yield f"### {prefix}{name}"
    node = _definition(tree, name)
    if node is None:
        yield from _prose(ast.get_docstring(tree))
        yield from _exceptions(path.parent / "layouts" / "errors.py")
        return
    doc = ast.get_docstring(node)
    if isinstance(node, ast.ClassDef):
        node.body = _whole_body(tree, node)
        yield _fence(_call_text(name, _constructor(node)), "python")
    else:
        yield _fence(_signature(node), "python")
    yield from _prose(doc)
    if isinstance(node, ast.ClassDef):
        yield from _members(node)


def _definition(tree: ast.Module, name: str) -> ast.ClassDef | Function | None:
    found = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name
    )
    return next(found, None)


def _whole_body(tree: ast.Module, node: ast.ClassDef) -> list[ast.stmt]:
    """The statements of a class, behind those of its bases in the same file."""
    bases = [_definition(tree, ast.unparse(base)) for base in node.bases]
    inherited = [part for base in bases if base for part in _whole_body(tree, base)]
    return [*inherited, *node.body]


def _exceptions(path: Path) -> Iterator[str]:
    rows = ["| exception | is also | what |", "| --- | --- | --- |"]
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(f"`{ast.unparse(base)}`" for base in node.bases)
            doc = " ".join(ast.get_docstring(node).split())
            rows.append(f"| `{node.name}` | {bases} | {doc} |")
    yield "\n".join(rows)


def _members(node: ast.ClassDef) -> Iterator[str]:
    """The public properties as a list, then each public method with signature and docstring."""
    members = [
        member
        for member in node.body
        if isinstance(member, Function) and not member.name.startswith("_")
    ]
    properties = [item for item in members if _is_property(item)]
    if properties:
        yield "\n".join(_property_item(item) for item in properties)
    for method in members:
        if method not in properties:
            yield f"#### {node.name}.{method.name}"
            yield _fence(_signature(method, method=True), "python")
            yield from _prose(ast.get_docstring(method))


def _is_property(member: Function) -> bool:
    return any(ast.unparse(item) == "property" for item in member.decorator_list)


def _property_item(member: Function) -> str:
    result = f": {ast.unparse(member.returns)}" if member.returns else ""
    doc = " ".join((ast.get_docstring(member) or "").split())
    return f"- `.{member.name}{result}`" + (f" {doc}" if doc else "")


def _constructor(node: ast.ClassDef) -> list[str]:
    """The constructor's parameters: of `__init__`, or the fields of a dataclass."""
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return _parameters(member.args)[1:]
    return [
        ast.unparse(field)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and not field.target.id.startswith("_")
    ]


def _signature(node: Function, method: bool = False) -> str:
    parameters = _parameters(node.args)[int(method) :]  # without self
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return _call_text(node.name, parameters, result)


def _parameters(arguments: ast.arguments) -> list[str]:
    """Each parameter as it is written; commas inside of brackets or quotes do not split."""
    parts, depth, quoted = [""], 0, False
    for letter in ast.unparse(arguments):
        quoted ^= letter == "'"
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    parts = [part.strip() for part in parts if part.strip()]
    return [part.replace("=", " = ", 1) if ": " in part else part for part in parts]


def _call_text(name: str, parameters: list[str], result: str = "") -> str:
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) <= MAX_COLUMNS:
        return line
    body = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{name}(\n{body}){result}"


def _prose(doc: str | None) -> Iterator[str]:
    """Paragraphs as one line each; those laid out in columns as they are."""
    for paragraph in cleandoc(doc or "").split("\n\n"):
        if re.search(r"^\S.*\S {2,}\S|^ {2,}", paragraph, re.MULTILINE):
            yield _fence(paragraph, "text")
        elif paragraph:
            yield " ".join(paragraph.split())


def _fence(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```"


def main(argv: list[str]) -> int:
    root = Path(__file__).resolve().parent.parent
    page, text = root / PAGE, reference_page(root)
    if argv not in ([], ["--check"]):
        print("usage: python -m ringslab.tools.reference [--check]", file=sys.stderr)
        return 2
    if not argv:
        page.write_text(text)
        count = text.count("\n### ")
        print(f"{PAGE}: {count} names")
        return 0
    if page.read_text() == text:
        return 0
    print(f"{PAGE} is out of date: python -m ringslab.tools.reference", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
