"""What LoRA adapters add to a linear layer, in Triton: two launches for the rows of all adapters. Contract:
`kernels.lora.LoRASlots`.

`_shrink` computes the first product of a row, x @ down.T, in parts of SPLIT inputs; `_expand` adds these parts in
order, multiplies the sum by `up` and adds the result to the row. The device alone knows the adapter of a row: each
block of ROWS rows has as many programs as rows, and the first one with a slot computes all rows of the block that have
it; the others return. Sums have one order for any number of rows, so a row's bits do not depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.lora import ExpansionWeight
from serve_llm.kernels.triton.product import dot

ROWS = 16  # rows per block: the fewest that a product takes
SPLIT = 1024  # inputs that one program of `_shrink` sums
DEPTH_BYTES = 256  # bytes of a row that it loads at a time
MAX_COLUMNS = 64  # columns per program of `_shrink`
OUTPUTS = 64  # outputs per program of `_expand`
MAX_ROWS = 1024  # in a call, whose parts of sums take memory


class TritonLoRASlots:
    """The adapters of one linear layer."""

    def __init__(
        self, num_slots: int, max_rank: int, inputs: int, parts: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """See `kernels.lora.AllocateLoRASlots`."""
        outputs = sum(parts)
        self._max_rank = max_rank
        self._down = torch.zeros((num_slots, len(parts) * max_rank, inputs), dtype=dtype, device=device)
        self._up = torch.zeros((num_slots, outputs, max_rank), dtype=dtype, device=device)
        # Per slot: what a DoRA adapter does to the layer's own outputs, see `OutputScale`
        self._factors = torch.zeros((num_slots, outputs), dtype=torch.float32, device=device)
        self._offsets = torch.zeros((num_slots, outputs), dtype=torch.float32, device=device)
        # Per slot: its number of columns, whether it has factors, and the first column and the end of each part
        self._entries = torch.zeros((num_slots, 2 + 2 * len(parts)), dtype=torch.int32, device=device)
        self._part_of_output: dict[int, int] = {}  # by a part's first output; the last of those that begin there
        tiles = []  # first output, end of the part, part
        first = 0
        for number, count in enumerate(parts):
            self._part_of_output[first] = number
            tiles += [(start, first + count, number) for start in range(first, first + count, OUTPUTS)]
            first += count
        self._tiles = torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 3)

    def put(self, slot: int, down: Tensor, expansions: Sequence[ExpansionWeight]) -> None:
        entry = [0] * self._entries.shape[1]
        entry[0] = len(down)
        self._down[slot, : len(down)] = down
        self._factors[slot] = 1.0
        self._offsets[slot] = 0.0
        for columns, outputs, up, scale in expansions:
            part = self._part_of_output[outputs.start]
            entry[2 + 2 * part : 4 + 2 * part] = columns.start, columns.stop
            self._up[slot, outputs, : up.shape[1]] = up
            if scale is not None:
                entry[1] = 1
                self._factors[slot, outputs] = scale.factor
                if scale.offset is not None:
                    self._offsets[slot, outputs] = scale.offset
        self._entries[slot] = torch.tensor(entry, dtype=torch.int32)

    def clear(self, slot: int) -> None:
        self._entries[slot] = 0

    def add(self, y: Tensor, x: Tensor, slots: Tensor) -> None:
        assert y.stride(1) == 1 or y.shape[1] == 1, "a copy would be changed"
        x = x if x.stride(1) == 1 else x.contiguous()
        for start in range(0, len(x), MAX_ROWS):
            end = start + MAX_ROWS
            self._add(y[start:end], x[start:end], slots[start:end])

    def _add(self, y: Tensor, x: Tensor, slots: Tensor) -> None:
        rows = len(x)
        columns, inputs = self._down.shape[1:]
        outputs = self._up.shape[1]
        width = min(MAX_COLUMNS, max(16, triton.next_power_of_2(columns)))
        column_tiles = triton.cdiv(columns, width)
        splits = triton.cdiv(inputs, SPLIT)
        blocks = triton.cdiv(rows, ROWS)
        hidden = torch.empty((splits, rows, columns), dtype=torch.float32, device=x.device)
        fields = self._entries.shape[1]
        _shrink[(blocks, splits * column_tiles, ROWS)](
            x,
            slots,
            self._entries,
            self._down,
            hidden,
            rows,
            inputs,
            columns,
            column_tiles,
            x.stride(0),
            slots.stride(0),
            FIELDS=fields,
            ROWS=ROWS,
            COLUMNS=width,
            DEPTH=DEPTH_BYTES // x.element_size(),
            SPLIT=SPLIT,
            num_warps=4,
            num_stages=3,
        )
        _expand[(blocks, len(self._tiles), ROWS)](
            y,
            hidden,
            slots,
            self._entries,
            self._tiles,
            self._up,
            self._factors,
            self._offsets,
            rows,
            outputs,
            columns,
            self._max_rank,
            splits,
            y.stride(0),
            slots.stride(0),
            FIELDS=fields,
            ROWS=ROWS,
            DEPTH=min(64, max(16, triton.next_power_of_2(self._max_rank))),
            OUTPUTS=OUTPUTS,
            num_warps=4,
            num_stages=2,
        )


@triton.jit
def _find_rows(slots, slot_stride, rows, ROWS: tl.constexpr):
    """The program's slot, -1 if it has nothing to do, the rows of its block, and which of them have the slot."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    own_row = first + tl.program_id(2)
    slot = tl.load(slots + own_row * slot_stride, own_row < rows, -1).to(tl.int32)
    is_own = tl.load(slots + row * slot_stride, row < rows, -1).to(tl.int32) == slot
    num_before = tl.sum((is_own & (row < own_row)).to(tl.int32), 0)
    return tl.where(num_before > 0, -1, slot), row, is_own & (row < rows)


