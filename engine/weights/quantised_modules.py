"""Read a part of a linear module's weight from any format of `engine.model.weight_format`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.weight_format import (
    BitsAndBytes4,
    MxFp4,
    NvFp4,
    PackedIntegers,
    QuarkInt4,
    ScaledNumbers,
    TorchaoInt4,
    WeightFormat,
)
from serve_llm.engine.quantization import fp8_blocks, mxfp4
from serve_llm.engine.quantization.packed_integers import AWQ_ORDER, QuantizedMatrix, count_words, find_words, unpack
from serve_llm.engine.weights.quantised import ModuleReader, check_zeros, read_integers
from serve_llm.kernels.linear_grouped import build_e2m1_table

NVFP4_GROUP = 16  # inputs that share a scale
INT8_MIDDLE = 128  # codes are int8 plus this
LARGEST_STATE = 4096  # bytes of JSON


def read_module(
    reader: ModuleReader, stored: WeightFormat, shape: tuple[int, int], rows: range, columns: range
) -> QuantizedMatrix:
    """shape: (outputs, inputs) of the module. rows, columns: the outputs and inputs to read.

    Raises ModelError that names the tensor if shapes, types or groups do not fit.
    """
    if isinstance(stored, PackedIntegers):
        return read_integers(reader, stored, shape, rows, columns)
    if isinstance(stored, NvFp4):
        return _read_nvfp4(reader, stored, shape, rows, columns)
    if isinstance(stored, MxFp4):
        return _read_mxfp4(reader, stored, shape, rows, columns)
    if isinstance(stored, TorchaoInt4):
        return _read_torchao_int4(reader, stored, shape, rows, columns)
    if isinstance(stored, QuarkInt4):
        return _read_quark_int4(reader, stored, shape, rows, columns)
    if isinstance(stored, BitsAndBytes4):
        return _read_bits_and_bytes(reader, stored, shape, rows, columns)
    if stored.kind == "fp8":
        return _read_fp8(reader, stored, shape, rows, columns)
    return _read_int8(reader, stored, shape, rows, columns)


def _read_int8(
    reader: ModuleReader, stored: ScaledNumbers, shape: tuple[int, int], rows: range, columns: range
) -> QuantizedMatrix:
    integers = reader.read(stored.weight, shape, (rows, columns), torch.int8)
    middle = 2 ** (stored.bits - 1)
    if stored.bits < 8 and integers.numel() and not -middle <= integers.min() <= integers.max() < middle:
        raise ModelError(
            f"{reader.module}.{stored.weight} has numbers beyond the {stored.bits} bits that config.json names"
        )
    size = stored.block[1] if stored.strategy == "block" else shape[1]
    groups = range(columns.start // size, -(-columns.stop // size)) if stored.strategy == "block" else range(1)

    def read_groups(suffix: str, dtype: torch.dtype | None) -> Tensor:
        if stored.strategy == "block":
            return reader.read(suffix, (shape[0], -(-shape[1] // size)), (rows, groups), dtype).float()
        return _read_row_numbers(reader, stored, suffix, shape[0], rows, dtype)

    scales = read_groups(stored.scale, None) / stored.divisor
    zeros = torch.full_like(scales, middle)
    if stored.has_zeros:
        zeros += read_groups(stored.zero_point, torch.int8)
    elif reader.has(stored.zero_point) and read_groups(stored.zero_point, torch.int8).any():
        raise ModelError(
            f"{reader.module}.{stored.zero_point} is not 0, but config.json says that weights are symmetric"
        )
    codes = (integers.view(torch.uint8) + middle) & (2**stored.bits - 1)  # minus `middle` it is the number
    group_of = torch.arange(columns.start, columns.stop, device=codes.device) // size - groups.start
    return QuantizedMatrix(codes, stored.bits, scales, group_of, size, zeros=zeros)


def _read_fp8(
    reader: ModuleReader, stored: ScaledNumbers, shape: tuple[int, int], rows: range, columns: range
) -> QuantizedMatrix:
    matrix = _read_fp8_numbers(reader, stored, shape, rows, columns)
    return replace(matrix, rounds_inputs=stored.inputs != "as they are", input_scale=_read_input_scale(reader, stored))


def _read_input_scale(reader: ModuleReader, stored: ScaledNumbers) -> Tensor | None:
    """Return the scale with which inputs are rounded, () float32; None if the checkpoint has none for the whole module
    with which that works."""
    found = [suffix for suffix in stored.input_scales if stored.inputs == "static" and reader.has(suffix)]
    shape = reader.checkpoint.shape(f"{reader.module}.{found[0]}") if found else (0,)
    if math.prod(shape) != 1:
        return None
    scale = reader.read(found[0], shape).float().reshape(())
    return scale if 0 < float(scale) < math.inf else None


def _read_fp8_numbers(
    reader: ModuleReader, stored: ScaledNumbers, shape: tuple[int, int], rows: range, columns: range
) -> QuantizedMatrix:
    numbers = reader.read(stored.weight, shape, (rows, columns), fp8_blocks.DTYPE)
    if stored.strategy != "block":
        scales = _read_row_numbers(reader, stored, stored.scale, shape[0], rows)
        return QuantizedMatrix(numbers.view(torch.uint8), 8, scales, _one_group(columns, numbers), shape[1])
    block = stored.block
    counts = [-(-size // step) for size, step in zip(shape, block, strict=True)]
    covered = [
        range(part.start // step, -(-part.stop // step)) for part, step in zip((rows, columns), block, strict=True)
    ]
    if stored.has_exponents:
        scales = reader.read(stored.scale, counts, covered, torch.uint8).view(torch.float8_e8m0fnu)
    elif len(reader.checkpoint.shape(f"{reader.module}.{stored.scale}")) == 4:  # as Model Optimizer writes them
        parts = (covered[0], range(1), covered[1], range(1))
        scales = reader.read(stored.scale, (counts[0], 1, counts[1], 1), parts)[:, 0, :, 0]
    else:
        scales = reader.read(stored.scale, counts, covered)
    first = (rows.start - covered[0].start * block[0], columns.start - covered[1].start * block[1])
    return fp8_blocks.build_matrix(numbers, scales, block, first)


def read_stacked(
    reader: ModuleReader,
    name: str,
    stored: ScaledNumbers,
    is_transposed: bool,
    shape: Sequence[int],
    ranges: Sequence[range],
) -> QuantizedMatrix:
    """Read one matrix of a stack of experts of 8-bit floats or int8: the tensor `name`, and another one with the
    scales.

    is_transposed: whether the stack is (experts, inputs, outputs). shape: (experts, outputs, inputs). ranges: what to
    read of each, one expert. Raises as `read_module`.
    """
    expert, rows, columns = ranges
    stored_shape = [shape[1], shape[2]]
    parts = [rows, columns]
    block = stored.block
    if is_transposed:
        stored_shape.reverse()
        parts.reverse()
    dtype = torch.int8 if stored.kind == "int8" else fp8_blocks.DTYPE
    numbers = reader.read(name, (shape[0], *stored_shape), (expert, *parts), dtype)[0]
    scale_name = f"{name}{stored.scale.removeprefix('weight')}"
    if stored.strategy != "block":
        codes = (numbers.view(torch.uint8).T if is_transposed else numbers.view(torch.uint8)).contiguous()
        scales = _read_stacked_scales(reader, scale_name, stored, shape[0], shape[1], expert, rows)
        zeros = None
        if stored.kind == "int8":
            codes = codes ^ INT8_MIDDLE
            zeros = torch.full_like(scales, INT8_MIDDLE)
        return QuantizedMatrix(codes, 8, scales, _one_group(columns, codes), shape[2], zeros=zeros)
    counts = [-(-size // step) for size, step in zip(stored_shape, block, strict=True)]
    covered = [range(part.start // step, -(-part.stop // step)) for part, step in zip(parts, block, strict=True)]
    scales = reader.read(scale_name, (shape[0], *counts), (expert, *covered))[0]
    first = (parts[0].start - covered[0].start * block[0], parts[1].start - covered[1].start * block[1])
    if is_transposed:
        return fp8_blocks.build_matrix(numbers.T.contiguous(), scales.T, (block[1], block[0]), (first[1], first[0]))
    return fp8_blocks.build_matrix(numbers, scales, block, first)


def _read_stacked_scales(
    reader: ModuleReader, name: str, stored: ScaledNumbers, experts: int, outputs: int, expert: range, rows: range
) -> Tensor:
    """(rows, 1) float32, of one expert."""
    count = 1 if stored.strategy == "tensor" else outputs
    shape = reader.checkpoint.shape(f"{reader.module}.{name}")
    if shape[:1] != (experts,) or sorted(shape[1:]) not in ([1] * (len(shape) - 1), [1] * (len(shape) - 2) + [count]):
        what = "one scale" if count == 1 else f"one scale for each of {outputs} outputs"
        raise ModelError(
            f"{reader.module}.{name} has shape {list(shape)}, but config.json asks for {what} of {experts} experts"
        )
    whole = [expert, *(range(size) for size in shape[1:])]
    scales = reader.read(name, shape, whole).float().reshape(-1, 1)
    return scales.expand(len(rows), 1) if count == 1 else scales[rows.start : rows.stop]


def _one_group(columns: range, weight: Tensor) -> Tensor:
    """Return the groups of columns that are all in one group."""
    return torch.zeros(len(columns), dtype=torch.long, device=weight.device)


def _read_row_numbers(
    reader: ModuleReader,
    stored: ScaledNumbers,
    suffix: str,
    outputs: int,
    rows: range,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Read scales or zero points, (rows, 1) float32. dtype: None for any floating-point type."""
    name = f"{reader.module}.{suffix}"
    shape = reader.checkpoint.shape(name)
    count = 1 if stored.strategy == "tensor" else outputs
    if shape not in {(count,), (count, 1)} and not (count == 1 and shape == ()):
        number = "scale" if suffix == stored.scale else "zero point"
        raise ModelError(
            f"{name} has shape {list(shape)}, but config.json: quantization_config asks for one {number} for "
            f"{'the tensor' if count == 1 else f'each of {outputs} outputs'}"
        )
    numbers = reader.read(suffix, shape, dtype=dtype).float().reshape(-1, 1)
    return numbers.expand(len(rows), 1) if count == 1 else numbers[rows.start : rows.stop]


