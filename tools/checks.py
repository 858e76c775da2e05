"""The project's own rules, as checks: `python -m ringslab.tools.checks [ROOT]`, and in the tests.

Each check takes the repository root and yields one line a violation, `path:line: what, and what to
do`. They read the sources and import nothing of them.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_COLUMNS = 100
MAX_FUNCTION_LINES = 70
MAX_FILE_LINES = 400

# The layers, top to bottom; a folder imports itself and what is listed for it.
LAYERS = {
    "tools": {"engine", "schedules", "rawkernels", "layouts"},
    "engine": {"schedules", "rawkernels", "layouts"},
    "schedules": {"rawkernels", "layouts"},
    "rawkernels": {"layouts"},
    "layouts": set(),
    "configs": set(),
}
FOLDERS = (*LAYERS, "tests")
ROOT_NAMES = {"__version__"}  # all that a folder may take from the root module
BACKENDS = ("reference", "cpu", "cuda")
# Where the Python files of an operation are, beside its test.
STEM_FOLDERS = ("rawkernels", *(f"rawkernels/{name}" for name in BACKENDS), "tools/bench")
GPU_PACKAGES = {"cupy", "cupyx", "cuda"}  # never imported while a module loads
DEVICE_PACKAGES = GPU_PACKAGES | {"numba", "llvmlite"}  # imported under rawkernels/ only

# Paths of one machine and documents that are not in the repository. Written so that this file does
# not match itself.
PRIVATE = re.compile(
    r"\.\./shared|(?<![\w.$}/-])/(?:work|home|root|Users|mnt)/\w|\bDESIG[N]\b|\bCONVENTION[S]\b"
)


@dataclass(frozen=True)
class Import:
    """One imported module or name. `parts` is the absolute dotted path below the root package for
    ours (empty: the root itself) and the plain path for others."""

    line: int
    ours: bool
    relative: bool
    parts: tuple[str, ...]
    at_load: bool  # runs while the module is imported


def sources(root: Path, *suffixes: str, folders: Iterable[str] = FOLDERS) -> Iterator[Path]:
    """Files of the project with one of the suffixes: the root's own, then each folder's."""
    for suffix in suffixes:
        yield from sorted(root.glob(f"*{suffix}"))
        for folder in folders:
            yield from sorted((root / folder).rglob(f"*{suffix}"))


def check_imports(root: Path) -> Iterator[str]:
    """Imports go one way, down the layers, and are relative; backends do not meet, and drawings
    know no command; CuPy, Numba and CUDA stay in rawkernels/, and nothing of the GPU loads with a
    module."""
    for path in sources(root, ".py", folders=LAYERS):
        where = path.relative_to(root)
        home = where.parts[:-1]
        for item in imports_of(path, home):
            fault = _import_fault(item, home)
            if fault:
                yield f"{where}:{item.line}: {fault}"


def _import_fault(item: Import, home: tuple[str, ...]) -> str | None:
    folder = home[0] if home else None
    top = item.parts[0] if item.parts else ""
    if not item.ours:
        if top in DEVICE_PACKAGES and folder != "rawkernels":
            return f"imports {top}; only rawkernels/ may"
        if top in GPU_PACKAGES and item.at_load:
            return f"imports {top} at load; import it inside the function that needs it"
        return None
    if not item.relative:
        return "absolute import of ringslab; write it relative (from ..layouts import ...)"
    if folder is None or top == folder:
        return _backend_fault(item, home) or _drawing_fault(item, home)
    if top in LAYERS and top not in LAYERS[folder]:
        return f"{folder}/ imports {top}/, which lies above it"
    if top not in LAYERS and top not in ROOT_NAMES:
        return f"imports {top or 'the root module'} from the root; take it from its own folder"
    return None


def _backend_fault(item: Import, home: tuple[str, ...]) -> str | None:
    backend = home[1] if len(home) > 1 and home[0] == "rawkernels" else None
    target = item.parts[1] if len(item.parts) > 1 else None
    if backend in BACKENDS and target in BACKENDS and target != backend:
        return f"backend {backend} imports backend {target}; share through rawkernels/ or layouts/"
    return None


def _drawing_fault(item: Import, home: tuple[str, ...]) -> str | None:
    if home[:2] == ("tools", "drawing") and item.parts[:2] != home[:2]:
        return f"tools/drawing/ imports {'.'.join(item.parts)}; a command hands over what is drawn"
    return None


def imports_of(path: Path, home: tuple[str, ...]) -> Iterator[Import]:
    """Every import in a file, `import_module("...")` with a literal name included. Imports under
    `if TYPE_CHECKING` do not run and count as not at load."""
    tree = ast.parse(path.read_text(), str(path))
    lazy = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        or (isinstance(outer, ast.If) and "TYPE_CHECKING" in ast.unparse(outer.test))
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        at_load = id(node) not in lazy
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _import(node.lineno, alias.name, at_load)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield _import(node.lineno, node.module or "", at_load)
        elif isinstance(node, ast.ImportFrom):
            base = home[: len(home) - (node.level - 1)]
            module = tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                yield Import(node.lineno, True, True, (*base, *module, alias.name), at_load)
        elif isinstance(node, ast.Call) and node.args and _imports_by_name(node.func):
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else "."
            if not str(name).startswith("."):
                yield _import(node.lineno, str(name), at_load)


def _imports_by_name(function: ast.expr) -> bool:
    return ast.unparse(function).split(".")[-1] in ("import_module", "__import__")


def _import(line: int, name: str, at_load: bool) -> Import:
    parts = tuple(name.split("."))
    ours = parts[0] == "ringslab"
    return Import(line, ours, False, parts[1:] if ours else parts, at_load)


def check_sizes(root: Path) -> Iterator[str]:
    """100 columns; Python functions of 70 lines, files of 400."""
    for path in sources(root, ".py", ".cu", ".cuh", ".cpp", ".yaml", ".toml"):
        where = path.relative_to(root)
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_COLUMNS:
                yield f"{where}:{number}: {len(line)} columns, at most {MAX_COLUMNS}"
        if path.suffix in (".py", ".cu", ".cuh", ".cpp") and len(lines) > MAX_FILE_LINES:
            yield f"{where}:1: {len(lines)} lines, at most {MAX_FILE_LINES}; split it"
        if path.suffix == ".py":
            yield from _long_functions(path, where)


def _long_functions(path: Path, where: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield (
                    f"{where}:{node.lineno}: {node.name} has {length} lines, "
                    f"at most {MAX_FUNCTION_LINES}"
                )


def check_words(root: Path) -> Iterator[str]:
    """Nothing shipped names a path of one machine, a folder beside the repository, or a document
    that is not in it."""
    shipped = [
        *sources(root, ".py", ".cu", ".cuh", ".yaml", ".toml", ".md", folders=LAYERS),
        *sorted((root / "docs").rglob("*.md")),
        *sorted((root / ".ci").rglob("*")),
    ]
    for path in shipped:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if found := PRIVATE.search(line):
                where = path.relative_to(root)
                yield f"{where}:{number}: {found[0]!r} is not in this repository; name what is"


def check_stems(root: Path) -> Iterator[str]:
    """One operation, one stem: a `.cu` has its launcher, CPU kernel, reference, public module,
    benchmark and test under the same name. A kernel for one architecture or one kind of records,
    `<stem>_sm90....cu` and `<stem>_gqa.cu`, counts as its operation's."""
    for source in sorted((root / "rawkernels" / "cuda").glob("*.cu")):
        stem = re.sub(r"_(sm\d+|gqa).*$", "", source.stem)
        for folder in STEM_FOLDERS:
            if not (root / folder / f"{stem}.py").is_file():
                yield f"{source.relative_to(root)}:1: {folder}/{stem}.py is missing"
        if not (root / "tests" / f"test_{stem}.py").is_file():
            yield f"{source.relative_to(root)}:1: tests/test_{stem}.py is missing"


def check_ruff(root: Path) -> Iterator[str]:
    """ruff's lint rules, as pyproject.toml sets them."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", "--quiet", "."]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if "No module named ruff" in done.stderr:
        yield "ruff is not installed: pip install '.[dev]'"
    elif done.returncode != 0:
        yield from (done.stdout + done.stderr).strip().splitlines()


CHECKS = (check_imports, check_sizes, check_words, check_stems, check_ruff)


def main(argv: list[str]) -> int:
    root = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent
    faults = [fault for check in CHECKS for fault in check(root)]
    print("\n".join(faults) if faults else f"{len(CHECKS)} checks passed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
