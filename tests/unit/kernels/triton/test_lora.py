"""LoRA adapters in slots: products against float64, rows that do not depend on others, compiled code for GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serve_llm.kernels.lora import ExpansionWeight, OutputScale
from support.triton import NO_TRITON, assert_fits, compile_for, record

pytest.importorskip("triton", reason=NO_TRITON)
from serve_llm.kernels.triton import lora
from serve_llm.kernels.triton.lora import TritonLoRASlots

PARTS = (70, 7, 13)
MAX_RANK = 21
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def make_weights(
    inputs: int, rank: int, dtype: torch.dtype, seed: int, dora: bool = False
) -> tuple[Tensor, list[ExpansionWeight]]:
    """Return an adapter of the first two parts, which share the first product, and of the last."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    expansions = []
    first = 0
    for number, outputs in enumerate(PARTS):
        columns = slice(rank, 2 * rank) if number == 2 else slice(0, rank)
        scale = OutputScale(1 + 0.1 * random(outputs), random(outputs) if number else None) if dora else None
        part = slice(first, first + outputs)
        first = part.stop
        expansions.append(ExpansionWeight(columns, part, random(outputs, rank).to(dtype), scale))
    return (random(2 * rank, inputs) / inputs**0.5).to(dtype), expansions


def expected(y: Tensor, x: Tensor, rows: Tensor, down: Tensor, expansions: list[ExpansionWeight]) -> Tensor:
    y = y.double().clone()
    hidden = x[rows].double() @ down.double().T
    for columns, outputs, up, scale in expansions:
        own = y[rows, outputs]
        if scale is not None:
            own = own * scale.factor
            own = own if scale.offset is None else own + scale.offset
        y[rows, outputs] = own + hidden[:, columns] @ up.double().T
    return y


def make_slots(inputs: int, dtype: torch.dtype, num_slots: int = 4) -> TritonLoRASlots:
    return TritonLoRASlots(num_slots, MAX_RANK, inputs, PARTS, dtype, torch.device("cpu"))


@pytest.mark.parametrize(("inputs", "split", "dtype"), [(83, 1024, torch.bfloat16), (300, 128, torch.float32)])
def test_products(inputs: int, split: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of several ranks, with and without DoRA, among rows without one and rows of an empty slot."""
    monkeypatch.setattr(lora, "SPLIT", split)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((19, inputs + 5), generator=generator).to(dtype)[:, :inputs]
    y = torch.randn((19, sum(PARTS) + 3), generator=generator).to(dtype)[:, : sum(PARTS)]  # rows are not contiguous
    slots = torch.randint(-1, 4, (19,), generator=generator)
    held = make_slots(inputs, dtype)
    wanted = y
    for slot, (rank, dora) in enumerate([(1, False), (8, True), (MAX_RANK, False)]):
        weights = make_weights(inputs, rank, dtype, slot, dora)
        held.put(slot, *weights)
        wanted = expected(wanted, x, (slots == slot).nonzero().flatten(), *weights)
    before = y.clone()
    held.add(y, x, slots)
    torch.testing.assert_close(y.double(), wanted.double(), rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
    unchanged = (slots < 0) | (slots == 3)
    assert unchanged.any() and torch.equal(y[unchanged], before[unchanged])


def test_a_slot_holds_its_last_adapter_and_nothing_of_earlier_ones() -> None:
    """The earlier adapter had a higher rank, all parts and DoRA; and numbers that are not finite, in columns no longer
    used."""
    x, y = torch.randn(3, 30), torch.zeros(3, sum(PARTS))
    slots = torch.zeros(3, dtype=torch.int64)
    held = make_slots(30, torch.float32, 1)
    down, expansions = make_weights(30, MAX_RANK, torch.float32, 0, dora=True)
    held.put(0, torch.full_like(down, torch.inf), expansions)
    down, expansions = make_weights(30, 2, torch.float32, 1)
    held.put(0, down, expansions[:1])
    held.add(y, x, slots)
    wanted = expected(torch.zeros_like(y), x, torch.arange(3), down, expansions[:1])
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-4)
    held.clear(0)
    held.add(y, x, slots)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-4)


def test_rows_do_not_depend_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on their place, nor on the number of rows in a call."""
    dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((18, 83), generator=generator).to(dtype)
    y = torch.randn((18, sum(PARTS)), generator=generator).to(dtype)
    slots = torch.randint(-1, 2, (18,), generator=generator)
    held = make_slots(83, dtype)
    for slot in range(2):
        held.put(slot, *make_weights(83, 8, dtype, slot, dora=slot == 1))
    together = y.clone()
    held.add(together, x, slots)
    for row in (0, 15, 17):
        alone = y[row : row + 1].clone()
        held.add(alone, x[row : row + 1], slots[row : row + 1].expand(1))
        assert torch.equal(alone[0], together[row])
    monkeypatch.setattr(lora, "MAX_ROWS", 16)
    in_pieces = y.clone()
    held.add(in_pieces, x, slots)
    assert torch.equal(in_pieces, together)


def test_one_slot_for_all_rows() -> None:
    x, y = torch.randn(17, 30), torch.randn(17, sum(PARTS))
    held = make_slots(30, torch.float32)
    weights = make_weights(30, 4, torch.float32, 0)
    held.put(2, *weights)
    wanted = expected(y, x, torch.arange(17), *weights)
    held.add(y, x, torch.tensor([2]).expand(17))
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability", [86, 90, *(pytest.param(number, marks=pytest.mark.long) for number in (80, 120))]
)
def test_is_compiled_for_tensor_cores(capability: int) -> None:
    """Layers of an 8B model with ranks of 16 and 128, and a router in float32."""

    def launch(inputs: int, parts: tuple[int, ...], max_rank: int, dtype: torch.dtype) -> None:
        meta = torch.device("meta")
        held = TritonLoRASlots(1, max_rank, inputs, parts, dtype, meta)
        rows = torch.empty((64, inputs), dtype=dtype, device=meta)
        held.add(rows.new_empty((64, sum(parts))), rows, torch.empty(64, dtype=torch.int64, device=meta))

    launches = record(
        lambda: [
            launch(4096, (4096, 1024, 1024), 16, torch.bfloat16),
            launch(14336, (4096,), 128, torch.bfloat16),
            launch(2048, (128,), 16, torch.float32),
        ]
    )
    found = compile_for(launches, capability)
    assert_fits(found)
    assert all(one.shared_bytes <= 99 * 1024 for one in found), "cards for desktops have no more"
    assert [one.has_mma for one in found] == [True] * 4 + [False] * 2