@triton.jit(do_not_specialize=["rows", "slot_stride"])
def _shrink(
    x,
    slots,
    entries,
    down,
    hidden,
    rows,
    inputs,
    columns,
    column_tiles,
    x_row,
    slot_stride,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Store sums over one part of the inputs, float32. hidden: (splits, rows, columns)."""
    slot, row, is_row = _find_rows(slots, slot_stride, rows, ROWS)
    if slot < 0:
        return
    first_column = tl.program_id(1) % column_tiles * COLUMNS
    num_columns = tl.load(entries + slot * FIELDS)
    if first_column >= num_columns:
        return
    split = tl.program_id(1) // column_tiles
    column = first_column + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, inputs)
    x_rows = x + row.to(tl.int64)[:, None] * x_row
    weight = down + (slot.to(tl.int64) * columns + column)[None, :] * inputs
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        is_depth = depth < end
        left = tl.load(x_rows + depth[None, :], is_row[:, None] & is_depth[None, :], 0.0)
        right = tl.load(weight + depth[:, None], is_column[None, :] & is_depth[:, None], 0.0)
        total = dot(left, right, total)
    target = (split * rows + row).to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(hidden + target, total, is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["rows", "slot_stride", "splits"])
def _expand(
    y,
    hidden,
    slots,
    entries,
    tiles,
    up,
    factors,
    offsets,
    rows,
    outputs,
    columns,
    max_rank,
    splits,
    y_row,
    slot_stride,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Add products to some outputs, after the factors of DoRA."""
    slot, row, is_row = _find_rows(slots, slot_stride, rows, ROWS)
    if slot < 0:
        return
    tile = tiles + tl.program_id(1) * 3
    part = tl.load(tile + 2)
    entry = entries + slot * FIELDS
    first_column = tl.load(entry + 2 + 2 * part)
    end_column = tl.load(entry + 3 + 2 * part)
    if end_column <= first_column:
        return
    output = tl.load(tile) + tl.arange(0, OUTPUTS)
    is_output = output < tl.load(tile + 1)
    place = slot.to(tl.int64) * outputs + output
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, end_column - first_column, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        is_depth = depth < end_column - first_column
        left = tl.zeros((ROWS, DEPTH), tl.float32)
        for split in range(splits):
            source = (split * rows + row).to(tl.int64)[:, None] * columns + (first_column + depth)[None, :]
            left += tl.load(hidden + source, is_row[:, None] & is_depth[None, :], 0.0)
        right = tl.load(up + place[None, :] * max_rank + depth[:, None], is_output[None, :] & is_depth[:, None], 0.0)
        total = dot(left.to(up.dtype.element_ty), right, total)
    target = y + row.to(tl.int64)[:, None] * y_row + output[None, :]
    mask = is_row[:, None] & is_output[None, :]
    own = tl.load(target, mask, 0.0).to(tl.float32)
    if tl.load(entry + 1) > 0:
        factor = tl.load(factors + place, is_output, 1.0)
        offset = tl.load(offsets + place, is_output, 0.0)
        own = (own * factor[None, :] + offset[None, :]).to(y.dtype.element_ty).to(tl.float32)
    product = total.to(y.dtype.element_ty).to(tl.float32)
    tl.store(target, (own + product).to(y.dtype.element_ty), mask)
