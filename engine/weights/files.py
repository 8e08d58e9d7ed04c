"""A checkpoint's tensors on disk: safetensors, one file or several with an index, mapped and read one tensor at a time.

Knows names and bytes, nothing of models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import safetensors
from torch import Tensor

from serve_llm.engine.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class _Slice(Protocol):
    """A tensor of a file, not read yet."""

    def get_shape(self) -> list[int]: ...
    def __getitem__(self, ranges: tuple[slice, ...]) -> Tensor: ...


class _File(Protocol):
    """The part of safetensors.safe_open that is used here."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...


class Checkpoint:
    """The safetensors files of a directory: model.safetensors, else those that the index names.

    Raises ModelError when there are none, when one cannot be read, and when the index and the files do not agree.
    """

    def __init__(self, directory: Path) -> None:
        if (directory / SINGLE).is_file():
            file = _open(directory / SINGLE)
            self._file_of = dict.fromkeys(file.keys(), file)
        elif (directory / INDEX).is_file():
            index = _read_index(directory / INDEX)
            files = [_open(directory / name) for name in sorted(set(index.values()))]
            self._file_of = {tensor: file for file in files for tensor in file.keys()}
            if odd := sorted(self._file_of.keys() ^ index.keys()):
                raise ModelError(f"{directory / INDEX} and its files do not name the same tensors: {odd[0]}")
        else:
            raise ModelError(f"{directory} holds neither {SINGLE} nor {INDEX}; other files are not served")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str, part: tuple[range, ...] | None = None) -> Tensor:
        """The tensor as stored, or of each dimension only a range; on the CPU. Its memory is the mapped file, of which
        only what is used is read: do not write to it."""
        if part is None:
            part = tuple(range(size) for size in self.shape(name))
        return self._file_of[name].get_slice(name)[tuple(slice(own.start, own.stop) for own in part)]


def _open(path: Path) -> _File:
    try:
        file: _File = safetensors.safe_open(path, framework="pt")
        return file
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> name of its file in the same directory."""
    try:
        names = json.loads(path.read_text())["weight_map"]
        return {str(tensor): Path(name).name for tensor, name in names.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{path} is not an index of safetensors files: {error!r}") from error
