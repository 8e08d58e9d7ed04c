"""Read a model's parameters from the tensors of a checkpoint: this rank's part of each, one at a time.

A parameter may be some rows of a tensor that holds several parameters, transposed, one of a stack, or quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.build import WeightSlice, is_float32
from serve_llm.engine.model.weight_format import ScaledNumbers, WeightFormat
from serve_llm.engine.model.weight_map import WeightRule
from serve_llm.engine.quantization import mxfp4
from serve_llm.engine.quantization.packed_integers import QuantizedMatrix, build_grouped_weight
from serve_llm.engine.weights.files import AnyCheckpoint
from serve_llm.engine.weights.quantised import ModuleReader
from serve_llm.engine.weights.quantised_modules import read_module, read_stacked
from serve_llm.engine.weights.upload import build_upload
from serve_llm.kernels.linear_grouped import GroupQuantWeight


class Source(NamedTuple):
    """The tensor that holds a parameter."""

    tensor: str  # its name in the checkpoint
    rule: WeightRule


class Location(NamedTuple):
    """The location of a parameter, or of a part of it, in its tensor."""

    tensor_shape: tuple[int, ...]  # shape of the whole tensor
    ranges: tuple[range, ...]  # what to read, one per dimension
    select: Callable[[Tensor], Tensor]  # extracts the parameter from what was read


class CheckpointLoader:
    """A `WeightLoader` for a checkpoint's tensors. Results may be views of the mapped file."""

    def __init__(
        self, checkpoint: AnyCheckpoint, sources: Mapping[str, Source], dtype: torch.dtype, device: torch.device
    ) -> None:
        """sources: by parameter, as from `match_tensors`. dtype: the model's."""
        self._checkpoint = checkpoint
        self._sources = sources
        self._dtype = dtype
        self._upload = build_upload(device)

    def __call__(
        self, name: str, shape: tuple[int, ...], part: WeightSlice | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `WeightLoader`. Raises ModelError if the tensor has another shape or type than the model expects."""
        if name not in self._sources:
            raise ModelError(f"no tensor of the checkpoint is known to fill {name}")
        source = self._orient(self._sources[name], shape)
        rule = source.rule
        if rule.transform == "per_head":
            return self._read_head_scales(source.tensor, shape[0], part)
        location = locate(name, rule, shape, part)
        if rule.format is not None:
            tensor = location.select(self._read_module(rule, rule.format, location).dequantise())
        elif rule.scales:
            tensor = location.select(self._read_mxfp4(source, location).dequantise())
        elif f"{name}_scale" in self._sources:
            return self._upload(location.select(self._read_int8(source, location)))
        elif (blocks := self._read_blocks(source, location)) is not None:
            sizes = [len(part) for part in location.ranges[bool(rule.members) :]]
            tensor = location.select(blocks.dequantise().view(sizes))
        else:
            tensor = self._upload(location.select(self._read_float(source, location)))
        if rule.transform == "plus_one":
            tensor = tensor.float() + 1.0
        elif rule.transform == "minus_exp":
            tensor = self._check_negative(source.tensor, tensor).neg().log()
        return tensor.to(torch.float32 if is_float32(name) else dtype or self._dtype)

    def read_grouped(self, name: str, shape: tuple[int, int], part: WeightSlice) -> GroupQuantWeight | None:
        """See `GroupQuantWeightLoader`. Raises ModelError as `__call__` does."""
        if name not in self._sources:
            return None
        source = self._orient(self._sources[name], shape)
        location = locate(name, source.rule, shape, part)
        if source.rule.format is not None:
            matrix = self._read_module(source.rule, source.rule.format, location)
            weight = build_grouped_weight(matrix, location.ranges[-1].start)
        elif source.rule.scales:
            weight = self._read_mxfp4(source, location)
        else:
            weight = self._read_blocks(source, location)
        return None if weight is None else weight.map_rows(location.select)

    def _orient(self, source: Source, shape: tuple[int, ...]) -> Source:
        """Return the source of a matrix of this shape in a stack that some versions of transformers write as (experts,
        outputs, inputs), although others, and its publishers, write (experts, inputs, outputs)."""
        rule = source.rule
        if not rule.members or rule.transform != "transpose":
            return source
        outputs = sum(rule.sizes) or shape[0] * len(rule.parameters) // rule.members
        if outputs == shape[1] or self._checkpoint.shape(source.tensor) != (rule.members, outputs, shape[1]):
            return source
        return Source(source.tensor, replace(rule, transform="none"))

    def _read_module(self, rule: WeightRule, stored: WeightFormat, location: Location) -> QuantizedMatrix:
        """On the model's device."""
        if rule.members:
            parent, _, name = rule.module.rpartition(".")
            reader = ModuleReader(self._checkpoint, parent, self._upload)
            assert isinstance(stored, ScaledNumbers)  # see `weights.load`
            is_transposed = rule.transform == "transpose"
            return read_stacked(reader, name, stored, is_transposed, location.tensor_shape, location.ranges)
        reader = ModuleReader(self._checkpoint, rule.module, self._upload)
        if len(location.tensor_shape) != 2:
            raise ModelError(f"{rule.module} is quantised, but is not a linear module")
        outputs, inputs = location.tensor_shape
        return read_module(reader, stored, (outputs, inputs), *location.ranges)

    def _read_blocks(self, source: Source, location: Location) -> GroupQuantWeight | None:
        """Read a tensor whose blocks contain their scales, on the model's device; None for any other tensor."""
        self._check_shape(source.tensor, location.tensor_shape)
        return self._checkpoint.read_grouped(source.tensor, location.ranges, self._upload)

    def _read_stored(self, source: Source, location: Location) -> Tensor:
        """Read the numbers as they are stored."""
        self._check_shape(source.tensor, location.tensor_shape)
        tensor = self._checkpoint.read(source.tensor, location.ranges)
        return tensor[0] if source.rule.members else tensor

    def _read_float(self, source: Source, location: Location) -> Tensor:
        tensor = self._read_stored(source, location)
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise ModelError(
                f"{source.tensor} is stored as {tensor.dtype}, but config.json does not say that it is quantised, or "
                "it lacks scales"
            )
        return tensor

    def _check_negative(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor in float32. Raises ModelError unless all its numbers are below 0."""
        if not (tensor < 0).all():
            raise ModelError(f"{name}: all numbers must be below 0")
        return tensor.float()

    def _read_head_scales(self, tensor: str, num_heads: int, part: WeightSlice | None) -> Tensor:
        """(own heads,) float32. Raises ModelError unless all are above 0 and finite."""
        scales = self._checkpoint.read(tensor).float().flatten()
        if len(scales) not in (1, num_heads):
            raise ModelError(f"{tensor} has {len(scales)} numbers, but there must be 1 or {num_heads}, one per KV head")
        if not (scales > 0).logical_and(scales.isfinite()).all():
            raise ModelError(f"{tensor}: scales of a KV cache must be above 0 and finite")
        heads = range(num_heads) if part is None else part.range
        return self._upload(scales.expand(num_heads)[heads.start : heads.stop].contiguous())

    def _read_int8(self, source: Source, location: Location) -> Tensor:
        tensor = self._read_stored(source, location)
        if tensor.dtype != torch.int8:
            raise ModelError(
                f"{source.tensor} is stored as {tensor.dtype}, but config.json says that it is quantised to int8"
            )
        return tensor

    def _read_mxfp4(self, source: Source, location: Location) -> GroupQuantWeight:
        """Read a matrix of a stack that is stored as MXFP4, on the model's device."""
        *outer, num_columns = location.tensor_shape
        if num_columns % mxfp4.BLOCK:
            raise ModelError(
                f"{source.tensor}: config.json asks for rows of {num_columns} numbers, which are not whole blocks of "
                "MXFP4"
            )
        num_blocks = num_columns // mxfp4.BLOCK
        self._check_shape(source.tensor, (*outer, num_blocks, mxfp4.BLOCK // 2))
        self._check_shape(source.rule.scales, (*outer, num_blocks))
        columns = location.ranges[-1]
        blocks = range(columns.start // mxfp4.BLOCK, -(-columns.stop // mxfp4.BLOCK))
        ranges = (*location.ranges[:-1], blocks)
        numbers = self._checkpoint.read(source.tensor, (*ranges, range(mxfp4.BLOCK // 2)))[0]
        exponents = self._checkpoint.read(source.rule.scales, ranges)[0]
        if numbers.dtype != torch.uint8 or exponents.dtype != torch.uint8:
            raise ModelError(
                f"{source.tensor} is stored as {numbers.dtype}, but config.json says that it is blocks of MXFP4"
            )
        first = columns.start - blocks.start * mxfp4.BLOCK
        weight = mxfp4.build_weight(self._upload(numbers), self._upload(exponents))
        return weight.narrow_columns(first, len(columns))

    def _check_shape(self, tensor: str, expected: Sequence[int]) -> None:
        shape = self._checkpoint.shape(tensor)
        if shape != tuple(expected):
            raise ModelError(
                f"{tensor} has shape {list(shape)}, but config.json asks for {list(expected)}: are they of the same "
                "model?"
            )


def locate(name: str, rule: WeightRule, shape: tuple[int, ...], part: WeightSlice | None) -> Location:
    """Locate the parameter `name` of this shape, or a part of it, in the tensor of `rule`."""
    num_parameters = len(rule.parameters) // (rule.members or 1)
    member, index = divmod(rule.parameters.index(name), num_parameters)
    sizes = rule.sizes or (shape[0],) * num_parameters
    ranges = [range(size) for size in shape]
    if part is not None:
        ranges[part.dimension] = part.range
    rows, select = _locate_rows(rule.groups, sizes, index, ranges[0])
    ranges[0] = rows
    tensor_shape = [sum(sizes), *shape[1:]]
    if rule.transform == "transpose" and rule.format is None:  # quantised weights are always (outputs, inputs)
        tensor_shape.reverse()
        ranges.reverse()
        select_rows = select

        def select(tensor: Tensor) -> Tensor:
            return select_rows(tensor.T)

    if rule.members:
        tensor_shape.insert(0, rule.members)
        ranges.insert(0, range(member, member + 1))
    return Location(tuple(tensor_shape), tuple(ranges), select)


def _locate_rows(
    groups: int, sizes: tuple[int, ...], index: int, rows: range
) -> tuple[range, Callable[[Tensor], Tensor]]:
    """Return the rows of a tensor to read for `rows` of one of its parameters, and the function that extracts them.

    index: of the parameter in the tensor. sizes: rows of each parameter. groups: see `WeightRule`; every group that
    `rows` overlaps is read whole.
    """
    size = sizes[index] // groups
    before = sum(sizes[:index]) // groups
    stride = sum(sizes) // groups
    if groups == 1:
        return range(before + rows.start, before + rows.stop), lambda tensor: tensor
    first_group = rows.start // size
    end_group = -(-rows.stop // size)

    def select(tensor: Tensor) -> Tensor:
        grouped = tensor.reshape(end_group - first_group, stride, *tensor.shape[1:])
        parameter_rows = grouped[:, before : before + size].flatten(0, 1)
        return parameter_rows[rows.start - first_group * size : rows.stop - first_group * size]

    return range(first_group * stride, end_group * stride), select
