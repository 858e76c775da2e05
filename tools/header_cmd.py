"""`ringslab header`: the records, slots, plans and kernel parameters as structs for C and CUDA C++.

Everything comes from what Python itself uses: the dtypes of layouts/structs.py and the parameter
structs of the launchers.
"""

import argparse
import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

from .. import __version__
from ..engine.output_files import check_separate_files, write_whole
from ..layouts import structs
from ..layouts.config import load_config, packaged_configs
from ..layouts.config_types import Config
from ..layouts.errors import ArgumentError
from ..layouts.formats import RecordFormat
from ..layouts.paged import NO_BLOCK
from ..layouts.plans import MAX_PINNED_SEGMENTS, MAX_SEGMENTS, DecodePlan, PrefillPlan
from ..layouts.slots import SLAB_ALIGN, Ring
from ..rawkernels.cuda.registry import find_kernels
from ..rawkernels.device.kernel_source import FORMAT_MACROS, TENSOR_MAP_ALIGN
from .c_structs import TENSOR_MAP, VECTORS, CStruct, c_name, comment, params_struct

DESCRIPTION = """A header for C11, C++11 and CUDA C++: constants, plans, the parameters of every
kernel, and the records, state slot and block of each CONFIG. Sizes and offsets are asserted."""
EXAMPLE = "ringslab header deepseek_v4_1_flash.yaml --out ringslab.h"
PROLOGUE = f"""#ifdef __CUDACC_RTC__  /* NVRTC has no system headers, so no offsetof */
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stddef.h>
#include <stdint.h>
#endif

#ifdef __cplusplus
#define RINGSLAB_ASSERT(condition, text) static_assert(condition, text)
#define RINGSLAB_ALIGN(bytes) alignas(bytes)
#else
#define RINGSLAB_ASSERT(condition, text) _Static_assert(condition, text)
#define RINGSLAB_ALIGN(bytes) _Alignas(bytes)
#endif
#define RINGSLAB_SIZE(type, bytes) RINGSLAB_ASSERT(sizeof(type) == (bytes), #type)
#ifdef __CUDACC_RTC__
#define RINGSLAB_OFFSET(type, field, bytes) RINGSLAB_ASSERT(true, "")
#else
#define RINGSLAB_OFFSET(type, field, bytes) \\
  RINGSLAB_ASSERT(offsetof(type, field) == (bytes), #type "." #field)
#endif

/* A CUtensorMap, made by the host with cuTensorMapEncodeTiled. */
typedef struct {TENSOR_MAP} {{
  RINGSLAB_ALIGN({TENSOR_MAP_ALIGN}) uint64_t opaque[16];
}} {TENSOR_MAP};
RINGSLAB_SIZE({TENSOR_MAP}, 128);

#ifdef __CUDACC__
{chr(10).join(f"typedef {name} ringslab_{name};" for name in VECTORS)}
#else
typedef struct ringslab_int2 {{ int32_t x, y; }} ringslab_int2;
typedef struct ringslab_int4 {{ int32_t x, y, z, w; }} ringslab_int4;
typedef struct ringslab_double2 {{ double x, y; }} ringslab_double2;
#endif"""
PLANS = {
    DecodePlan: "Keys of a decode batch. The arrays are int32, where the batch runs: see"
    "\nlayouts/plans.py. Python fills it: layouts.structs.pack_plan(plan).",
    PrefillPlan: "Keys of a prefill batch; num_segments is an array of one count.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "configs", nargs="*", metavar="CONFIG", help="YAML files (default: all packaged ones)"
    )
    parser.add_argument("--out", metavar="FILE", help="write to a file instead of stdout")
    parser.add_argument("--json", action="store_true", help="the same facts as JSON for programs")


def run(args: argparse.Namespace) -> int:
    """Prints or writes the header. Raises ConfigError for a wrong file, ArgumentError where two
    structs would get one name or a CONFIG would be written over, OSError where the file cannot be
    written."""
    for path in args.configs:
        check_separate_files("header", {"CONFIG": path, "--out": args.out})
    configs = [load_config(path) for path in args.configs or packaged_configs()]
    text = json.dumps(header_dict(configs), indent=2) + "\n" if args.json else render(configs)
    if args.out is None:
        print(text, end="")
    else:
        write_whole(args.out, text)
    return 0


def render(configs: list[Config]) -> str:
    """The header's text."""
    shared, own = shared_structs(), [config_structs(config) for config in configs]
    _refuse_twins(chain(shared, *own))
    parts = [
        "\n".join(
            comment(
                f"ringslab {__version__}: records, slots, plans and kernel parameters."
                "\nWritten by `ringslab header`; do not edit. bf16 and fp16 are their uint16_t"
                "\nbits, e4m3 and e8m0 their bytes. Index slots and blocks with 64 bits."
            )
        ),
        "#ifndef RINGSLAB_H\n#define RINGSLAB_H",
        PROLOGUE,
        _defines(constants()),
    ]
    parts += [struct.render() for struct in shared]
    for config, found in zip(configs, own, strict=True):
        parts.append(_defines(config_constants(config)))
        parts += [struct.render() for struct in found]
    return "\n\n".join([*parts, "#endif  /* RINGSLAB_H */"]) + "\n"


def header_dict(configs: list[Config]) -> dict[str, Any]:
    """What `--json` prints."""
    found = all_structs(configs)
    _refuse_twins(found)
    numbers = constants()
    for config in configs:
        numbers |= config_constants(config)
    return {
        "version": __version__,
        "constants": numbers,
        "structs": [struct.describe() for struct in found],
    }


