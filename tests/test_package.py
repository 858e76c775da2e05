"""What is built for users: the wheel and the sdist, and that the wheel runs by itself."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import ringslab
from ringslab.tools import checks

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("build") is None, reason="the package `build` is not installed"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist of a copy of the tree, and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(copy_of_tree(out))]
    done = subprocess.run(command, capture_output=True, text=True)
    text = done.stdout + done.stderr
    if done.returncode != 0 and "setuptools" in text and "No matching distribution" in text:
        pytest.skip("the build backend setuptools>=80 cannot be had: no package index")
    assert done.returncode == 0, text
    return out


def copy_of_tree(out: Path) -> Path:
    """A copy of the files that git knows or would add, so that the build leaves no trace here and
    sees no stray file."""
    tree = out / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: which files belong to the project is not known")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def wheel_names(built) -> set[str]:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_names_and_version(built):
    """One pure wheel and one sdist, named by the version of ringslab.__version__."""
    version = ringslab.__version__
    names = sorted(path.name for path in built.iterdir() if path.is_file())
    assert names == [f"ringslab-{version}-py3-none-any.whl", f"ringslab-{version}.tar.gz"]


def test_wheel_holds_the_tree(wheel_names):
    """Every Python file, kernel source, YAML file and py.typed of the tree is in the wheel under
    ringslab/, and nothing else is: no tests, no docs, no stray top-level name."""
    shipped = {
        f"ringslab/{path.relative_to(ROOT)}"
        for path in checks.sources(ROOT, ".py", ".cu", ".cuh", folders=checks.LAYERS)
    }
    shipped |= {f"ringslab/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    shipped |= {"ringslab/py.typed"}
    files = {name for name in wheel_names if ".dist-info/" not in name}
    assert files == shipped
    info = f"ringslab-{ringslab.__version__}.dist-info"
    assert {name.split("/")[0] for name in wheel_names} == {"ringslab", info}
    assert f"{info}/licenses/LICENSE" in wheel_names


def test_wheel_packages_are_the_list(wheel_names):
    """The packages of the wheel are the list in pyproject.toml."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    inits = {name for name in wheel_names if name.endswith("/__init__.py")}
    assert {name.rsplit("/", 1)[0].replace("/", ".") for name in inits} == set(listed)


def test_sdist_has_no_tests(built):
    """The sdist holds what the wheel is built from, README, CHANGELOG and docs; no tests, no CI."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "py.typed"} <= names
    for folder, suffixes in (("docs", (".md", ".py", ".svg", ".json")), ("configs", (".yaml",))):
        wanted = {
            str(path.relative_to(ROOT))
            for path in (ROOT / folder).rglob("*")
            if path.suffix in suffixes and "__pycache__" not in path.parts
        }
        assert wanted
        assert wanted <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    assert not [name for name in names if name.startswith(("tests", ".ci", ".git"))]


def test_wheel_runs_alone(built, tmp_path):
    """From an unpacked wheel, in another folder: the version, the packaged configurations and the
    kernel sources are there."""
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import ringslab as rs\n"
        "from importlib.resources import files\n"
        "print(rs.__version__, rs.__file__)\n"
        "print(rs.load_config('quickstart.yaml').name)\n"
        "print(len([f for f in files('ringslab.rawkernels.cuda').iterdir()"
        " if f.name.endswith('.cu')]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    version, name, kernels = done.stdout.splitlines()
    assert version == f"{ringslab.__version__} {tmp_path}/site/ringslab/__init__.py"
    assert name
    assert int(kernels) == len(list((ROOT / "rawkernels" / "cuda").glob("*.cu")))
