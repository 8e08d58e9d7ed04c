"""The bytes of one parameter, in a checkpoint and in the layout of the kernels. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from serve_llm.cli.plan.processor import compresses_bfloat16
from serve_llm.engine.model.quantization_spec import GroupQuantForm

FLOAT32_BYTES = 4
# `kernels.cpu.linear` packs weights for AVX-512 in panels of 16 outputs and 4-byte units of inputs, with a float32
# bias and, for int8, a scale and a sum of 4 bytes per output. Other processors pad less, which only matters for tiny
# models.
PANEL_OUTPUTS = 16
UNIT_BYTES = 4  # rows are read in whole units
BFLOAT16_BYTES = 2
# With AVX-512 and without AMX, weights in bfloat16 are compressed: see `kernels.cpu.linear.CompressedWeight`.
QUAD_INPUTS = 8
QUAD_BYTES = 12  # for QUAD_INPUTS inputs of one output
CODES_BYTES = 16 + 4  # for a panel: upper bytes, and where its weights without a code start
RARE_BYTES = 4  # for a weight without a code
RARE_LEAST = 64  # room for those of a layer: see `kernels.cpu.linear.rare_room`
RARE_PART = 256
SCALE_BYTES = 4
INDEX_BYTES = 8  # the order of inputs
TABLE_BYTES = 64  # 16 float32
WORD_BITS = 32
SLAB_INPUTS = 64  # `kernels.triton.grouped` pads rows to whole slabs; with 4 bits, two of them share bytes
FP8_MULTIPLE = 16  # `kernels.linear_fp8` pads outputs and inputs to multiples of this


@dataclass(frozen=True)
class Groups:
    """How a linear layer's weight is stored in groups."""

    count: int  # groups per row
    form: GroupQuantForm
    offset: int  # inputs of the first group that the rank lacks

    def row_bytes(self, inputs: int, device: str) -> int:
        scales = self.count * self.form.scale_bytes * (1 + self.form.has_zeros)
        more = scales + FLOAT32_BYTES * self.form.has_divisors
        if device == "cpu":
            return round_up(inputs * self.form.bits, WORD_BITS) // 8 + more
        return round_up((self.offset + inputs) * self.form.bits, SLAB_INPUTS * 8) // 8 + more


def find_groups(form: GroupQuantForm | None, inputs: int, first: int, is_part: bool, device: str) -> Groups | None:
    """The groups; None if a rank holds its inputs, from `first` on, in the model's dtype: see
    `kernels.cpu.linear_grouped`.

    is_part: whether other ranks hold other inputs."""
    if form is None or inputs == 0 or (form.has_order and is_part):
        return None
    size = form.group_size or first + inputs
    offset = first % size
    count = -(-(offset + inputs) // size)
    per_word = WORD_BITS // form.bits
    if device == "cpu" and count > 1 and (size % per_word or offset % per_word):
        return None
    return Groups(count, form, offset)


@dataclass(frozen=True)
class LinearWeight:
    """The weight of a linear layer, with its bias."""

    outputs: int
    inputs: int
    is_8_bit: bool = False
    bias: bool = False
    float32: bool = False  # computed in float32, whatever the model's dtype
    groups: Groups | None = None

    def loaded_bytes(self, element_bytes: int, in_checkpoint: bool) -> int:
        """in_checkpoint: whether the checkpoint is quantised."""
        bias = self.outputs * element_bytes if self.bias else 0
        if self.groups is not None and in_checkpoint:
            return self.outputs * self.groups.row_bytes(self.inputs, "cpu") + bias
        if self.is_8_bit and in_checkpoint:
            return self.outputs * (self.inputs + SCALE_BYTES) + bias
        return self.outputs * self.inputs * element_bytes + bias

    def held_bytes(self, element_bytes: int, device: str, fp8: bool) -> int:
        """fp8: whether `kernels.linear_fp8` holds what is in 8 bits without groups. Stored fp8 weights are counted as
        `kernels.triton.grouped` holds them; those in square blocks take up to 3 % less in `kernels.linear_fp8_blocks`.
        """
        if self.float32:
            element_bytes = FLOAT32_BYTES
        if self.outputs * self.inputs == 0:
            return self.outputs * element_bytes if self.bias else 0
        if device == "cpu":
            return self._held_bytes_on_cpu(element_bytes)
        if self.groups is not None:
            order = self.inputs * INDEX_BYTES if self.groups.form.has_order else 0
            return self.outputs * (self.groups.row_bytes(self.inputs, device) + element_bytes * self.bias) + order
        if not self.is_8_bit:
            return self.outputs * (self.inputs + self.bias) * element_bytes
        if not fp8:
            row_bytes = round_up(self.inputs, SLAB_INPUTS) + SCALE_BYTES
            return self.outputs * (row_bytes + element_bytes * self.bias)
        row_bytes = round_up(self.inputs, FP8_MULTIPLE) + SCALE_BYTES + element_bytes * self.bias
        return round_up(self.outputs, FP8_MULTIPLE) * row_bytes

    def _held_bytes_on_cpu(self, element_bytes: int) -> int:
        outputs = round_up(self.outputs, PANEL_OUTPUTS)
        if self.groups is not None:
            order = self.inputs * INDEX_BYTES if self.groups.form.has_order else 0
            table = TABLE_BYTES if self.groups.form.has_table else 0
            return outputs * (self.groups.row_bytes(self.inputs, "cpu") + FLOAT32_BYTES * self.bias) + order + table
        bias = outputs * FLOAT32_BYTES * self.bias
        if self.is_8_bit:
            return outputs * (round_up(self.inputs, UNIT_BYTES) + 2 * SCALE_BYTES) + bias
        if element_bytes == BFLOAT16_BYTES and compresses_bfloat16():
            quads = -(-self.inputs // QUAD_INPUTS)
            outputs = round_up(self.outputs, 2 * PANEL_OUTPUTS)
            codes = outputs // PANEL_OUTPUTS * CODES_BYTES + 4
            rare = max(RARE_LEAST, self.outputs * self.inputs // RARE_PART) * RARE_BYTES
            return outputs * quads * QUAD_BYTES + codes + rare + bias
        return outputs * round_up(self.inputs * element_bytes, UNIT_BYTES) + bias


@dataclass(frozen=True)
class TableWeight(LinearWeight):
    """The LM head, or an embedding stored like one. In 8 bits without groups, it is quantised while loading."""

    is_read: bool = True  # False: its numbers are read as the embedding's
    is_copy: bool = True  # False: it shares the embedding's memory

    def loaded_bytes(self, element_bytes: int, in_checkpoint: bool) -> int:
        bias = self.outputs * element_bytes if self.bias else 0
        if not self.is_read:
            return bias
        row_bytes = self.inputs * element_bytes if self.groups is None else self.groups.row_bytes(self.inputs, "cpu")
        return self.outputs * row_bytes + bias

    def held_bytes(self, element_bytes: int, device: str, fp8: bool) -> int:
        held = super().held_bytes(element_bytes, device, fp8)
        return held if self.is_copy else held - self.outputs * self.inputs * element_bytes


@dataclass(frozen=True)
class OtherWeight:
    """Any other parameter."""

    elements: int
    float32: bool = False  # whatever the model's dtype
    in_checkpoint: bool = True  # False: created while loading

    def loaded_bytes(self, element_bytes: int, in_checkpoint: bool) -> int:
        return self.held_bytes(element_bytes, "", False) if self.in_checkpoint else 0

    def held_bytes(self, element_bytes: int, device: str, fp8: bool) -> int:
        return self.elements * (FLOAT32_BYTES if self.float32 else element_bytes)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
