"""Derives every number of a configuration again, compares it with what the file states, and builds
the `Config`. Faults go to the binder; all that can be found without guessing are found."""

import math

from .bind import Binder
from .config_paged import derive_paged
from .config_prefix import derive_prefix
from .config_schema import (
    WINDOW_FIX,
    ConfigFile,
    FormatSection,
    LayerGroupSection,
    RopeSection,
)
from .config_slot import SlotDeriver
from .config_types import Config, EngineConfig, LayerConfig, RunConfig
from .errors import ArgumentError
from .formats import (
    FIELD_TYPE_BYTES,
    MX_BLOCK,
    Field,
    RecordFormat,
    derive_fields,
    make_record_format,
)
from .rope import Rope, Yarn

AMAX_FLOORS = (0.0, 1e-4)  # OCP MX v1.0's and DeepSeek's


def derive_config(file: ConfigFile, binder: Binder, path: str) -> Config | None:
    """The configuration of a bound file, or None where a fault was added to `binder`."""
    model = file.model
    if model.num_q_heads % model.num_kv_heads != 0:
        binder.fault(
            "model.num_q_heads",
            model.num_q_heads,
            f"a multiple of num_kv_heads {model.num_kv_heads}",
        )
    for name in ("record_formats", "layer_groups"):
        if not getattr(file, name):
            binder.fault(name, "a list of 0", "one or more")
            return None
    formats = derive_formats(file, binder)
    groups = expand_groups(file, binder)
    check_layer_groups(file, binder, formats)
    check_run(file, binder)
    if binder.faults:
        return None
    slots = SlotDeriver(file, binder, formats, groups)
    layout = slots.derive()
    paged = derive_paged(file, binder, formats, groups)
    prefix = derive_prefix(file, binder, slots.compression_ratio)
    if layout is None or binder.faults:
        return None
    return Config(
        name=file.name,
        path=path,
        version=file.version,
        **{name: getattr(file.model, name) for name in file.model.__dataclass_fields__},
        record_formats=tuple(formats.values()),
        layers=make_layers(file, formats, groups, slots),
        slot_layout=layout,
        paged_layout=paged,
        engine=EngineConfig(**vars(file.engine)),
        run=RunConfig(**vars(file.run)),
        prefix=prefix,
    )


def derive_formats(file: ConfigFile, binder: Binder) -> dict[str, RecordFormat]:
    """Record formats by id; those with a fault are left out."""
    formats: dict[str, RecordFormat] = {}
    seen: dict[str, int] = {}
    for i, section in enumerate(file.record_formats):
        path = f"record_formats[{i}]"
        if section.id in seen:
            binder.fault(
                f"{path}.id", section.id, f"an id that record_formats[{seen[section.id]}] has not"
            )
            continue
        seen[section.id] = i
        before = len(binder.faults)
        check_format(section, file, binder, path)
        if len(binder.faults) == before:
            formats[section.id] = make_format(section)
    return formats


def check_format(section: FormatSection, file: ConfigFile, binder: Binder, path: str) -> None:
    """Faults of one format: scale rule, heads, every field, record_bytes."""
    mx = section.type == "mxfp8"
    for name in ("scale_rounding", "amax_floor"):
        value = getattr(section, name)
        if mx and value is None:
            binder.fault(f"{path}.{name}", "null", "a value for type mxfp8")
        elif not mx and value is not None:
            binder.fault(f"{path}.{name}", value, f"null for type {section.type}")
    if mx and section.amax_floor is not None and section.amax_floor not in AMAX_FLOORS:
        binder.fault(
            f"{path}.amax_floor", section.amax_floor, "0.0 (OCP MX v1.0) or 0.0001 (DeepSeek)"
        )
    if not mx and section.plane_order == "planar":
        binder.fault(f"{path}.plane_order", "planar", "interleaved for a type without scales")
    for name in ("num_kv_heads", "head_dim"):
        stated, model = getattr(section, name), getattr(file.model, name)
        if stated != model:
            binder.fault(f"{path}.{name}", stated, f"the model's {name} {model}")
    if section.latent and section.num_kv_heads != 1:
        binder.fault(f"{path}.num_kv_heads", section.num_kv_heads, "1 for a latent record")
        return
    rest = section.head_dim % MX_BLOCK
    if mx and rest != 0:
        binder.fault(
            f"{path}.head_dim",
            section.head_dim,
            f"a multiple of {MX_BLOCK} for type mxfp8 ({section.head_dim} % {MX_BLOCK} = {rest})",
        )
        return
    derived = derive_fields(
        section.type,
        latent=section.latent,
        num_kv_heads=section.num_kv_heads,
        head_dim=section.head_dim,
    )
    check_fields(section, derived, binder, path)
    record_bytes = derived[-1].offset + derived[-1].bytes
    binder.derived(f"{path}.record_bytes", section.record_bytes, record_bytes)


