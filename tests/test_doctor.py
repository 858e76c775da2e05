"""`ringslab doctor`: findings from facts, and the command itself on this machine."""

import json

import pytest

from ringslab.tools import doctor_cmd, main
from ringslab.tools.doctor_rules import Facts, find, version_of, why_no_cuda

H200 = {
    "id": 0,
    "name": "NVIDIA H200",
    "compute_capability": (9, 0),
    "arch": "sm_90a",
    "total_bytes": 150 * 2**30,
}
PACKAGES = {
    "numpy": "2.4.6",
    "numba": "0.68.1",
    "pyyaml": "6.0.4",
    "ml_dtypes": "0.6.0",
    "rich": "15.0.0",
    "lmdb": "3.0.0",
    "cupy-cuda13x": "14.2.0",
    "numba-cuda": "0.30.4",
    "cuda-bindings": "13.0.3",
    "nvtx": "0.2.17",
    "redis": "8.1.0",
    "matplotlib": "3.11.2",
    "pytest": "9.0.0",
    "transformers": "5.17.0",
}
PROGRAMS = {name: f"/usr/bin/{name}" for name in ("g++", "nvdisasm", "redis-server")}
CACHE = {"path": "/c", "variable": "V", "problem": None, "files": 3, "bytes": 4096}


def make_facts(packages=None, **changes) -> Facts:
    """A machine where everything is right, with changes."""
    values = {
        "python": "3.12.1",
        "packages": PACKAGES | (packages or {}),
        "driver_cuda": "13.0",
        "driver_problem": None,
        "gpus": (H200,),
        "gpu_problem": None,
        "nvrtc": "13.0",
        "nvrtc_problem": None,
        "cache": CACHE,
        "programs": PROGRAMS,
    }
    return Facts(**(values | changes))


def test_a_sound_machine_has_no_findings():
    """An H200 with the pinned set: cuda runs and there is nothing to mend."""
    assert find(make_facts()) == []
    assert why_no_cuda(make_facts()) is None


@pytest.mark.parametrize(
    ("changes", "level", "words", "mend"),
    [
        ({"packages": {"numpy": "2.5.2"}}, "warning", "numpy 2.5.2", "pip install 'numpy<2.5'"),
        ({"nvrtc": "13.5"}, "error", "NVRTC 13.5 is newer", "nvvm]==13.0.*'"),
        ({"packages": {"cupy-cuda12x": "14.2.0"}}, "error", "installed together", "uninstall"),
        ({"packages": {"cuda-bindings": "12.9.1"}}, "error", "different major", "==13.*'"),
        ({"packages": {"cupy-cuda13x": None}}, "warning", "CuPy is not installed", "[cuda]"),
        ({"packages": {"ml_dtypes": None}}, "error", "ml_dtypes is not", "pip install ml_dtypes"),
        ({"packages": {"redis": None}}, "note", "redis://", "pip install 'redis>=5'"),
        ({"packages": {"matplotlib": None}}, "note", "ringslab plot", "pip install 'matplotlib"),
        ({"packages": {"transformers": None}}, "note", "no transformers", "pip install transf"),
        ({"programs": PROGRAMS | {"redis-server": None}}, "note", "no redis-server", "apt-get"),
        ({"packages": {"lmdb": None}}, "warning", "lmdb is not", "pip install 'lmdb>=3'"),
        ({"packages": {"lmdb": "2.2.0"}}, "warning", "lmdb 2.2.0 is too old", "lmdb>=3"),
        ({"packages": {"nvtx": None}}, "note", "no nvtx", "pip install nvtx"),
        ({"nvrtc": None, "nvrtc_problem": "no lib"}, "warning", "no NVRTC", "[cuda]"),
        ({"cache": CACHE | {"problem": "/c is refused"}}, "warning", "/c is refused", "set V"),
        ({"programs": PROGRAMS | {"nvdisasm": None}}, "note", "no nvdisasm", "nvdisasm"),
        ({"programs": PROGRAMS | {"g++": None}}, "note", "no g++", "g++"),
        (
            {"gpus": ({**H200, "compute_capability": (7, 5), "arch": "sm_75"},)},
            "warning",
            "older than sm_80",
            "cpu",
        ),
    ],
)
def test_one_fault_is_one_finding(changes, level, words, mend):
    """Each fault alone gives one finding, with the command that mends it."""
    (finding,) = find(make_facts(**changes))
    assert finding.level == level
    assert words in finding.what
    assert mend in finding.mend