def all_structs(configs: list[Config]) -> list[CStruct]:
    """Every struct of the header, in its order."""
    return [*shared_structs(), *chain.from_iterable(map(config_structs, configs))]


def shared_structs() -> list[CStruct]:
    """Those that no configuration changes."""
    return [*plan_structs(), *kernel_structs()]


def constants() -> dict[str, int | float | str]:
    """Macros of the header that no configuration changes."""
    found: dict[str, int | float | str] = {"RINGSLAB_VERSION": f'"{__version__}"'}
    found |= {f"RINGSLAB_{name}": value for name, value in FORMAT_MACROS}
    return found | {
        "RINGSLAB_SLAB_ALIGN": SLAB_ALIGN,
        "RINGSLAB_MAX_SEGMENTS": MAX_SEGMENTS,
        "RINGSLAB_MAX_PINNED_SEGMENTS": MAX_PINNED_SEGMENTS,
        "RINGSLAB_NO_BLOCK": f"({NO_BLOCK})",
    }


def config_constants(config: Config) -> dict[str, int | float | str]:
    """Macros of one configuration, all integers."""
    layout, paged = config.slot_layout, config.paged_layout
    found = {
        "NUM_Q_HEADS": config.num_q_heads,
        "NUM_KV_HEADS": config.num_kv_heads,
        "HEAD_DIM": config.head_dim,
        "TOKENS_PER_STEP": config.tokens_per_step,
        "SLOT_BYTES": layout.slot_bytes,
        "STORED_BYTES": layout.stored_bytes,
    }
    if paged is not None:
        found |= {"BLOCK_SIZE": paged.block_size, "BLOCK_BYTES": paged.block_bytes}
    return {c_name(config.name, name).upper(): value for name, value in found.items()}


def config_structs(config: Config) -> list[CStruct]:
    """The records of a configuration, its state slot and, where it has one, its block."""
    found = [_record(config, record_format) for record_format in config.record_formats]
    found += [*_planar_rings(config), _slot(config)]
    paged = config.paged_layout
    if paged is not None:
        dtype = structs.block_dtype(paged)
        layers = zip(dtype.names, paged.layers, strict=True)
        types = {name: _record_name(config, part.record_format) for name, part in layers}
        card = f"A block of the paged pool of {config.name}: {paged.block_size} tokens."
        found.append(CStruct(c_name(config.name, "block"), dtype, card, types))
    return found


def plan_structs() -> list[CStruct]:
    found = []
    for kind, card in PLANS.items():
        dtype, docs = structs.plan_dtype(kind), structs.plan_docs(kind)
        types = dict.fromkeys((name for name in dtype.names if name in docs), "const int32_t*")
        name = "decode_plan" if kind is DecodePlan else "prefill_plan"
        found.append(CStruct(c_name(name), dtype, card, types, docs))
    return found


def kernel_structs() -> list[CStruct]:
    """The parameters of every kernel; kernels that share a struct share it here."""
    shared: dict[int, list[Any]] = {}
    for kernel in find_kernels()[0]:
        shared.setdefault(id(kernel.params), []).append(kernel)
    return [params_struct(group[0].params, [k.name for k in group]) for group in shared.values()]


def _record_name(config: Config, record_format: RecordFormat) -> str:
    return c_name(config.name, record_format.id)


def _record(config: Config, record_format: RecordFormat) -> CStruct:
    card = f"A record of {config.name}: one token in one ring or page, {record_format.type}."
    docs = {field.id: f"{field.type}: {field.doc}" for field in record_format.fields}
    dtype = structs.record_dtype(record_format)
    return CStruct(_record_name(config, record_format), dtype, card, docs=docs)


def _planar_rings(config: Config) -> list[CStruct]:
    """A ring whose records are not whole: the values of all, then the scales of all."""
    rings = {
        _planar_name(config, ring): ring
        for ring in config.slot_layout.rings
        if ring.record_format is not None and ring.record_format.plane_order == "planar"
    }
    card = "A planar ring of {} records: value bytes of all, then scale bytes of all."
    return [
        CStruct(name, structs.ring_dtype(ring), card.format(ring.ring_len))
        for name, ring in rings.items()
    ]


def _planar_name(config: Config, ring: Ring) -> str:
    return c_name(config.name, ring.record_format.id, f"ring{ring.ring_len}")


def _slot(config: Config) -> CStruct:
    types, docs = {}, {}
    for ring in config.slot_layout.rings:
        fmt = ring.record_format
        docs[ring.name] = "stored" if ring.stored else ""
        if fmt is None:
            docs[ring.name] = "a row of values, then a row of scores"
        elif fmt.plane_order == "planar":
            types[ring.name] = _planar_name(config, ring)
        else:
            types[ring.name] = _record_name(config, fmt)
    dtype = structs.slot_dtype(config.slot_layout)
    card = f"A state slot of {config.name}; the slab is an array of them."
    return CStruct(c_name(config.name, "slot"), dtype, card, types, docs)


def _refuse_twins(found: Iterable[CStruct]) -> None:
    seen: set[str] = set()
    for struct in found:
        if struct.name in seen:
            raise ArgumentError(f"header: two structs would be named {struct.name}; rename one")
        seen.add(struct.name)


def _defines(values: dict[str, int | float | str]) -> str:
    return "\n".join(f"#define {name} {value}" for name, value in values.items())
