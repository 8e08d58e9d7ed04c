"""The tensors of a GGUF file, or of a model in several, mapped and read part by part, with the interface of
`weights.files.Checkpoint`."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from serve_llm.common.errors import ModelError
from serve_llm.common.gguf.file import StoredTensor
from serve_llm.common.gguf.parts import read_parts
from serve_llm.engine.quantization.gguf_blocks import unpack_blocks
from serve_llm.kernels.linear_grouped import GroupedWeight

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROW_SUFFIX = "_inp_shexp.weight"  # a matrix of one row, which some files store as a vector


class GGUFCheckpoint:
    """Raises ModelError if the file cannot be read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """paths: the file, or the parts of the model in their order."""
        self.paths = list(paths)
        self._tensors = read_parts(paths).tensors
        self._contents = [_map_file(path) for path in paths]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._tensors[name].shape
        return (1, *shape) if name.endswith(ROW_SUFFIX) and len(shape) == 1 else shape

    def read(self, name: str, part: tuple[range, ...] | None = None) -> Tensor:
        """The tensor, or a range of each dimension, on the CPU; float32 if it is quantised.

        Do not write to it: its memory may be the mapped file.
        """
        stored = self._tensors[name]
        if part is None:
            part = tuple(range(size) for size in self.shape(name))
        sizes = [len(dimension) for dimension in part]
        if stored.type.name not in FLOAT_TYPES:
            weight = self.read_grouped(name, part)
            assert weight is not None
            return weight.dequantise().view(sizes)
        numbers = self._bytes(stored, self.shape(name), part[0]).view(FLOAT_TYPES[stored.type.name])
        rows = numbers.view(len(part[0]), *self.shape(name)[1:])
        return rows[(slice(None), *(slice(dimension.start, dimension.stop) for dimension in part[1:]))]

    def read_grouped(
        self, name: str, part: tuple[range, ...], upload: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> GroupedWeight | None:
        """A range of each dimension as integers, of which all but the last are rows; None for a float tensor.

        upload: copies blocks to the device on which they are unpacked.
        """
        stored = self._tensors[name]
        if stored.type.name in FLOAT_TYPES:
            return None
        shape = self.shape(name)
        if len(shape) == 1:
            shape, part = (1, *shape), (range(1), *part)
        outer, columns = part[:-1], part[-1]
        block, block_bytes = stored.type.block, stored.type.block_bytes
        blocks = self._bytes(stored, shape, outer[0]).view(len(outer[0]), *shape[1:-1], shape[-1] // block, block_bytes)
        first, last = columns.start // block, -(-columns.stop // block)
        inner = (slice(dimension.start, dimension.stop) for dimension in outer[1:])
        count = math.prod(len(dimension) for dimension in outer)
        rows = blocks[(slice(None), *inner, slice(first, last))].reshape(count, last - first, block_bytes)
        return unpack_blocks(upload(rows), stored.type.name).narrow_columns(columns.start - first * block, len(columns))

    def release(self) -> None:
        """Drop what was read from this process's resident memory. Tensors that are still in use are read again."""
        for content in self._contents:
            content.madvise(mmap.MADV_DONTNEED)

    def _bytes(self, stored: StoredTensor, shape: tuple[int, ...], rows: range) -> Tensor:
        """The bytes of a range of the outermost dimension."""
        if len(rows) == 0:
            return torch.empty(0, dtype=torch.uint8)
        stride = stored.num_bytes // shape[0]
        start = stored.start + rows.start * stride
        return torch.frombuffer(self._contents[stored.part], dtype=torch.uint8, count=len(rows) * stride, offset=start)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # A private mapping: torch wants writable memory, but nothing writes to it.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
