"""`load_config`: a model, the layout of its state slots and an engine run, from strict YAML."""

import os
from importlib import resources
from pathlib import Path, PurePosixPath

from .bind import BAD, Binder
from .config_derive import derive_config
from .config_schema import ConfigFile
from .config_types import Config, EngineConfig, LayerConfig, RunConfig, TraceConfig
from .errors import ArgumentError, ConfigError
from .yaml_source import MAX_FILE_BYTES, apply_override, faults_error, parse_yaml

__all__ = [
    "Config",
    "EngineConfig",
    "LayerConfig",
    "RunConfig",
    "TraceConfig",
    "load_config",
    "packaged_configs",
]


def packaged_configs() -> list[str]:
    """File names of the configurations that come with the package, sorted."""
    folder = resources.files(f"{__package__.rpartition('.')[0]}.configs")
    return sorted(item.name for item in folder.iterdir() if item.name.endswith(".yaml"))


def read_config_bytes(path: str | os.PathLike[str]) -> tuple[bytes, str]:
    """The bytes of a configuration file and the name that messages show.

    A file at `path` wins; otherwise `NAME`, `NAME.yaml` and `configs/NAME.yaml` mean the packaged
    file of that name. Raises ConfigError, one line, where the file is missing or unreadable.
    """
    shown = os.fsdecode(path)
    try:
        if not os.path.lexists(shown):
            return _packaged_bytes(shown)
        with Path(shown).open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1), shown  # one byte too many is refused later
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{shown}: cannot be read: {reason}; name a YAML file") from None


def _packaged_bytes(shown: str) -> tuple[bytes, str]:
    pure = PurePosixPath(shown)
    name = pure.name if pure.suffix == ".yaml" else f"{pure.name}.yaml"
    known = packaged_configs()
    if str(pure.parent) not in (".", "configs") or name not in known:
        raise ConfigError(f"{shown}: no such file; packaged configurations: {', '.join(known)}")
    folder = resources.files(f"{__package__.rpartition('.')[0]}.configs")
    return folder.joinpath(name).read_bytes(), f"configs/{name}"


def load_config(path: str | os.PathLike[str], overrides: tuple[str, ...] = ()) -> Config:
    """The configuration in a YAML file, checked to the last byte.

    path       a file, or the bare name of a packaged one: `quickstart.yaml`
    overrides  `a.b.c=value` each, in order; list elements by index or `id`:
               `engine.num_state_slots=8`, `layer_groups.drafts.sink=false`

    Raises ConfigError with every fault that was found, one a line, each
    `file:line:column: key: got VALUE, expected ...; fix`; ArgumentError where `path` is no path or
    an override is no text.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(
            f"load_config: path is {type(path).__name__} but must be a file's name, or that of a "
            f"packaged one: {', '.join(packaged_configs())}"
        )
    given = (overrides,) if isinstance(overrides, str) else overrides
    if not isinstance(given, (tuple, list)) or not all(isinstance(item, str) for item in given):
        raise ArgumentError(
            f"load_config: overrides={overrides!r:.80} but must be texts like 'run.seed=3'"
        )
    data, shown = read_config_bytes(path)
    faults: list[str] = []
    root = parse_yaml(data, shown, faults)
    for override in given:
        root = apply_override(root, override, faults)
    binder = Binder(faults, {}, ConfigFile)
    file = binder.bind(root, ConfigFile, "")
    config = None if file is BAD or faults else derive_config(file, binder, shown)
    if faults:
        raise faults_error(faults)
    assert config is not None
    return config