def test_numpy_2_5_without_numba_cuda_is_fine():
    """Only numba-cuda stumbles over numpy 2.5: without it there is nothing to say."""
    assert find(make_facts(packages={"numpy": "2.5.5", "numba-cuda": None})) == []


def test_tools_of_the_tests_are_missed_with_pytest_only():
    """Without pytest nobody runs tests: transformers and redis-server are not missed."""
    none = {"pytest": None, "transformers": None}
    assert find(make_facts(none, programs=PROGRAMS | {"redis-server": None})) == []


def test_errors_come_first():
    """The most serious finding is the first."""
    facts = make_facts(nvrtc="13.5", packages={"nvtx": None, "numpy": "2.5.0"})
    assert [finding.level for finding in find(facts)] == ["error", "warning", "note"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"driver_problem": "no driver", "nvrtc_problem": "no NVRTC"}, "no driver"),
        ({"gpu_problem": "no CuPy", "nvrtc_problem": "no NVRTC"}, "no CuPy"),
        ({"nvrtc": None, "nvrtc_problem": "no NVRTC"}, "no NVRTC"),
    ],
)
def test_why_no_cuda(changes, reason):
    """The first thing that is missing is named."""
    assert why_no_cuda(make_facts(**changes)) == reason


def test_a_machine_without_a_gpu_is_no_error():
    """No driver, no GPU packages: cpu runs, notes only, status 0."""
    bare = dict.fromkeys(("cupy-cuda13x", "numba-cuda", "cuda-bindings", "nvtx"))
    facts = make_facts(packages=bare, driver_cuda=None, driver_problem="none", gpus=(), nvrtc=None)
    assert {finding.level for finding in find(facts)} == {"note"}


@pytest.mark.parametrize(
    ("text", "numbers"), [("2.5.2rc1", (2, 5, 2)), ("13.0", (13, 0)), (None, ()), ("x", ())]
)
def test_version_of(text, numbers):
    """Leading numbers only; what has none is smaller than every version."""
    assert version_of(text) == numbers


@pytest.mark.parametrize("facts", [make_facts(), make_facts(nvrtc="13.5")])
def test_table_and_json_tell_the_same(monkeypatch, capsys, facts):
    """Both forms name the GPU or its absence and every finding; the status is 1 with an error."""
    monkeypatch.setattr(doctor_cmd, "gather_facts", lambda: facts)
    status = main.main(["doctor"])
    text = capsys.readouterr().out
    assert main.main(["doctor", "--json"]) == status == (facts.nvrtc == "13.5")
    report = json.loads(capsys.readouterr().out)
    assert report["backends"]["cuda"]["runs"] == (why_no_cuda(facts) is None)
    assert len(report["findings"]) == len(find(facts))
    for finding in report["findings"]:
        assert finding["mend"] in text
    for gpu in report["gpus"]:
        assert gpu["name"] in text
        assert gpu["compute_capability"] == "9.0"


def test_doctor_on_this_machine(capsys):
    """The real thing answers, finds NumPy and Numba, and leaves no base package out."""
    assert main.main(["doctor", "--json"]) in (0, 1)
    report = json.loads(capsys.readouterr().out)
    for name in ("numpy", "numba", "pyyaml", "ml_dtypes", "rich"):
        assert report["packages"][name], name
    assert report["backends"]["cpu"]["runs"]
    assert set(report["cubin_cache"]) == set(CACHE)
