"""What a file from elsewhere can do: configurations, recorded arrays, traces and caches run
nothing, and a run writes the files that it was told to write, and no other."""

import ast
import json
import os
import stat
import warnings
from pathlib import Path

import numba
import numpy as np
import pytest
from config_edits import QUICKSTART
from engine_runs import TINY, tiny

import ringslab as rs
from ringslab.errors import ActivationError, ArgumentError, ConfigError
from ringslab.rawkernels.cpu import kernels
from ringslab.tools import checks
from ringslab.tools.main import main

ROOT = Path(__file__).resolve().parent.parent
# Modules that turn bytes into code or run other programs, and calls that do.
RISKY_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "code", "runpy"}
RISKY_CALLS = {"eval", "exec", "compile", "__import__"}
RISKY_YAML = {"load", "load_all", "full_load", "unsafe_load", "Loader", "FullLoader"}


def test_no_shipped_module_can_run_what_it_reads():
    """No pickle, marshal, eval, exec, shell or unsafe YAML loader in any shipped source; NumPy
    files are read with allow_pickle=False."""
    found, sources = [], list(checks.sources(ROOT, ".py", folders=checks.LAYERS))
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module.split(".")[0]]
            found += [f"{where}: imports {name}" for name in names if name in RISKY_MODULES]
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            bad = called in RISKY_CALLS or called.startswith(("os.system", "os.popen"))
            bad |= called.startswith("yaml.") and called.removeprefix("yaml.") in RISKY_YAML
            bad |= options.get("shell") == "True" or options.get("allow_pickle") == "True"
            bad |= called == "np.load" and options.get("allow_pickle") != "False"
            found += [f"{where}: {called}(...)"] if bad else []
    assert len(sources) > 150
    assert found == []


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.mkdir [{}]", "!!python/object/new:os.mkdir [[{}]]"]
)
def test_yaml_is_never_executed(tmp_path, tag):
    """A tag that makes a folder, in a file, in a list and in an override: a fault that names the
    tag, and no folder."""
    target, path = tmp_path / "made", tmp_path / "evil.yaml"
    evil = tag.format(target)
    for old in ("name: quickstart", "    layers: [0]", "  seed: 1"):
        text = QUICKSTART.read_text()
        assert old in text
        path.write_text(text.replace(old, f"{old.split(':')[0]}: {evil}", 1))
        with pytest.raises(ConfigError, match=r"got the tag .*python/object"):
            rs.load_config(path)
    with pytest.raises(ConfigError, match="got the tag"):
        rs.load_config("quickstart", (f"run.seed={evil}",))
    assert not target.exists()


class MakesFolder:
    """Its pickle makes a folder where it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_recorded_arrays_are_never_unpickled(tmp_path):
    """Object arrays in an .npz and in a folder of .npy files: an error that names the file, and
    nothing has run."""
    target = tmp_path / "made"
    evil = np.array([MakesFolder(target)], dtype=object)
    np.savez(tmp_path / "evil.npz", **{"q.0": evil})
    (tmp_path / "folder").mkdir()
    np.save(tmp_path / "folder" / "q.0.npy", evil)
    for name in ("evil.npz", "folder"):
        overrides = ("run.activations=file", f"run.activations_path={tmp_path / name}")
        with (
            rs.Engine(tiny(*overrides), "reference") as engine,
            pytest.raises(ActivationError, match=name),
        ):
            engine.run()
    assert not target.exists()


@pytest.fixture
def numba_folder(tmp_path, monkeypatch):
    """A Numba cache of our own; its path."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    kernels._warn_once.cache_clear()
    yield tmp_path / "numba"
    kernels._warn_once.cache_clear()


