"""Opcode counts of a cubin, from NVIDIA's disassembler: what the compiler really made."""

import re
import shutil
import subprocess
import tempfile
from collections import Counter

from ...layouts.errors import KernelBuildError

_TIMEOUT_S = 120
_FUNCTION = re.compile(r"\.text\.(\w+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")


def find_disassembler() -> str | None:
    """Path of nvdisasm (on PATH, or from the wheel nvidia-cuda-nvdisasm), or None."""
    found = shutil.which("nvdisasm")
    if found is not None:
        return found
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return None
    return find_nvidia_binary_utility("nvdisasm")


def count_opcodes(cubin: bytes, disassembler: str) -> dict[str, Counter]:
    """Instructions of each entry function by opcode, without modifiers ("HMMA", "LDL").

    Raises KernelBuildError where the disassembler refuses the cubin.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [disassembler, "-c", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        raise KernelBuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    counts: dict[str, Counter] = {}
    current: Counter | None = None
    for line in done.stdout.splitlines():
        if match := _FUNCTION.match(line):
            current = counts.setdefault(match[1], Counter())
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current[match[1]] += 1
    return counts
