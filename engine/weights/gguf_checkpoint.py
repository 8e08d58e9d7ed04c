"""The tensors of a GGUF file, or of a model in several files, mapped and read part by part, with the interface of
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
from serve_llm.kernels.linear_grouped import GroupQuantWeight

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KEY_PART = "attn_k_b.weight"
VALUE_PART = "attn_v_b.weight"
JOINT = "attn_kv_b.weight"
ROW_SUFFIX = "_inp_shexp.weight"  # a matrix of one row, which some files store as a vector
CONVOLUTION = ".ssm_conv1d.weight"  # (channels, 1, tokens), stored without the middle dimension


class GGUFCheckpoint:
    """The tensors of the files. If a file has the key and value up-projections of latent attention as two tensors,
    (heads, latent size, key size) and (heads, value size, latent size), they are read as the one tensor of other
    checkpoints.

    Raises ModelError if the file cannot be read.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """paths: the file, or the parts of the model in their order."""
        self.paths = list(paths)
        self._tensors = read_parts(paths).tensors
        self._contents = [_map_file(path) for path in paths]

    @property
    def names(self) -> frozenset[str]:
        joined = [name for name in self._tensors if name.endswith(KEY_PART) and self._find_value_part(name)]
        parts = {part for name in joined for part in (name, self._find_value_part(name))}
        return frozenset((self._tensors.keys() - parts) | {name.replace(KEY_PART, JOINT) for name in joined})

    def _find_value_part(self, key_part: str) -> str:
        """The name of the other tensor; empty if the two cannot be joined."""
        name = key_part.replace(KEY_PART, VALUE_PART)
        if name not in self._tensors:
            return ""
        shapes = self._tensors[key_part].shape, self._tensors[name].shape
        fits = all(len(shape) == 3 for shape in shapes) and shapes[0][:2] == (shapes[1][0], shapes[1][2])
        return name if fits else ""

    def _read_joint(self, name: str) -> Tensor:
        keys = self.read(name.replace(JOINT, KEY_PART))
        values = self.read(name.replace(JOINT, VALUE_PART))
        return torch.cat((keys.mT, values), 1).flatten(0, 1)

    def _is_joint(self, name: str) -> bool:
        return name.endswith(JOINT) and name not in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if self._is_joint(name):
            heads, rank, key_size = self._tensors[name.replace(JOINT, KEY_PART)].shape
            return heads * (key_size + self._tensors[name.replace(JOINT, VALUE_PART)].shape[1]), rank
        shape = self._tensors[name].shape
        if name.endswith(CONVOLUTION) and len(shape) == 2:
            return shape[0], 1, shape[1]
        return (1, *shape) if name.endswith(ROW_SUFFIX) and len(shape) == 1 else shape

    def read(self, name: str, part: tuple[range, ...] | None = None) -> Tensor:
        """Return the tensor, or a range of each dimension, on the CPU; float32 if it is quantised.

        Do not write to it: its memory may be the mapped file.
        """
        if part is None:
            part = tuple(range(size) for size in self.shape(name))
        if self._is_joint(name):
            return self._read_joint(name)[tuple(slice(one.start, one.stop) for one in part)]
        stored = self._tensors[name]
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
    ) -> GroupQuantWeight | None:
        """Return a range of each dimension as integers; all dimensions but the last are rows. None for a float tensor.

        upload: copies blocks to the device on which they are unpacked.
        """
        if self._is_joint(name) or self._tensors[name].type.name in FLOAT_TYPES:
            return None
        stored = self._tensors[name]
        shape = self.shape(name)
        if len(shape) == 1:
            shape = (1, *shape)
            part = (range(1), *part)
        outer = part[:-1]
        columns = part[-1]
        block = stored.type.block
        block_bytes = stored.type.block_bytes
        blocks = self._bytes(stored, shape, outer[0]).view(len(outer[0]), *shape[1:-1], shape[-1] // block, block_bytes)
        first = columns.start // block
        last = -(-columns.stop // block)
        inner = (slice(dimension.start, dimension.stop) for dimension in outer[1:])
        count = math.prod(len(dimension) for dimension in outer)
        rows = blocks[(slice(None), *inner, slice(first, last))].reshape(count, last - first, block_bytes)
        return unpack_blocks(upload(rows), stored.type.name).narrow_columns(columns.start - first * block, len(columns))

    def release(self) -> None:
        """Drop cached file contents from this process's resident memory. Tensors that are still in use are read
        again."""
        for content in self._contents:
            content.madvise(mmap.MADV_DONTNEED)

    def _bytes(self, stored: StoredTensor, shape: tuple[int, ...], rows: range) -> Tensor:
        """Return the bytes of a range of the outermost dimension."""
        if len(rows) == 0:
            return torch.empty(0, dtype=torch.uint8)
        stride = stored.num_bytes // shape[0]
        start = stored.start + rows.start * stride
        return torch.frombuffer(self._contents[stored.part], dtype=torch.uint8, count=len(rows) * stride, offset=start)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # The mapping is private, because torch requires writable memory; nothing writes to it.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