def check_fields(
    section: FormatSection, derived: tuple[Field, ...], binder: Binder, path: str
) -> None:
    """Compares stated fields with derived ones, and names fields that overlap."""
    names = [field.id for field in derived]
    if len(section.fields) != len(derived):
        binder.fault(
            f"{path}.fields",
            f"a list of {len(section.fields)}",
            f"the {len(derived)} fields {', '.join(names)} of type {section.type}",
        )
        return
    previous_end, previous_id = 0, ""
    for j, (stated, field) in enumerate(zip(section.fields, derived, strict=True)):
        at = f"{path}.fields[{j}]"
        for name in ("id", "type"):
            binder.derived(f"{at}.{name}", getattr(stated, name), getattr(field, name))
        binder.derived(f"{at}.shape", list(stated.shape), list(field.shape))
        overlap = stated.offset < previous_end
        why = f"{stated.id} overlaps {previous_id}, which ends at {previous_end}" if overlap else ""
        binder.derived(f"{at}.offset", stated.offset, field.offset, why)
        size = FIELD_TYPE_BYTES[stated.type] * math.prod(stated.shape)
        previous_end, previous_id = stated.offset + size, stated.id


def make_format(section: FormatSection) -> RecordFormat:
    """The format of a section without faults, with the docs of its fields."""
    built = make_record_format(
        section.type,
        section.head_dim,
        id=section.id,
        plane_order=section.plane_order,
        latent=section.latent,
        num_kv_heads=section.num_kv_heads,
        scale_rounding=section.scale_rounding or "ceil",
        amax_floor=0.0 if section.amax_floor is None else section.amax_floor,
    )
    fields = tuple(Field(f.id, f.type, f.shape, f.offset, f.doc) for f in section.fields)
    return RecordFormat(**{**vars(built), "fields": fields})


def group_layers(group: LayerGroupSection, binder: Binder, path: str) -> tuple[int, ...]:
    """Layer ids of one group, ascending."""
    ranged = group.first is not None or group.last is not None
    if (group.layers is not None) == ranged or (group.first is None) != (group.last is None):
        stated = [n for n in ("layers", "first", "last") if getattr(group, n) is not None]
        binder.fault(
            path, " and ".join(stated) or "no layers", "either layers, or both first and last"
        )
        return ()
    if group.layers is not None:
        if not group.layers or list(group.layers) != sorted(set(group.layers)):
            binder.fault(f"{path}.layers", list(group.layers), "one or more ascending layer ids")
        return tuple(sorted(set(group.layers)))
    if group.last < group.first:
        binder.fault(f"{path}.last", group.last, f"at least first, {group.first}")
    return tuple(range(group.first, group.last + 1))


def expand_groups(file: ConfigFile, binder: Binder) -> dict[str, tuple[int, ...]]:
    """Layer ids of each group; every layer of the model must be in exactly one group."""
    model = file.model
    total = model.num_layers + model.num_draft_layers
    groups: dict[str, tuple[int, ...]] = {}
    owner: dict[int, str] = {}
    for i, group in enumerate(file.layer_groups):
        path = f"layer_groups[{i}]"
        ids = group_layers(group, binder, path)
        if group.id in groups:
            binder.fault(f"{path}.id", group.id, "an id that no other layer group has")
        groups[group.id] = ids
        binder.derived(f"{path}.num_layers", group.num_layers, len(ids))
        place = f"{path}.layers" if group.layers is not None else path
        low, high = (model.num_layers, total) if group.role == "draft" else (0, model.num_layers)
        wrong = [layer for layer in ids if not low <= layer < high]
        if wrong:
            expected = f"ids {low} .. {high - 1}" if high > low else "no such layer"
            binder.fault(place, wrong, f"{expected} for role {group.role} (model.num_layers)")
        twice = [layer for layer in ids if layer in owner]
        if twice:
            binder.fault(place, twice, f"layers that group {owner[twice[0]]} does not have")
        owner.update(dict.fromkeys(ids, group.id))
    missing = [layer for layer in range(total) if layer not in owner]
    if missing:
        binder.fault("layer_groups", f"no group for layers {missing}", "each layer in one group")
    return groups


def check_layer_groups(file: ConfigFile, binder: Binder, formats: dict[str, RecordFormat]) -> None:
    """Faults of the groups' own values: window, rope, softcap, record format."""
    known = [section.id for section in file.record_formats]
    check_kinds(file, binder)
    for i, group in enumerate(file.layer_groups):
        path = f"layer_groups[{i}]"
        if group.record_format not in known:
            binder.fault(f"{path}.record_format", group.record_format, f"one of {', '.join(known)}")
        record_format = formats.get(group.record_format)
        if record_format is not None:
            check_attention(group, record_format, binder, path)
        check_rope(group.rope, file.model.head_dim, binder, f"{path}.rope")
    used = {group.record_format for group in file.layer_groups}
    for i, section in enumerate(file.record_formats):
        if section.id not in used:
            expected = "a format that a layer group uses"
            binder.fault(f"record_formats[{i}].id", section.id, expected, "remove it")


