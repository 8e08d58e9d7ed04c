"""Read a part of a linear module's weight as a quantised checkpoint stores it (`engine.model.weight_format`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.weight_format import PackedIntegers
from serve_llm.engine.quantization.packed_integers import AWQ_ORDER, QuantizedMatrix, count_words, find_words, unpack
from serve_llm.engine.weights.files import AnyCheckpoint

Upload = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ModuleReader:
    """Reads tensors of one module, and checks their shapes and types."""

    checkpoint: AnyCheckpoint
    module: str  # its name in the checkpoint
    upload: Upload  # copies to the model's device

    def has(self, suffix: str) -> bool:
        return f"{self.module}.{suffix}" in self.checkpoint.names

    def read(
        self,
        suffix: str,
        shape: Sequence[int],
        ranges: Sequence[range] | None = None,
        dtype: torch.dtype | None = None,
        other_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Read a tensor, or ranges of its dimensions. shape: of the whole, according to config.json. dtype: None for
        any floating-point type. other_dtype: one that some writers use instead."""
        name = f"{self.module}.{suffix}"
        found = self.checkpoint.shape(name)
        if found != tuple(shape):
            raise ModelError(
                f"{name} has shape {list(found)}, but config.json asks for {list(shape)}: are they of the same model, "
                "and is quantization_config right?"
            )
        tensor = self.checkpoint.read(name, None if ranges is None else tuple(ranges))
        is_right = tensor.is_floating_point() if dtype is None else tensor.dtype in (dtype, other_dtype)
        if not is_right:
            raise ModelError(
                f"{name} is stored as {tensor.dtype}, but config.json: quantization_config asks for "
                f"{'a floating point type' if dtype is None else dtype}"
            )
        return self.upload(tensor)


