"""The digest of a layout: equal digests mean that stored bytes mean the same."""

import hashlib
from dataclasses import fields, is_dataclass
from typing import Any

DIGEST_BYTES = 16
DIGEST_VERSION = 1  # of the text below; stored bytes of another version are never read

# What can change without changing what a stored byte means: where the file lies, limits of an
# engine, a run's seed and trace, names of groups, comments. Every other field counts, one that is
# added later too.
_SILENT = {
    "Config": {"path", "engine", "run", "prefix", "max_seq_len"},
    "LayerConfig": {"group"},
    "Field": {"doc"},
}


def layout_digest(layout: Any) -> bytes:
    """16 bytes over all that fixes what stored bytes mean.

    layout  a `Config` or a `SlotLayout` (any frozen dataclass of numbers, strings and tuples)

    Of a Config: name and version of the model, its sizes, record formats, rings with their offsets,
    and of each layer window, rotation, scale, softcap and sink, because the keys of a layer follow
    from the attention of those below it. Not the seed, the engine's limits or the trace.
    The digest says nothing of a model's weights: two models of equal layout need other keys or
    another name.
    """
    text = f"ringslab layout {DIGEST_VERSION} {_text(layout)}"
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def _text(value: Any) -> str:
    """One text for one value: lengths are stated, so that no two values share one."""
    if is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        names = sorted({f.name for f in fields(value)} - _SILENT.get(name, set()))
        return f"{name}(" + "".join(f"{n}={_text(getattr(value, n))};" for n in names) + ")"
    if isinstance(value, tuple | list):
        return f"[{len(value)}:" + "".join(f"{_text(item)};" for item in value) + "]"
    if isinstance(value, dict):
        return _text(sorted(value.items()))
    if isinstance(value, str):
        return f"str{len(value)}:{value}"
    if isinstance(value, float):
        return f"float:{value.hex()}"
    if value is None or isinstance(value, bool | int):
        return f"{type(value).__name__}:{value}"
    raise TypeError(f"layout_digest: no rule for a {type(value).__name__}: {value!r}")