def check_kinds(file: ConfigFile, binder: Binder) -> None:
    """Faults of kind, window and role; and of latent formats beside others."""
    for i, group in enumerate(file.layer_groups):
        path = f"layer_groups[{i}]"
        if group.kind == "swa" and group.window is None:
            binder.fault(f"{path}.window", "null", "an integer >= 1 for kind swa", WINDOW_FIX)
        elif group.kind == "global" and group.window is not None:
            binder.fault(f"{path}.window", group.window, "null for kind global")
        if group.kind == "global" and group.role != "producer":
            binder.fault(f"{path}.role", group.role, "producer for kind global")
    if all(group.kind == "global" for group in file.layer_groups):
        binder.fault("layer_groups", "global layers only", "at least one group of kind swa")
    if len({section.latent for section in file.record_formats}) > 1:
        binder.fault(
            "record_formats", "latent and other formats", "either all latent, or none of them"
        )


def check_attention(
    group: LayerGroupSection, record_format: RecordFormat, binder: Binder, path: str
) -> None:
    """Faults of what a group asks of attention on its records."""
    if record_format.latent and group.kind == "global":
        binder.fault(
            f"{path}.record_format", group.record_format, "a format that is not latent, for pages"
        )
    if record_format.plane_order == "planar" and group.kind == "global":
        binder.fault(f"{path}.record_format", group.record_format, "interleaved records, for pages")
    if group.sink_tokens and (record_format.latent or group.kind == "global"):
        what = "latent layers" if record_format.latent else "kind global, which sees all keys"
        binder.fault(f"{path}.sink_tokens", group.sink_tokens, f"0 for {what}")
    if record_format.latent and group.softcap is not None:
        binder.fault(f"{path}.softcap", group.softcap, "null: latent layers compute no softcap")
    if not record_format.latent and group.inverse_rope_out:
        binder.fault(
            f"{path}.inverse_rope_out", "true", "false where values are apart from rotated keys"
        )
    yarn = group.rope.yarn
    if group.inverse_rope_out and yarn is not None and yarn.attention_factor != 1.0:
        binder.fault(
            f"{path}.rope.yarn.attention_factor",
            yarn.attention_factor,
            "1.0 with inverse_rope_out, which would apply it again",
        )


def check_rope(rope: RopeSection, head_dim: int, binder: Binder, path: str) -> None:
    if rope.dims % 2 != 0 or rope.dims > head_dim:
        binder.fault(f"{path}.dims", rope.dims, f"an even number up to head_dim {head_dim}")
        return
    try:
        make_rope(rope)
    except ArgumentError as error:  # how the numbers of YaRN go together
        binder.fault(path, "a mapping", f"a rotation that can be made ({error})")


def make_rope(rope: RopeSection) -> Rope:
    """Raises ArgumentError where YaRN's numbers contradict each other."""
    yarn = None if rope.yarn is None else Yarn(**vars(rope.yarn))
    return Rope(rope.theta, rope.dims, rope.pairing, yarn, rope.linear_factor)


def check_run(file: ConfigFile, binder: Binder) -> None:
    """Faults of the run: paths that are missing or useless, lengths that can never be admitted."""
    run, trace = file.run, file.run.trace
    for name, needs_path, value in (
        ("run.activations_path", run.activations == "file", run.activations_path),
        ("run.trace.path", trace.kind != "synthetic", trace.path),
    ):
        what = f"activations {run.activations}" if "act" in name else f"trace kind {trace.kind}"
        if needs_path and value is None:
            binder.fault(name, "null", f"a path for {what}")
        elif not needs_path and value is not None:
            binder.fault(name, value, f"null for {what}")
    if trace.kind == "synthetic" and trace.num_requests is None:
        binder.fault("run.trace.num_requests", "null", "a number for trace kind synthetic")
    for name in ("prompt_len", "output_len"):
        first, last = getattr(trace, name)
        if first > last:
            binder.fault(f"run.trace.{name}", [first, last], "[first, last] with first <= last")
    longest = trace.prompt_len[1]
    if trace.max_prompt_len is not None:
        longest = min(longest, trace.max_prompt_len)
    if trace.kind == "synthetic" and longest + trace.output_len[1] > file.model.max_seq_len:
        binder.fault(
            "run.trace.output_len",
            list(trace.output_len),
            f"prompt_len + output_len up to max_seq_len: {longest} + {trace.output_len[1]} > "
            f"{file.model.max_seq_len}",
        )


def make_layers(
    file: ConfigFile,
    formats: dict[str, RecordFormat],
    groups: dict[str, tuple[int, ...]],
    slots: SlotDeriver,
) -> tuple[LayerConfig, ...]:
    """One LayerConfig a layer, at the index of its id."""
    layers: dict[int, LayerConfig] = {}
    for group in file.layer_groups:
        rope = make_rope(group.rope)
        for layer in groups[group.id]:
            layers[layer] = LayerConfig(
                id=layer,
                group=group.id,
                kind=group.kind,
                role=group.role,
                window=group.window,
                ring_len=slots.ring_len.get(group.id),
                rope=rope,
                softmax_scale=group.softmax_scale,
                softcap=group.softcap,
                sink=group.sink,
                inverse_rope_out=group.inverse_rope_out,
                record_format=formats[group.record_format],
                stored=group.role == "producer",
                compression_ratio=slots.compression_ratio.get(layer),
                sink_tokens=group.sink_tokens,
            )
    return tuple(layers[layer] for layer in range(len(layers)))
