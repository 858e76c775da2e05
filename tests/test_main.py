"""The command line's frame: exit statuses, errors as one message, lazy commands."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringslab import __version__
from ringslab.errors import ArgumentError, ConfigError
from ringslab.tools import main as cli


def fake_command(monkeypatch, run):
    """Put a command in place of `doctor` that calls `run(args)`."""

    def add_arguments(parser):
        parser.add_argument("--number", type=int, default=0)

    command = SimpleNamespace(
        DESCRIPTION="", EXAMPLE="ringslab doctor", add_arguments=add_arguments, run=run
    )
    monkeypatch.setattr(cli, "_load_command", lambda name: command)


def raising(error):
    def run(args):
        raise error

    return run


def test_version(capsys):
    """`ringslab --version` prints name and version and ends with 0."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"ringslab {__version__}\n"


def test_help_names_every_command(capsys):
    """--help lists run, layout, compile and doctor; no command at all is the help and status 2."""
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    assert cli.main([]) == 2
    assert capsys.readouterr().err == text
    for command in ("run", "layout", "compile", "doctor"):
        assert f"\n    {command} " in text


def test_every_command_is_there():
    """The commands are the modules `tools/*_cmd.py`, no more and no less; each has what the frame
    takes of it, and answers --help."""
    modules = {path.stem for path in Path(cli.__file__).parent.glob("*_cmd.py")}
    assert modules == {f"{command}_cmd" for command in cli._COMMANDS}
    for command in cli._COMMANDS:
        module = cli._load_command(command)
        assert callable(module.add_arguments), command
        assert callable(module.run), command
        assert len(module.DESCRIPTION) > 40, command
        with pytest.raises(SystemExit) as stop:
            cli.main([command, "--help"])
        assert stop.value.code == 0, command


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_every_help_has_an_example_that_parses(command, capsys):
    """--help ends with example lines of that command, as they are typed; its own parser takes the
    last of them, and every command prints JSON on request."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    lines = text.partition("example:\n")[2].splitlines()
    assert lines, text
    assert all(line.startswith("  ringslab ") for line in lines)
    _, *words = shlex.split(lines[-1])
    assert words[0] == command
    parser = cli._build_parser(command, cli._load_command(command))
    assert parser.parse_args(words)
    assert parser.parse_args([*words, "--json"]).json or "--json" in words


def test_command_gets_its_arguments_and_gives_its_status(monkeypatch):
    """The status of `run(args)` is the status of the program."""
    fake_command(monkeypatch, lambda args: args.number)
    assert cli.main(["doctor", "--number", "7"]) == 7


@pytest.mark.parametrize("argv", [["doktor"], ["doctor", "--wrong"], ["doctor", "--number", "x"]])
def test_wrong_words_are_status_2(monkeypatch, capsys, argv):
    """An unknown command, an unknown option and a mistyped value are named on stderr."""
    fake_command(monkeypatch, lambda args: 0)
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert argv[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ConfigError("a.yaml:3:1: model.window: got 0, must be at least 1"),
            "a.yaml:3:1: model.window: got 0, must be at least 1",
        ),
        (
            ArgumentError("window_decode: q.shape[2]=96 but the layout's head_dim=512"),
            "window_decode: q.shape[2]=96 but the layout's head_dim=512",
        ),
        (
            FileNotFoundError(2, "No such file or directory", "a.jsonl"),
            "a.jsonl: No such file or directory",
        ),
        (OSError("out of luck"), "out of luck"),
    ],
)
def test_an_error_is_one_line(monkeypatch, capsys, error, line):
    """A caller's mistake gives its message on one line of stderr, no traceback, and status 2."""
    monkeypatch.delenv("RINGSLAB_TRACEBACK", raising=False)
    fake_command(monkeypatch, raising(error))
    assert cli.main(["doctor"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"ringslab: {line}\n"


def test_traceback_on_request(monkeypatch):
    """RINGSLAB_TRACEBACK=1 lets the exception through."""
    monkeypatch.setenv("RINGSLAB_TRACEBACK", "1")
    fake_command(monkeypatch, raising(ConfigError("bad")))
    with pytest.raises(ConfigError, match="bad"):
        cli.main(["doctor"])


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    """An AssertionError is a fault of ringslab and is never turned into a tidy message."""
    fake_command(monkeypatch, raising(AssertionError("off by one")))
    with pytest.raises(AssertionError, match="off by one"):
        cli.main(["doctor"])


def test_ctrl_c_is_130(monkeypatch, capsys):
    """Ctrl-C ends with 130 and one word on stderr."""
    fake_command(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "ringslab: interrupted\n"


def test_a_closed_pipe_is_quiet():
    """`ringslab ... | head -1`: a reader that goes away is 141 with nothing on stderr."""
    code = (
        "import sys, types\n"
        "from ringslab.tools import main as cli\n"
        "command = types.SimpleNamespace(\n"
        "    DESCRIPTION='', EXAMPLE='', add_arguments=lambda parser: None,\n"
        "    run=lambda args: [print('x' * 99) for _ in range(9999)] and 0)\n"
        "cli._load_command = lambda name: command\n"
        "sys.exit(cli.main(['doctor']))\n"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    program.stdout.readline()
    program.stdout.close()
    assert program.stderr.read() == b""
    program.stderr.close()
    assert program.wait() == 141


@pytest.mark.parametrize(("given", "wanted"), [(None, "passive"), ("active", "active")])
def test_threads_sleep_between_kernels(monkeypatch, given, wanted):
    """The command line asks OpenMP's threads to sleep, unless its user asked for something."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert os.environ["OMP_WAIT_POLICY"] == wanted
