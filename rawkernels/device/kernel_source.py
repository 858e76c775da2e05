"""What a kernel is before it is built: its file, its by-value parameters, its macros.

A launcher module states this as data, so that `ringslab compile` can build every kernel without
running a launcher, and the launcher and the CUDA source share one definition of the parameters.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any

import numpy as np

from ...layouts import formats, rope
from ...layouts.sizes import align_up

PORTABLE_ARCHS = ("sm_80", "sm_90a")
HOPPER_ARCHS = ("sm_90a",)
HOPPER_SHARED_BYTES = 232_448  # of a thread block, all that it can have there

Macros = Mapping[str, int | float | str]
MacroItems = tuple[tuple[str, int | float | str], ...]  # a macro set that can be hashed

# C spelling of the scalars a parameter struct may hold. Pointers are spelled out by the launcher
# and travel as uint64.
_C_SCALARS = {
    "int32_t": np.int32,
    "uint32_t": np.uint32,
    "int64_t": np.int64,
    "uint64_t": np.uint64,
    "float": np.float32,
    "double": np.float64,
    "TensorMap": np.dtype("V128"),  # hopper.cuh; tensor maps come first in a struct
}
TENSOR_MAP_ALIGN = 64  # bytes; of a struct that holds one, too
# Numbers that formats and rotation tables fix, for every kernel and the host build of the codec.
FORMAT_MACROS: MacroItems = (
    ("E4M3_MAX", f"{formats.E4M3_MAX}f"),
    ("E4M3_NAN_BYTE", formats.E4M3_NAN_BYTE),
    ("E8M0_BIAS", formats.E8M0_BIAS),
    ("E8M0_NAN_BYTE", formats.E8M0_NAN_BYTE),
    ("E8M0_MAX_CODE", formats.E8M0_MAX_CODE),
    ("MX_BLOCK", formats.MX_BLOCK),
    ("ROPE_COARSE_ROWS", rope.COARSE_ROWS),
    ("ROPE_MIDDLE_BITS", rope.MIDDLE_BITS),
    ("ROPE_FINE_BITS", rope.FINE_BITS),
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, eq=False)
class ParamsStruct:
    """The one struct that a kernel takes by value.

    `fields` are (name, C type) pairs in order: a scalar of fixed width, or a pointer such as
    `const uint8_t*` (its shape belongs in `docs`, by name). The NumPy dtype and the C text both
    come from here, so the two sides cannot differ.
    """

    name: str
    fields: tuple[tuple[str, str], ...]
    docs: tuple[tuple[str, str], ...] = ()

    @cached_property
    def dtype(self) -> np.dtype:
        """Structured dtype with the alignment of C."""
        pairs = [
            (name, np.uint64 if ctype.endswith("*") else _C_SCALARS[ctype])
            for name, ctype in self.fields
        ]
        packed = np.dtype(pairs, align=True)
        if not any(ctype == "TensorMap" for _, ctype in self.fields):
            return packed
        size = align_up(packed.itemsize, TENSOR_MAP_ALIGN)
        layout = {"names": list(packed.names), "itemsize": size}
        layout["formats"] = [packed.fields[name][0] for name in packed.names]
        layout["offsets"] = [packed.fields[name][1] for name in packed.names]
        return np.dtype(layout)

    def render(self) -> str:
        """C text of the struct, with its size asserted."""
        docs = dict(self.docs)
        lines = ["#pragma once", '#include "common.cuh"', f"struct {self.name} {{"]
        for name, ctype in self.fields:
            doc = docs.get(name)
            lines.append(f"  {ctype} {name};" + (f"  // {doc}" if doc else ""))
        lines.append("};")
        lines.append(f"#define PARAMS_BYTES {self.dtype.itemsize}")
        return "\n".join(lines) + "\n"

    def pack(self, **values: Any) -> np.ndarray:
        """A size-1 array of `dtype`, which CuPy passes by value. Every field must be named.

        Integers that do not fit their field raise OverflowError instead of wrapping.
        """
        assert len(values) == len(self.fields), f"{self.name}: {set(values)} of {self.fields}"
        packed = np.zeros(1, self.dtype)
        packed[0] = tuple(map(values.__getitem__, self.dtype.names))
        return packed


@dataclass(frozen=True, eq=False)  # one constant a kernel: equal means the same object
class KernelSource:
    """One `.cu` file with one entry function of the same name, and how to build it.

    `params` is rendered to the in-memory header `<name>_params.cuh`, which the file includes.
    `macro_sets` are the builds that `ringslab compile` makes: the shapes of shipped models and
    every branch of the source. A launcher may ask for other values of the same macros.
    `archs` says which devices can run it: PORTABLE_ARCHS, or HOPPER_ARCHS.
    `file` defaults to `<name>.cu`; two kernels may share a file.
    """

    name: str
    params: ParamsStruct
    macro_sets: tuple[MacroItems, ...]
    archs: tuple[str, ...] = PORTABLE_ARCHS
    file: str = ""

    @property
    def file_name(self) -> str:
        return self.file or f"{self.name}.cu"

    @property
    def params_header(self) -> str:
        return f"{self.name}_params.cuh"

    def headers(self) -> dict[str, str]:
        """Every header the file includes, transitively: name -> text, in a fixed order."""
        return _collect_headers(self.file_name, self.params_header, self.params.render())

    def text(self) -> str:
        return read_cuda_file(self.file_name)


def macro_set(**macros: int | float | str) -> MacroItems:
    """A hashable macro set, sorted by name so that equal sets are equal keys."""
    return tuple(sorted(macros.items()))


@cache
def read_cuda_file(name: str) -> str:
    """Text of a file in rawkernels/cuda, read once a process."""
    package = __name__.removesuffix(".device.kernel_source")
    return resources.files(f"{package}.cuda").joinpath(name).read_text("utf-8")


def _collect_headers(file_name: str, params_header: str, params_text: str) -> dict[str, str]:
    found = {params_header: params_text}
    waiting = _INCLUDE.findall(read_cuda_file(file_name)) + _INCLUDE.findall(params_text)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = read_cuda_file(name)
            waiting += _INCLUDE.findall(found[name])
    return dict(sorted(found.items()))
