"""The project's shape: its rules hold, its package list is the tree, its root is lazy."""

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import ringslab
from ringslab.tools import checks

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_rules(check):
    """Imports go one way, sizes hold, no private paths, one stem an operation, ruff is clean."""
    faults = list(check(ROOT))
    assert not faults, "\n" + "\n".join(faults)


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("layouts/a.py", "from ..engine.run import run\n", "layouts/ imports engine/"),
        ("layouts/a.py", "from .. import schedules\n", "layouts/ imports schedules/"),
        ("schedules/a.py", "def f():\n    from ..engine import x\n", "schedules/ imports engine/"),
        ("engine/a.py", "import cupy\n", "imports cupy; only rawkernels/ may"),
        ("engine/a.py", "m = import_module('numba.cuda')\n", "imports numba; only rawkernels/ may"),
        ("rawkernels/a.py", "import cupy as cp\n", "imports cupy at load"),
        ("rawkernels/cuda/a.py", "from cuda.core import Program\n", "imports cuda at load"),
        ("rawkernels/cpu/a.py", "from ..cuda.b import f\n", "backend cpu imports backend cuda"),
        ("rawkernels/reference/a.py", "from .. import cpu\n", "imports backend cpu"),
        ("engine/a.py", "from ringslab.layouts import sizes\n", "absolute import of ringslab"),
        ("tools/a.py", "from .. import load_config\n", "imports load_config from the root"),
        ("tools/drawing/a.py", "from ..plot_cmd import run\n", "tools/drawing/ imports tools.plot"),
        ("tools/drawing/a.py", "from .b import f\nfrom ...engine.c import g\n", None),
        ("tests/x.py", "", None),
        ("tools/a.py", "from .. import __version__\nfrom ..engine.run import run\n", None),
        ("rawkernels/cuda/a.py", "from numba import njit\nfrom ..device.module import f\n", None),
        ("rawkernels/cuda/a.py", "def f():\n    import cupy\n", None),
        ("engine/a.py", "if TYPE_CHECKING:\n    from ..layouts.slots import Ring\n", None),
    ],
)
def test_import_rule_sees(tmp_path, name, text, fault):
    """Each forbidden arrow is one violation that names file, line and module; each allowed one
    is none."""
    found = list(checks.check_imports(write_tree(tmp_path, {name: text})))
    assert len(found) == (fault is not None)
    if fault:
        assert found[0].startswith(f"{name}:")
        assert fault in found[0]


def test_size_rule_sees(tmp_path):
    """101 columns, 71 lines in a function and 401 lines in a file are violations; 100, 70 and 400
    are not."""
    body = "    x = 1\n"
    write_tree(
        tmp_path,
        {
            "layouts/ok.py": "#" * 100 + "\ndef f():\n" + body * 69 + "#\n" * 329,
            "layouts/wide.cuh": "/" * 101 + "\n",
            "layouts/long.py": "def f():\n" + body * 70,
            "layouts/file.py": "#\n" * 401,
        },
    )
    found = sorted(line.split(":")[0] for line in checks.check_sizes(tmp_path))
    assert found == ["layouts/file.py", "layouts/long.py", "layouts/wide.cuh"]


def test_word_rule_sees(tmp_path):
    """A path of one machine or a document that is not here is a violation in shipped text; in
    tests/ it is not."""
    text = "see /" + "home/me/x\nrules of DES" + "IGN 4.4\n"
    write_tree(tmp_path, {"docs/a.md": text, "configs/a.yaml": text, "tests/a.py": text})
    found = [line.split(":")[0] for line in checks.check_words(tmp_path)]
    assert found == ["configs/a.yaml"] * 2 + ["docs/a.md"] * 2


def test_stem_rule_sees(tmp_path):
    """A lone .cu lacks six files; with all of them there it lacks none, and a variant for one
    architecture needs no more."""
    write_tree(tmp_path, {"rawkernels/cuda/op.cu": ""})
    assert len(list(checks.check_stems(tmp_path))) == 6
    homes = ("cuda/", "cpu/", "reference/", "")
    write_tree(tmp_path, {f"rawkernels/{home}op.py": "" for home in homes})
    write_tree(tmp_path, {"tools/bench/op.py": ""} | {"tests/test_op.py": ""})
    write_tree(tmp_path, {"rawkernels/cuda/op_sm90_small.cu": ""})
    assert list(checks.check_stems(tmp_path)) == []


def packages_of_tree() -> list[str]:
    """Dotted names of the folders that hold Python files, but for tests."""
    found = {"ringslab"}
    for folder in checks.LAYERS:
        for path in (ROOT / folder).rglob("*.py"):
            found.add(".".join(("ringslab", *path.parent.relative_to(ROOT).parts)))
    return sorted(found)


def test_package_list_is_the_tree():
    """pyproject names every folder with Python in it, no other, and each has an __init__.py; the
    tests are no package."""
    listed = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == packages_of_tree()
    for package in listed:
        assert (ROOT / "/".join(package.split(".")[1:]) / "__init__.py").is_file(), package
    assert not (ROOT / "tests" / "__init__.py").exists()


def test_package_data_is_the_tree():
    """Every kernel source and YAML file lies in a folder whose data pyproject ships."""
    data = PYPROJECT["tool"]["setuptools"]["package-data"]
    for path in checks.sources(ROOT, ".cu", ".cuh", ".yaml", folders=checks.LAYERS):
        package = ".".join(("ringslab", *path.parent.relative_to(ROOT).parts))
        assert f"*{path.suffix}" in data.get(package, ()), path


@pytest.mark.parametrize("name", dir(ringslab))
def test_public_name_resolves(name):
    """dir(ringslab) is the public table, and each of its names is there."""
    assert getattr(ringslab, name) is not None


def test_unknown_name_is_an_attribute_error():
    """A wrong name is told as a wrong name, not as a missing module."""
    with pytest.raises(AttributeError, match="no attribute 'windows_decode'"):
        ringslab.windows_decode  # noqa: B018


def test_type_checkers_see_the_public_names():
    """The TYPE_CHECKING imports of the root name the same modules as its lazy table."""
    imports = checks.imports_of(ROOT / "__init__.py", ())
    seen = {item.parts[-1]: "." + ".".join(item.parts[:-1]) for item in imports if item.relative}
    assert seen == ringslab._HOMES | {"errors": "."}


def test_public_errors_are_all_errors():
    """ringslab.errors holds every exception of layouts.errors, under RingslabError."""
    from ringslab.layouts import errors as home

    classes = {name for name, value in vars(home).items() if isinstance(value, type)}
    assert set(ringslab.errors.__all__) == classes
    assert all(issubclass(getattr(home, name), home.RingslabError) for name in classes)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_loads_nothing():
    """`import ringslab` and the command line's start bring in none of ours but the root and
    tools, and no NumPy, Numba, CuPy, YAML or rich."""
    code = """
        import sys
        import ringslab, ringslab.tools.main
        try:
            ringslab.tools.main.main(["--version"])
        except SystemExit:
            pass
        heavy = {"numpy", "numba", "cupy", "cuda", "yaml", "rich", "ml_dtypes", "nvtx"}
        print(sorted(heavy & set(sys.modules)))
        print(sorted(name for name in sys.modules if name.startswith("ringslab.")))
    """
    version, heavy, ours = run_python(textwrap.dedent(code)).splitlines()
    assert version == f"ringslab {ringslab.__version__}"
    assert heavy == "[]"
    layouts = "'ringslab.layouts', 'ringslab.layouts.errors'"
    assert ours == f"[{layouts}, 'ringslab.tools', 'ringslab.tools.main']"
