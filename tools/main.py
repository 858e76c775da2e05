"""The command line: `ringslab COMMAND ...`.

A command is a line of _COMMANDS and a module `tools/<command>_cmd.py` with DESCRIPTION, the first
words of its help, `add_arguments(parser)`, `run(args) -> int` and EXAMPLE, one command line or
several for the end of its help. Only the module of the command that was asked for is imported, so
`ringslab --version` and `ringslab --help` load neither NumPy nor a backend.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from .. import __version__
from ..layouts.errors import RingslabError

# One line each for `ringslab --help`, which must not import the commands: they do not repeat it.
_COMMANDS = {
    "run": "replay a request trace through prefill and decode steps",
    "layout": "print the bytes of a state slot as a table and a picture",
    "budget": "say how many bytes a sequence's caches take against its context",
    "header": "write records, slots, plans and kernel parameters as C structs",
    "plot": "draw a report of run, bench or prefix, or a timeline",
    "compile": "compile every CUDA kernel and report its registers and spills",
    "bench": "time every operation against the floor that bytes and FLOPs set",
    "prefix": "run a trace under each contract of the prefix cache, side by side",
    "doctor": "say what this machine can run, and why not",
}
_EXAMPLE_HEAD = "example:"
EXIT_ERROR = 2  # a mistake in what was given; argparse uses the same number
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells say it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    A RingslabError or OSError becomes one message on stderr and status 2; set
    RINGSLAB_TRACEBACK=1 to see the traceback instead. Ctrl-C gives 130.
    """
    # Threads of the CPU kernels sleep between two of them. By default those of GNU's OpenMP spin,
    # which wins nothing on idle cores and takes time from whoever does the work on busy ones.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run_command(argv)
    except KeyboardInterrupt:
        print("ringslab: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe went away (`ringslab layout ... | head`). Python flushes stdout once
        # more at exit; give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (RingslabError, OSError) as error:
        if os.environ.get("RINGSLAB_TRACEBACK") == "1":
            raise
        print(f"ringslab: {_message(error)}", file=sys.stderr)
        return EXIT_ERROR


def _message(error: Exception) -> str:
    """What is wrong, and with which file; our own errors say it themselves."""
    if isinstance(error, OSError) and type(error).__module__ == "builtins" and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _run_command(argv: list[str]) -> int:
    command = _command_of(argv)
    module = _load_command(command) if command else None
    parser = _build_parser(command, module)
    args = parser.parse_args(argv)
    if module is None:
        parser.print_help(sys.stderr)
        return EXIT_ERROR
    return module.run(args)


def _command_of(argv: list[str]) -> str | None:
    """The command named in argv: its first word that is no option, if we know it."""
    word = next((word for word in argv if not word.startswith("-")), None)
    return word if word in _COMMANDS else None


def _load_command(command: str) -> ModuleType:
    return import_module(f".{command}_cmd", __package__)


def _build_parser(command: str | None, module: ModuleType | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringslab",
        description="Sliding-window attention over ring-buffer KV state, without torch.",
    )
    parser.add_argument("--version", action="version", version=f"ringslab {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        own = subparsers.add_parser(name, help=summary)
        if name == command:
            own.description = module.DESCRIPTION
            module.add_arguments(own)
            own.formatter_class = _Help
            example = module.EXAMPLE.split("\n")
            own.epilog = "\n".join([_EXAMPLE_HEAD, *(f"  {line}" for line in example)])
    return parser


class _Help(argparse.HelpFormatter):
    """Wraps what is prose and leaves examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(_EXAMPLE_HEAD):
            return text
        return super()._fill_text(text, width, indent)


if __name__ == "__main__":
    sys.exit(main())