def twice(x):
    return 2 * x


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_numba_cache_that_others_can_write_is_not_read(numba_folder, mode):
    """Numba's cache is pickled. Its folder is made with mode 0700, whatever the umask; the same
    folder writable by group or others is refused with one warning, and kernels are compiled without
    it."""
    mask = os.umask(0)
    try:
        assert kernels.device_function(twice)(3) == 6
    finally:
        os.umask(mask)
    (folder,) = numba_folder.iterdir()
    assert list(folder.glob("*.nbi"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(mode)
    for path in folder.iterdir():
        path.write_bytes(b"planted")
    with pytest.warns(RuntimeWarning, match=f"mode {mode:04o}.* is refused; chmod go-w") as seen:
        doubled = kernels.device_function(twice)(4), kernels.device_function(twice)(5)
    assert doubled == (8, 10)
    assert len(seen) == 1
    assert {path.read_bytes() for path in folder.iterdir()} == {b"planted"}
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.device_function(twice)(6) == 12


def test_numba_cache_of_another_user_is_not_read(numba_folder, monkeypatch):
    """A private folder that someone else owns is theirs to fill."""
    assert kernels.device_function(twice)(3) == 6
    real = os.stat

    def foreign(path, *arguments, **options):
        found = real(path, *arguments, **options)
        if Path(path).parent != numba_folder:
            return found
        return os.stat_result((*found[:4], os.geteuid() + 1, *found[5:10]))

    monkeypatch.setattr(os, "stat", foreign)
    with pytest.warns(RuntimeWarning, match=rf"owner {os.geteuid() + 1}, mode"):
        assert kernels.device_function(twice)(4) == 8


def tree(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_run_writes_what_it_was_told_and_no_more(tmp_path, monkeypatch, capsys):
    """Recorded arrays whose names climb out of their folder, a trace, a report and a timeline:
    after the run there are three files more, all in the folder that was named, with the modes of
    the umask; nothing in the working folder or in the home."""
    for name in ("work", "home", "out", "in"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    arrays = {}
    for layer in range(4):
        arrays[f"q.{layer}"] = np.zeros((70, 4, 128), np.uint16)
        arrays[f"kv.{layer}"] = np.zeros((70, 128), np.uint16)
        arrays[f"../../climb/q.{layer}"] = arrays[f"q.{layer}"]
        arrays[f"../../climb/kv.{layer}"] = arrays[f"kv.{layer}"]
    np.savez(tmp_path / "in" / "arrays.npz", **arrays)
    trace = tmp_path / "in" / "t.jsonl"
    line = {"timestamp": 0, "input_length": 9, "output_length": 3, "hash_ids": [1]}
    trace.write_text(json.dumps(line) + "\n")
    before = tree(tmp_path)
    command = [
        "run", str(TINY), "--trace", str(trace), "--backend", "reference",
        "--set", "run.activations=file",
        "--set", f"run.activations_path={tmp_path / 'in' / 'arrays.npz'}",
        "--report", str(tmp_path / "out" / "r.json"),
        "--timeline", str(tmp_path / "out" / "t.json"),
    ]  # fmt: skip
    mask = os.umask(0o027)
    try:
        assert main(command) == 0, capsys.readouterr().err
    finally:
        os.umask(mask)
    assert tree(tmp_path) - before == {"out/r.json", "out/t.json", "out/t.svg"}
    assert before <= tree(tmp_path)
    assert stat.S_IMODE((tmp_path / "out" / "r.json").stat().st_mode) == 0o640
    with rs.Engine(tiny(*command[7:10:2]), "reference") as engine:
        request = rs.Request("../../climb", np.arange(5, dtype=np.int32), 2)
        before = tree(tmp_path)
        engine.run([request])
    assert tree(tmp_path) == before


def test_a_report_takes_the_place_of_a_link(tmp_path):
    """A symbolic link in the folder that was named is replaced; what it points to stays."""
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "r.json").symlink_to(precious)
    with rs.Engine(tiny(), "reference") as engine:
        engine.run([rs.Request("a", [1, 2], 1)], report_path=tmp_path / "out" / "r.json")
    assert precious.read_text() == "mine"
    assert not (tmp_path / "out" / "r.json").is_symlink()
    assert json.loads((tmp_path / "out" / "r.json").read_text())["requests"] == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--timeline", "t.svg"], "--timeline and the picture of --timeline are both t.svg"),
        (["--timeline", "t.json", "--report", "t.svg"], "--report and the picture of --timeline"),
        (["--timeline", "r.json", "--report", "./r.json"], "are both"),
        (["--timeline", "t.json", "--plot", "t.svg"], "the picture of --timeline and --plot are"),
        (["--trace", "t.jsonl", "--report", "t.jsonl"], "--trace and --report are both t.jsonl"),
        (["--report", str(TINY)], "CONFIG and --report are both"),
        (["--report", "a\0b"], "--report 'a\\x00b' holds a NUL"),
        (["--timeline", "no/t.json"], "No such file"),
    ],
)
def test_one_file_is_not_written_over_by_another(tmp_path, monkeypatch, capsys, options, says):
    """Report, timeline, its picture and the plot are files of their own, and not the trace or the
    configuration: a command that would lose one is refused before anything runs."""
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(TINY), "--backend", "reference", *options]) == 2
    assert says in capsys.readouterr().err
    assert tree(tmp_path) == set()
    assert main(["prefix", str(TINY), "--report", str(TINY)]) == 2
    assert "prefix: CONFIG and --report are both" in capsys.readouterr().err
    with rs.Engine(tiny(), "reference") as engine:
        with pytest.raises(ArgumentError, match=r"are both .*r\.json"):
            engine.run(report_path="r.json", timeline_path=tmp_path / "r.json")
        with pytest.raises(ArgumentError, match=r"timeline_path .* holds a NUL"):
            engine.run(timeline_path="a\0b")


@pytest.mark.parametrize(
    ("command", "option"),
    [("layout", "--svg"), ("budget", "--plot"), ("header", "--out"), ("prefix", "--report")],
)
def test_no_command_writes_over_its_configuration(command, option, tmp_path, capsys):
    """A picture, a header or a report at the configuration's own path, or at a link to it: status
    2, both names, and the file as it was."""
    config, link = tmp_path / "a.yaml", tmp_path / "b.svg"
    text = (Path(rs.__file__).parent / "configs" / "quickstart.yaml").read_text()
    config.write_text(text)
    link.symlink_to(config)
    for path in (config, link):
        assert main([command, str(config), option, str(path)]) == 2
        error = capsys.readouterr().err
        assert f"CONFIG and {option} are both" in error
        assert config.read_text() == text
