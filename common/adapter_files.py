"""The files of a LoRA adapter, as PEFT names them. No torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"  # written by older versions of PEFT; only `serve-llm convert` reads it

Stamp = tuple[tuple[int, ...], ...]


class AdapterFiles(msgspec.Struct, frozen=True, array_like=True):
    """The contents of the two files."""

    config: bytes
    weights: bytes


def read_stamp(directory: Path) -> Stamp:
    """Return values that change whenever one of the files changes. Raises OSError if a file is missing."""
    found = [(directory / name).stat() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    return tuple((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found)


def is_pickled_adapter(directory: Path) -> bool:
    """Whether the weights of an adapter are stored as a pickle only."""
    return (
        (directory / ADAPTER_CONFIG).is_file()
        and (directory / ADAPTER_PICKLE).is_file()
        and not (directory / ADAPTER_WEIGHTS).is_file()
    )
