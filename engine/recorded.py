"""Recorded activations: arrays of a .npz file, or of a folder of .npy files.

Names: `q.L` is bf16 [N, num_q_heads, head_dim] and `kv.L` bf16 [N, head_dim] of layer L, row n for
position n of every request; `ID/q.L` and `ID/kv.L`, where they are there, are those of request ID
alone. bf16 is stored as uint16 bits, or as ml_dtypes.bfloat16 (which NumPy files call void 2).
In a folder the files are `q.L.npy`, `ID/q.L.npy`; they are mapped, not loaded.
"""

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..layouts.errors import ActivationError
from ..rawkernels.arrays import BF16
from .finite import check_finite_bits

# What reading a damaged .npz file raises: RuntimeError and NotImplementedError where its flags ask
# for a password or a compression that does not exist, MemoryError for a shape out of all measure.
DAMAGED_ZIP = (
    ValueError,
    EOFError,
    KeyError,
    MemoryError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
BF16_ON_DISK = (np.dtype(np.uint16), BF16, np.dtype("V2"))


@dataclass(frozen=True)
class RecordedArrays:
    """Checked arrays as uint16 bits, by name; `owners` are requests with arrays of their own."""

    path: str
    by_name: Mapping[str, np.ndarray]
    owners: frozenset[str]
    num_layers: int

    def arrays(self, layer: int, request_id: str) -> tuple[np.ndarray, np.ndarray]:
        """q [N, num_q_heads, head_dim] and kv [N, head_dim] of a layer and request."""
        prefix = f"{request_id}/" if request_id in self.owners else ""
        try:
            return self.by_name[f"{prefix}q.{layer}"], self.by_name[f"{prefix}kv.{layer}"]
        except KeyError as error:
            raise ActivationError(
                f"{self.path}: no array {error.args[0]!r} for request {request_id!r}"
            ) from None

    def check_lengths(self, ids: list[str], lengths: list[int]) -> None:
        """Raises ActivationError where a request has more positions than are recorded."""
        for request_id, length in zip(ids, lengths, strict=True):
            layers = range(self.num_layers)
            recorded = min(self.arrays(layer, request_id)[0].shape[0] for layer in layers)
            if length > recorded:
                raise ActivationError(
                    f"{self.path}: request {request_id!r} has {length} positions but {recorded} "
                    "are recorded; shorten it with run.trace.max_prompt_len"
                )


def open_recorded(
    path: str | Path, num_layers: int, num_q_heads: int, head_dim: int
) -> RecordedArrays:
    """The recorded arrays at `path`, every one checked.

    Raises ActivationError naming file, array and index: a file that cannot be read, a layer that is
    missing, a dtype that is not bf16, a shape that does not fit, q and kv of different lengths, a
    value that is NaN or infinite.
    """
    raw = _load(Path(path))
    known = {f"{which}.{layer}" for which in ("q", "kv") for layer in range(num_layers)}
    by_name, owners = {}, {name.rpartition("/")[0] for name in raw}
    for name, array in sorted(raw.items()):
        if name.rpartition("/")[2] not in known:
            raise ActivationError(
                f"{path}: array {name!r} is not one of q.0 .. q.{num_layers - 1}, "
                f"kv.0 .. kv.{num_layers - 1}, or those after a request id and a slash"
            )
        by_name[name] = _checked(path, name, array, num_q_heads, head_dim)
    for owner in sorted(owners) or [""]:
        prefix = f"{owner}/" if owner else ""
        for layer in range(num_layers):
            pair = [f"{prefix}q.{layer}", f"{prefix}kv.{layer}"]
            for name in pair:
                if name not in by_name:
                    raise ActivationError(f"{path}: array {name!r} is missing")
            q, kv = (by_name[name] for name in pair)
            if len(q) != len(kv):
                raise ActivationError(
                    f"{path}: {pair[0]} has {len(q)} positions but {pair[1]} has {len(kv)}"
                )
    return RecordedArrays(str(path), by_name, frozenset(owners - {""}), num_layers)


def _checked(path, name: str, array: np.ndarray, num_q_heads: int, head_dim: int) -> np.ndarray:
    """The array's uint16 bits."""
    if array.dtype not in BF16_ON_DISK:
        raise ActivationError(
            f"{path}: {name}.dtype={array.dtype} but must be bf16; save "
            "x.astype(ml_dtypes.bfloat16).view(np.uint16)"
        )
    is_query = name.rpartition("/")[2].startswith("q.")
    tail = (num_q_heads, head_dim) if is_query else (head_dim,)
    if array.ndim != 1 + len(tail) or array.shape[1:] != tail:
        wanted = ", ".join(map(str, ("N", *tail)))
        raise ActivationError(f"{path}: {name}.shape={array.shape} but must be [{wanted}]")
    bits = array.view(np.uint16)
    check_finite_bits(bits, f"{path}: {name}")
    return bits


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        if path.is_dir():
            files = sorted(path.rglob("*.npy"))
            arrays = {
                file.relative_to(path).as_posix().removesuffix(".npy"): _load_npy(file)
                for file in files
            }
        else:
            loaded = np.load(path, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                raise ActivationError(
                    f"{path}: is one .npy array; put q.0.npy, kv.0.npy, ... into a folder, or "
                    "all of them into one .npz file"
                )
            with loaded:
                arrays = {name: loaded[name] for name in loaded.files}
    except ActivationError:
        raise
    except OSError as error:
        raise ActivationError(f"{path}: cannot be read: {error.strerror or error}") from error
    except DAMAGED_ZIP as error:
        raise ActivationError(f"{path}: is not a whole .npz file: {error}") from error
    if not arrays:
        raise ActivationError(f"{path}: holds no arrays")
    return arrays


def _load_npy(file: Path) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ActivationError(f"{file}: is not a whole .npy file: {error}") from error
