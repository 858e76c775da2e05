"""NumPy structured dtypes as C structs: `ringslab header` is made of these.

Every struct asserts its size and its offsets, so a compiler that would lay it out otherwise refuses
the header. Holes of the dtype become named bytes. C11 and C++11.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..rawkernels.device.kernel_source import ParamsStruct

# C spelling of NumPy's elements; float16 travels as its bits.
_C_TYPES = {
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "float16": "uint16_t",
    "int32": "int32_t",
    "uint32": "uint32_t",
    "int64": "int64_t",
    "uint64": "uint64_t",
    "float32": "float",
    "float64": "double",
}
TENSOR_MAP = "ringslab_tensor_map"
# Vector types of CUDA that parameters point to; the header gives them a name in plain C too.
VECTORS = ("int2", "int4", "double2")


@dataclass(frozen=True)
class CStruct:
    """One struct of the header.

    `types` spells the elements that a dtype cannot: pointers, and structs inside. `docs` has a
    comment for each field that needs one.
    """

    name: str
    dtype: np.dtype
    card: str
    types: dict[str, str] = field(default_factory=dict)
    docs: dict[str, str] = field(default_factory=dict)

    def members(self) -> list[dict[str, Any]]:
        """Each member in order: `name, type, shape, offset, bytes, doc`; holes included, as
        `pad<N>_`."""
        found: list[dict[str, Any]] = []
        end = 0
        for name in self.dtype.names:
            part, offset = self.dtype.fields[name][:2]
            assert offset >= end, f"{self.name}.{name}: fields overlap"
            if offset > end:
                found.append(_hole(len(found), end, offset))
            base, shape = part.subdtype or (part, ())
            found.append(
                {
                    "name": name,
                    "type": self.types.get(name) or _C_TYPES[base.name],
                    "shape": list(shape),
                    "offset": offset,
                    "bytes": part.itemsize,
                    "doc": self.docs.get(name, ""),
                }
            )
            end = offset + part.itemsize
        if end < self.dtype.itemsize:
            found.append(_hole(len(found), end, self.dtype.itemsize))
        return found

    def render(self) -> str:
        """The struct in C, with its assertions."""
        lines = [*comment(self.card), f"typedef struct {self.name} {{"]
        asserted = [f"RINGSLAB_SIZE({self.name}, {self.dtype.itemsize});"]
        for member in self.members():
            extents = "".join(f"[{extent}]" for extent in member["shape"])
            doc = f" {comment(member['doc'])[0]}" if member["doc"] else ""
            lines.append(f"  {member['type']} {member['name']}{extents};{doc}")
            asserted.append(f"RINGSLAB_OFFSET({self.name}, {member['name']}, {member['offset']});")
        return "\n".join([*lines, f"}} {self.name};", *asserted])

    def describe(self) -> dict[str, Any]:
        """What `--json` says of it."""
        size = self.dtype.itemsize
        return {"name": self.name, "bytes": size, "doc": self.card, "fields": self.members()}


def _hole(number: int, start: int, end: int) -> dict[str, Any]:
    return {
        "name": f"pad{number}_",
        "type": "uint8_t",
        "shape": [end - start],
        "offset": start,
        "bytes": end - start,
        "doc": "",
    }


def c_name(*words: str) -> str:
    """An identifier of C from words that may hold anything."""
    return re.sub(r"\W+", "_", "_".join(("ringslab", *words)), flags=re.ASCII)


def comment(text: str) -> list[str]:
    """Lines of one C comment."""
    first, *rest = text.replace("*/", "* /").split("\n")
    lines = [f"/* {first}", *(f"   {line}" for line in rest)]
    lines[-1] += " */"
    return lines


def params_struct(params: ParamsStruct, kernels: list[str]) -> CStruct:
    """The by-value parameters of kernels, named by the first of them."""
    types = {name: TENSOR_MAP for name, ctype in params.fields if ctype == "TensorMap"}
    types |= {name: _pointer(ctype) for name, ctype in params.fields if ctype.endswith("*")}
    card = f"Parameters, by value, of {', '.join(kernels)}."
    return CStruct(c_name(kernels[0], "params"), params.dtype, card, types, dict(params.docs))


def _pointer(ctype: str) -> str:
    for vector in VECTORS:
        ctype = re.sub(rf"\b{vector}\b", f"ringslab_{vector}", ctype)
    return ctype
