"""A checkpoint's tensors on disk: one safetensors file or several with an index, mapped and read tensor by tensor."""

from __future__ import annotations

import ctypes
import json
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import safetensors
from torch import Tensor

from serve_llm.common.errors import ModelError
from serve_llm.common.gguf.checkpoint import list_links
from serve_llm.common.weight_files import INDEX, SINGLE, is_weight_file, list_unlisted_files
from serve_llm.engine.weights.gguf_checkpoint import GGUFCheckpoint
from serve_llm.kernels.linear_grouped import GroupQuantWeight

_PART = re.compile(r"(?P<base>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")

_libc = ctypes.CDLL(None)


class _Slice(Protocol):
    """A tensor of a file that is not read yet."""

    def get_shape(self) -> list[int]: ...
    def __getitem__(self, ranges: tuple[slice, ...]) -> Tensor: ...


class _File(Protocol):
    """What this module uses of safetensors.safe_open."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...


class Checkpoint:
    """The safetensors files of a directory: model.safetensors, those that the index lists, or without both of these
    the parts of one model or the only file.

    Raises ModelError if there are none, if one cannot be read, and if the index does not match the files.
    """

    def __init__(self, directory: Path) -> None:
        self.paths = [directory / SINGLE]
        if (directory / SINGLE).is_file():
            file = _open(directory / SINGLE)
            self._file_of = dict.fromkeys(file.keys(), file)
        elif (directory / INDEX).is_file():
            index = _read_index(directory / INDEX)
            self.paths = [directory / name for name in sorted(set(index.values()))]
            files = [_open(path) for path in self.paths]
            self._file_of = {tensor: file for file in files for tensor in file.keys()}
            if differing := sorted(self._file_of.keys() ^ index.keys()):
                raise ModelError(f"{directory / INDEX} and its files do not name the same tensors: {differing[0]}")
        else:
            self.paths = _find_unlisted_files(directory)
            files = [_open(path) for path in self.paths]
            self._file_of = {tensor: file for file in files for tensor in file.keys()}
            if sum(len(file.keys()) for file in files) > len(self._file_of):
                raise ModelError(f"{directory}: several of its safetensors files hold the same tensor, without {INDEX}")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str, part: tuple[range, ...] | None = None) -> Tensor:
        """The tensor as stored, or a range of each dimension, on the CPU.

        Do not write to it: its memory is the mapped file, of which only what is used is read.
        """
        if part is None:
            part = tuple(range(size) for size in self.shape(name))
        tensor = self._file_of[name].get_slice(name)[
            tuple(slice(dimension.start, dimension.stop) for dimension in part)
        ]
        _advise(tensor, mmap.MADV_WILLNEED)
        return tensor

    def read_grouped(
        self, name: str, part: tuple[range, ...], upload: Callable[[Tensor], Tensor]
    ) -> GroupQuantWeight | None:
        """None: no tensor holds a scale beside its integers."""
        return None

    def release(self) -> None:
        """Drop what was read from this process's resident memory.

        Tensors that are still in use are read again when they are touched, usually from the page cache. Only file
        mappings are dropped: for other memory the advice would clear the contents.
        """
        mapped = _mapped_files()
        for name in self.names:
            tensor = self._file_of[name].get_slice(name)[tuple(slice(size) for size in self.shape(name))]
            if any(tensor.data_ptr() in addresses for addresses in mapped):
                _advise(tensor, mmap.MADV_DONTNEED)


AnyCheckpoint = Checkpoint | GGUFCheckpoint


def open_checkpoint(directory: Path) -> AnyCheckpoint:
    """The tensors of a checkpoint directory. Raises ModelError as their classes do."""
    links = list_links(directory)
    return GGUFCheckpoint(links) if links else Checkpoint(directory)


def _advise(tensor: Tensor, advice: int) -> None:
    """Tell the system how the pages of a mapped tensor are used. Errors do not matter."""
    if tensor.numel() == 0:
        return
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + (last + 1) * tensor.element_size() - first
    _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), advice)


def _mapped_files() -> list[range]:
    """The address ranges of this process that map files."""
    ranges = []
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode != b"0":
            start, end = addresses.split(b"-")
            ranges.append(range(int(start, 16), int(end, 16)))
    return ranges


def _open(path: Path) -> _File:
    try:
        file: _File = safetensors.safe_open(path, framework="pt")
        return file
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}; copy or download it again") from error


def _find_unlisted_files(directory: Path) -> list[Path]:
    """The files of a model whose publisher gave them other names (gptq_model-4bit-128g.safetensors), or no index."""
    paths = list_unlisted_files(directory)
    if len(paths) == 1 and _PART.fullmatch(paths[0].name) is None:
        return paths
    parts = [part for part in (_PART.fullmatch(path.name) for path in paths) if part is not None]
    models = {(part["base"], int(part["count"])) for part in parts}
    if len(parts) == len(paths) and len(models) == 1:
        ((_, count),) = models
        if len(parts) == count and {int(part["number"]) for part in parts} == set(range(1, count + 1)):
            return paths
    raise ModelError(
        f"{directory} contains neither {SINGLE} nor {INDEX}, nor only one other safetensors file or all parts of one "
        "model (NAME-00001-of-00002.safetensors; consolidated* and adapter_model* do not count); other formats are not "
        "supported"
    )


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> name of its file in the same directory."""
    try:
        names = {str(tensor): str(name) for tensor, name in json.loads(path.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} is not an index of safetensors files: {error!r}") from error
    invalid = sorted(name for name in names.values() if not is_weight_file(name))
    if invalid:
        raise ModelError(f"{path} names {invalid[0]!r}, which is not a safetensors file of the same directory")
    return names