def read_integers(
    reader: ModuleReader, stored: PackedIntegers, shape: tuple[int, int], rows: range, columns: range
) -> QuantizedMatrix:
    """shape: (outputs, inputs) of the module. rows, columns: the outputs and inputs to read.

    Raises ModelError that names the tensor if shapes, types or groups do not fit.
    """
    inputs = shape[1]
    size = stored.group_size or inputs
    num_groups = -(-inputs // size)
    if len(rows) == 0 or len(columns) == 0:
        empty = torch.empty((len(rows), 0))
        return QuantizedMatrix(
            empty.new_empty((len(rows), len(columns)), dtype=torch.uint8),
            stored.bits,
            empty,
            torch.zeros(len(columns), dtype=torch.long),
            size,
            zeros=empty,
        )
    groups = _read_groups(reader, stored, columns, inputs, size, num_groups)
    first = int(groups.min())
    last = int(groups.max())
    if first < 0 or last >= num_groups:
        raise ModelError(
            f"{reader.module}.{stored.optional[0]} names group {last if last >= num_groups else first}, but "
            f"config.json: quantization_config: group_size {stored.group_size} gives groups 0 to {num_groups - 1}"
        )
    kept = range(first, last + 1)
    parts = (rows, columns, kept)
    is_awq = stored.layout in ("awq", "awq_gemv")
    if stored.layout == "awq":
        codes, scales, zeros = _read_awq(reader, stored, shape, num_groups, parts)
    elif stored.layout == "awq_gemv":
        codes, scales, zeros = _read_awq_gemv(reader, stored, shape, num_groups, parts)
    elif stored.layout == "compressed":
        codes, scales, zeros = _read_compressed(reader, stored, shape, num_groups, parts)
    else:
        codes, scales, zeros = _read_gptq(reader, stored, shape, num_groups, parts)
    key = "zero_point: false" if is_awq else f"sym: true and checkpoint_format {stored.layout}"
    key = "symmetric: true" if stored.layout == "compressed" else key
    middle = 2 ** (stored.bits - 1) if stored.is_symmetric else None
    check_zeros(f"{reader.module}.{stored.zero_point}", zeros, middle, key)
    return QuantizedMatrix(
        codes, stored.bits, scales.float(), (groups - first).to(codes.device), size, zeros=zeros.float()
    )


Parts = tuple[range, range, range]  # rows, columns and groups to read


def check_zeros(name: str, zeros: Tensor, middle: int | None, key: str) -> None:
    """Raise ModelError if there are other zero points in a format whose zero points are all `middle`. None: any may
    be. key: the setting that says so."""
    if middle is not None and (differing := zeros[zeros != middle]).numel():
        raise ModelError(
            f"{name} has zero point {int(differing[0])}, but config.json: quantization_config: {key} means {middle}"
        )


def _read_groups(
    reader: ModuleReader, stored: PackedIntegers, columns: range, inputs: int, size: int, num_groups: int
) -> Tensor:
    """Return the group of each column."""
    for suffix in stored.optional[:1]:
        if reader.has(suffix) and num_groups > 1:
            return reader.read(suffix, (inputs,), (columns,), torch.int32).cpu().long()
    return torch.arange(columns.start, columns.stop) // size


def _read_awq(
    reader: ModuleReader, stored: PackedIntegers, shape: tuple[int, int], num_groups: int, parts: Parts
) -> tuple[Tensor, Tensor, Tensor]:
    """qweight (inputs, words of outputs), qzeros (groups, words of outputs), scales (groups, outputs)."""
    rows, columns, groups = parts
    outputs, inputs = shape
    num_words = count_words(outputs, stored.bits)
    words, skipped = find_words(rows, stored.bits)
    wanted = slice(skipped, skipped + len(rows))
    codes = unpack(reader.read("qweight", (inputs, num_words), (columns, words), torch.int32), stored.bits, AWQ_ORDER)
    zeros = unpack(reader.read("qzeros", (num_groups, num_words), (groups, words), torch.int32), stored.bits, AWQ_ORDER)
    scales = reader.read("scales", (num_groups, outputs), (groups, rows))
    return codes[:, wanted].T.contiguous(), scales.T.contiguous(), zeros[:, wanted].T.contiguous()


def _read_awq_gemv(
    reader: ModuleReader, stored: PackedIntegers, shape: tuple[int, int], num_groups: int, parts: Parts
) -> tuple[Tensor, Tensor, Tensor]:
    """qweight (outputs, words of inputs), qzeros (outputs, words of groups), scales (outputs, groups); numbers of a
    word are in their own order, and rows of zero points and scales are padded to what AutoAWQ's kernel reads at a
    time."""
    rows, columns, groups = parts
    outputs, inputs = shape
    words, skipped = find_words(columns, 4)
    packed = reader.read("qweight", (outputs, count_words(inputs, 4)), (rows, words), torch.int32)
    codes = unpack(packed, 4)[:, skipped : skipped + len(columns)].contiguous()
    padding = max(1, 128 // (stored.group_size or inputs))  # words
    num_words = -(-count_words(num_groups, 4) // padding) * padding
    words, skipped = find_words(groups, 4)
    packed = reader.read("qzeros", (outputs, num_words), (rows, words), torch.int32)
    zeros = unpack(packed, 4)[:, skipped : skipped + len(groups)].contiguous()
    return codes, reader.read("scales", (outputs, num_words * 8), (rows, groups)), zeros


def _read_gptq(
    reader: ModuleReader, stored: PackedIntegers, shape: tuple[int, int], num_groups: int, parts: Parts
) -> tuple[Tensor, Tensor, Tensor]:
    """qweight (words of inputs, outputs), qzeros (groups, words of outputs), scales (groups, outputs)."""
    rows, columns, groups = parts
    outputs, inputs = shape
    bits = stored.bits
    words, skipped = find_words(columns, bits)
    packed = reader.read("qweight", (count_words(inputs, bits), outputs), (words, rows), torch.int32)
    codes = unpack(packed.T.contiguous(), bits)[:, skipped : skipped + len(columns)]
    words, skipped = find_words(rows, bits)
    packed = reader.read("qzeros", (num_groups, count_words(outputs, bits)), (groups, words), torch.int32)
    zeros = unpack(packed, bits)[:, skipped : skipped + len(rows)]
    if stored.layout == "gptq":  # stores zero points minus 1
        zeros = (zeros + 1) & (2**bits - 1)
    scales = reader.read("scales", (num_groups, outputs), (groups, rows))
    return codes.contiguous(), scales.T.contiguous(), zeros.T.contiguous()


def _read_compressed(
    reader: ModuleReader, stored: PackedIntegers, shape: tuple[int, int], num_groups: int, parts: Parts
) -> tuple[Tensor, Tensor, Tensor]:
    """weight_packed (outputs, words of inputs), weight_scale (outputs, groups); integers are stored with
    2 ** (bits - 1) added."""
    rows, columns, groups = parts
    outputs, inputs = shape
    bits = stored.bits
    sizes = reader.read("weight_shape", (2,), dtype=torch.int64, other_dtype=torch.int32).tolist()
    if tuple(sizes) != shape:
        raise ModelError(
            f"{reader.module}.weight_shape says {sizes}, but config.json asks for {list(shape)}: are they of the same "
            "model?"
        )
    words, skipped = find_words(columns, bits)
    packed = reader.read("weight_packed", (outputs, count_words(inputs, bits)), (rows, words), torch.int32)
    codes = unpack(packed, bits)[:, skipped : skipped + len(columns)]
    if stored.is_of_tensor:
        scales = reader.read("weight_scale", (1,)).expand(len(rows), 1)
    else:
        scales = reader.read("weight_scale", (outputs, num_groups), (rows, groups))
    if not reader.has(stored.zero_point):
        return codes.contiguous(), scales, torch.full_like(scales, 2 ** (bits - 1))
    return codes.contiguous(), scales, _read_compressed_zeros(reader, stored, outputs, num_groups, rows, groups)


def _read_compressed_zeros(
    reader: ModuleReader, stored: PackedIntegers, outputs: int, num_groups: int, rows: range, groups: range
) -> Tensor:
    """Read weight_zero_point (words of outputs, groups) or, as older versions of compressed-tensors wrote
    it, int8 (outputs, groups) without 2 ** (bits - 1) added."""
    name = stored.zero_point
    if reader.checkpoint.shape(f"{reader.module}.{name}") == (outputs, num_groups) and outputs > 1:
        return reader.read(name, (outputs, num_groups), (rows, groups), torch.int8).int().add(2 ** (stored.bits - 1))
    words, skipped = find_words(rows, stored.bits)
    shape = (count_words(outputs, stored.bits), num_groups)
    packed = reader.read(name, shape, (words, groups), torch.int32)
    zeros = unpack(packed.T.contiguous(), stored.bits)[:, skipped : skipped + len(rows)]
    return zeros.T.contiguous()