def _read_nvfp4(
    reader: ModuleReader, stored: NvFp4, shape: tuple[int, int], rows: range, columns: range
) -> QuantizedMatrix:
    outputs, inputs = shape
    codes, groups, group_of = _read_nibbles(reader, stored.weight, shape, NVFP4_GROUP, rows, columns)
    scales = reader.read("weight_scale", (outputs, inputs // NVFP4_GROUP), (rows, groups), torch.float8_e4m3fn)
    whole_scale = reader.read(stored.marker, reader.checkpoint.shape(f"{reader.module}.{stored.marker}")).float()
    if whole_scale.numel() != 1:
        raise ModelError(f"{reader.module}.{stored.marker} has shape {list(whole_scale.shape)}, but must be one number")
    divisor = whole_scale if stored.layout == "compressed" else 1 / whole_scale
    divisors = divisor.flatten().expand(len(rows)).contiguous()
    table = build_e2m1_table(codes.device)
    return QuantizedMatrix(codes, 4, scales, group_of, NVFP4_GROUP, divisors=divisors, table=table)


def _read_mxfp4(
    reader: ModuleReader, stored: MxFp4, shape: tuple[int, int], rows: range, columns: range
) -> QuantizedMatrix:
    codes, groups, group_of = _read_nibbles(reader, stored.weight, shape, mxfp4.BLOCK, rows, columns)
    scales = reader.read("weight_scale", (shape[0], shape[1] // mxfp4.BLOCK), (rows, groups), torch.uint8)
    exponents = scales.view(torch.float8_e8m0fnu)
    return QuantizedMatrix(codes, 4, exponents, group_of, mxfp4.BLOCK, table=build_e2m1_table(codes.device))


def _read_torchao_int4(
    reader: ModuleReader, stored: TorchaoInt4, shape: tuple[int, int], rows: range, columns: range
) -> QuantizedMatrix:
    """Scales and offsets are (groups, outputs)."""
    codes, groups, group_of = _read_nibbles(reader, stored.weight, shape, stored.group_size, rows, columns)
    whole = (shape[1] // stored.group_size, shape[0])
    scales = reader.read("_weight_scale", whole, (groups, rows)).float().T.contiguous()
    offsets = reader.read("_weight_zero_point", whole, (groups, rows)).float().T
    zeros = torch.where(scales == 0, 0, 8 - offsets / scales)
    return QuantizedMatrix(codes ^ 8, 4, scales, group_of, stored.group_size, zeros=zeros.contiguous())


def _read_quark_int4(
    reader: ModuleReader, stored: QuarkInt4, shape: tuple[int, int], rows: range, columns: range
) -> QuantizedMatrix:
    """weight (inputs, words of outputs), weight_zero_point (groups, words of outputs), weight_scale (groups,
    outputs)."""
    outputs, inputs = shape
    size = stored.group_size
    num_groups = -(-inputs // size)
    groups = range(columns.start // size, -(-columns.stop // size))
    num_words = count_words(outputs, 4)
    words, skipped = find_words(rows, 4)
    order = AWQ_ORDER if stored.is_reordered else None

    def read_codes(suffix: str, count: int, part: range) -> Tensor:
        """(rows, inputs or groups) uint8, signed numbers with 8 added."""
        values = unpack(reader.read(suffix, (count, num_words), (part, words), torch.int32), 4, order)
        values = values[:, skipped : skipped + len(rows)].T.contiguous()
        return values ^ 8 if stored.is_signed else values

    codes = read_codes("weight", inputs, columns)
    scales = reader.read("weight_scale", (num_groups, outputs), (groups, rows)).T.float().contiguous()
    zeros = torch.full_like(scales, 8)
    if reader.has("weight_zero_point"):
        zeros = read_codes("weight_zero_point", num_groups, groups).float()
        check_zeros(f"{reader.module}.weight_zero_point", zeros, 8 if stored.is_symmetric else None, "symmetric: true")
    group_of = torch.arange(columns.start, columns.stop, device=codes.device) // size - groups.start
    return QuantizedMatrix(codes, 4, scales, group_of, size, zeros=zeros)


def _read_nibbles(
    reader: ModuleReader, suffix: str, shape: tuple[int, int], size: int, rows: range, columns: range
) -> tuple[Tensor, range, Tensor]:
    """Read codes of rows of whole groups of `size`, two per byte, the first in the lower half. Returns (rows, columns),
    the groups that they are in, and the number of each column's group among these."""
    outputs, inputs = shape
    if inputs % size:
        raise ModelError(f"{reader.module}: rows of {inputs} inputs are not whole groups of {size}")
    groups = range(columns.start // size, -(-columns.stop // size))
    whole = range(groups.start * size // 2, groups.stop * size // 2)
    packed = reader.read(suffix, (outputs, inputs // 2), (rows, whole), torch.uint8)
    skipped = columns.start - groups.start * size
    codes = mxfp4.unpack(packed)[:, skipped : skipped + len(columns)].contiguous()
    return codes, groups, (torch.arange(len(columns), device=packed.device) + skipped) // size


def _read_bits_and_bytes(
    reader: ModuleReader, stored: BitsAndBytes4, shape: tuple[int, int], rows: range, columns: range
) -> QuantizedMatrix:
    """Read rows that follow each other without gaps; the first number of a byte is in its upper half.

    Blocks consist of neighbouring numbers of the whole matrix. If rows are not whole blocks, groups of a row are the
    largest ones that lie within one block.
    """
    outputs, inputs = shape
    block, offset, nested_block = _read_state(reader, stored, shape)
    size = math.gcd(block, inputs)
    numbers = range(rows.start * inputs, rows.stop * inputs)
    per_item = 2 * stored.item_bytes
    items = range(numbers.start // per_item, -(-numbers.stop // per_item))
    dtype = torch.uint8 if stored.item_bytes == 1 else None
    packed = reader.read("weight", (-(-outputs * inputs // per_item), 1), (items, range(1)), dtype).view(torch.uint8)
    skipped = numbers.start - per_item * items.start
    codes = torch.stack((packed >> 4, packed & 0xF), -1).flatten()[skipped : skipped + len(numbers)]
    count = -(-outputs * inputs // block)
    blocks = range(numbers.start // block, -(-numbers.stop // block))
    if stored.is_nested:
        indices = reader.read("weight.absmax", (count,), (blocks,), torch.uint8).int()
        values = reader.read("weight.nested_quant_map", (256,)).float()
        outer = reader.read("weight.nested_absmax", (-(-count // nested_block),)).float()
        positions = torch.arange(blocks.start, blocks.stop, device=outer.device)
        absmax = values[indices] * outer[positions // nested_block] + offset
    elif len(reader.checkpoint.shape(f"{reader.module}.weight.absmax")) == 2 and inputs % block == 0:
        # bitsandbytes writes a model this way after it was used on a CPU.
        per_row = inputs // block
        absmax = reader.read("weight.absmax", (per_row, outputs), (range(per_row), rows)).float().T.flatten()
    else:
        absmax = reader.read("weight.absmax", (count,), (blocks,)).float()
    groups = range(columns.start // size, -(-columns.stop // size))
    first_of_row = torch.arange(rows.start, rows.stop).unsqueeze(1) * inputs
    block_of_group = (first_of_row + torch.arange(groups.start, groups.stop) * size) // block - blocks.start
    group_of = torch.arange(columns.start, columns.stop) // size - groups.start
    return QuantizedMatrix(
        codes.view(len(rows), inputs)[:, columns.start : columns.stop].contiguous(),
        4,
        absmax[block_of_group.to(absmax.device)],
        group_of.to(codes.device),
        size,
        table=reader.read("weight.quant_map", (16,)).float(),
    )


def _read_state(reader: ModuleReader, stored: BitsAndBytes4, shape: tuple[int, int]) -> tuple[int, float, int]:
    """Read the numbers per scale, the offset of scales, and the scales per scale of scales."""
    name = f"{reader.module}.{stored.marker}"
    length = reader.checkpoint.shape(name)
    if len(length) != 1 or length[0] > LARGEST_STATE:
        raise ModelError(f"{name} has shape {list(length)} and is not a short text")
    try:
        state = json.loads(bytes(reader.read(stored.marker, length, dtype=torch.uint8).tolist()))
        block = int(state["blocksize"])
        nested_block = int(state.get("nested_blocksize", 256))
        offset = float(state.get("nested_offset", 0.0))
        found = tuple(state["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{name} does not describe a quantised weight: {error!r}") from None
    if found != shape or state.get("quant_type") != stored.quant_type or block < 1 or nested_block < 1:
        raise ModelError(
            f"{name} describes {state.get('quant_type')} of shape {list(found)} in blocks of {block}, but config.json "
            f"asks for {stored.quant_type} of {list(shape)}"
        )
    return block, offset, nested_block
