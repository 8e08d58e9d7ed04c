"""The compiled products of LoRA adapters against the same products in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serve_llm.engine.model.lora import UnfusedLoRA
from serve_llm.kernels import linear
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.lora import CompiledLoRA
from serve_llm.kernels.lora import ExpansionWeight, LoRAKernels, OutputScale

PATH = library.find()
pytestmark = pytest.mark.skipif(PATH is None, reason="no compiled kernels")
INPUTS = 83  # not a multiple of any vector length
PARTS = (slice(0, 300), slice(300, 337), slice(337, 350))
VARIANTS = library.Library(PATH).variants if PATH is not None else ()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def make_weights(rank: int, dtype: torch.dtype, seed: int, dora: bool) -> tuple[Tensor, list[ExpansionWeight]]:
    """Return an adapter of the first two parts, which share the first product, and of the last."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    expansions = []
    for number, part in enumerate(PARTS):
        outputs = part.stop - part.start
        columns = slice(rank, 2 * rank) if number == 2 else slice(0, rank)
        scale = OutputScale(1 + 0.1 * random(outputs), random(outputs) if number else None) if dora else None
        expansions.append(ExpansionWeight(columns, part, random(outputs, rank).to(dtype), scale))
    return (random(2 * rank, INPUTS) / INPUTS**0.5).to(dtype), expansions


def expected(y: Tensor, x: Tensor, rows: Tensor | None, down: Tensor, expansions: list[ExpansionWeight]) -> Tensor:
    y = y.double().clone()
    chosen = torch.arange(len(y)) if rows is None else rows
    hidden = x[chosen].double() @ down.double().T
    for expansion in expansions:
        own = y[chosen, expansion.outputs]
        if expansion.scale is not None:
            own = own * expansion.scale.factor
            own = own if expansion.scale.offset is None else own + expansion.scale.offset
        y[chosen, expansion.outputs] = own + hidden[:, expansion.columns] @ expansion.up.double().T
    return y


@pytest.fixture(params=[*VARIANTS, "linear layers"])
def kernels(request: pytest.FixtureRequest) -> LoRAKernels:
    if request.param == "linear layers":
        return UnfusedLoRA(linear.pack)
    assert PATH is not None
    return CompiledLoRA(library.Library(PATH, request.param))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("rank", [1, 8, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(kernels: LoRAKernels, dtype: torch.dtype, rank: int, dora: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, INPUTS + 5).to(dtype)[:, :INPUTS]  # rows are not contiguous
    y = torch.randn(40, PARTS[-1].stop).to(dtype)
    rows = [torch.tensor([3]), torch.arange(5, 22), torch.tensor([0, 39, 24, 1, 30])]
    wanted = y
    groups = []
    for seed, own in enumerate(rows):
        weights = make_weights(rank, dtype, seed, dora)
        groups.append((kernels.pack(*weights), own))
        wanted = expected(wanted, x, own, *weights)
    joined = y.clone()
    prepared = kernels.prepare(groups)
    kernels.add(y, x, prepared)
    torch.testing.assert_close(y.double(), wanted, rtol=TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
    kernels.join([product for product, _ in groups])
    kernels.add(joined, x, prepared)
    assert torch.equal(joined, y)


def test_all_rows(kernels: LoRAKernels) -> None:
    x, y = torch.randn(70, INPUTS), torch.randn(70, PARTS[-1].stop)
    weights = make_weights(16, torch.float32, 0, dora=False)
    wanted = expected(y, x, None, *weights)
    prepared = kernels.prepare([(kernels.pack(*weights), None)])
    few, own = y[:7].clone(), x[:7]
    kernels.add(y, x, prepared)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-4)
    kernels.add(few, own, prepared)  # with another number of rows
    torch.testing.assert_close(few, y[:7])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_others(variant: str, dtype: torch.dtype) -> None:
    assert PATH is not None
    kernels = CompiledLoRA(library.Library(PATH, variant))
    torch.manual_seed(0)
    x, y = torch.randn(61, INPUTS).to(dtype), torch.randn(61, PARTS[-1].stop).to(dtype)
    product = kernels.pack(*make_weights(21, dtype, 0, dora=True))
    together = y.clone()
    kernels.add(together, x, kernels.prepare([(product, None)]))
    for row in range(len(x)):
        alone = y[row : row + 1].clone()
        kernels.add(alone, x[row : row + 1], kernels.prepare([(product, None)]))
        assert torch.equal(alone[0], together[row])
    few = y.clone()
    rows = torch.tensor([60, 2, 7, 8, 9])
    kernels.add(few, x, kernels.prepare([(product, rows)]))
    assert torch.equal(few[rows], together[rows])
    others = [row for row in range(61) if row not in rows.tolist()]
    assert torch.equal(few[others], y[others])
