"""All experts in one launch, in the interpreter against the reference; compiled, they fit an H200 and use its tensor
cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from reference import activation as reference_activation
from reference import linear as reference_linear
from reference import moe as reference
from serve_llm.engine.quantization import int4
from serve_llm.kernels import activation, linear
from support.experts import make_case
from support.triton import NO_TRITON, assert_fits, compile_for, record

pytest.importorskip("triton", reason=NO_TRITON)
from serve_llm.kernels.triton.linear_grouped import pack_grouped
from serve_llm.kernels.triton.moe import pack_experts


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.TorchLinear:
    """Pack as on a GPU."""
    return linear.TorchLinear(weight, bias)


@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "own"),
    [
        (1, 5, 2, range(5)),
        (9, 5, 5, range(5)),
        (40, 3, 2, range(3)),  # 27 rows per expert on average, in blocks of 32
        (90, 2, 1, range(2)),
        (9, 7, 3, range(2, 5)),
        (9, 7, 3, range(6, 7)),
        (9, 7, 3, range(7, 7)),
        (0, 5, 2, range(5)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_the_reference(tokens: int, experts: int, chosen: int, own: range, dtype: torch.dtype) -> None:
    case = make_case(tokens, experts, chosen, 40, 19, dtype, bias=tokens == 9)
    asked = case.x, case.weights, case.experts
    right = reference.pack_experts(case.pairs(own, reference_linear.pack), reference_activation.silu_and_mul, own)
    found = pack_experts(case.pairs(own, pack), activation.silu_and_mul, own)(*asked)
    case.check(found, right(*asked))


def test_one_expert_takes_all() -> None:
    case = make_case(70, 6, 1, 40, 19, torch.float32)
    case.experts.fill_(4)
    asked = case.x, case.weights, case.experts
    right = reference.pack_experts(
        case.pairs(range(6), reference_linear.pack), reference_activation.silu_and_mul, range(6)
    )
    found = pack_experts(case.pairs(range(6), pack), activation.silu_and_mul, range(6))(*asked)
    case.check(found, right(*asked))


def pack_integers(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Linear:
    """Pack in 4 bits, as on a GPU."""
    return pack_grouped(int4.quantise(weight, 8), bias, weight.dtype)


@pytest.mark.parametrize("pack_layer", [pack, pack_integers])
def test_experts_take_each_others_place(pack_layer: Callable[..., linear.Linear]) -> None:
    case = make_case(9, 4, 1, 40, 24, torch.float32, bias=True)
    packed = pack_experts(case.pairs(range(4), pack_layer), activation.silu_and_mul, range(4))
    held = packed.list_local_experts()
    assert len({one.form for one in held}) == 1 and all(one.is_compiled for one in held)
    before = packed(case.x, case.weights, torch.full_like(case.experts, 2))
    for target, source in zip(held[0].tensors, held[2].tensors, strict=True):
        target.view(-1).view(torch.uint8).copy_(source.view(-1).view(torch.uint8))
    assert torch.equal(packed(case.x, case.weights, torch.full_like(case.experts, 0)), before)


def test_a_rows_bits_are_its_own_where_they_have_to_be() -> None:
    case = make_case(90, 3, 2, 40, 19, torch.float32)
    packed = pack_experts(case.pairs(range(3), pack), activation.silu_and_mul, range(3), batch_invariant=True)
    whole = packed(case.x, case.weights, case.experts)
    for rows in (slice(0, 1), slice(1, 90), slice(40, 57)):
        assert torch.equal(packed(case.x[rows], case.weights[rows], case.experts[rows]), whole[rows])


def test_layers_in_8_bits_are_computed_one_by_one() -> None:
    case = make_case(9, 4, 2, 40, 19, torch.float32)
    asked = case.x, case.weights, case.experts
    pairs = [(partial(first), partial(last)) for first, last in case.pairs(range(4), pack)]  # of no known kind
    found = pack_experts(iter(pairs), activation.silu_and_mul, range(4))(*asked)
    case.check(found, pack_experts(case.pairs(range(4), pack), activation.silu_and_mul, range(4))(*asked))


@pytest.mark.slow
def test_compiled() -> None:
    """Uses the sizes of Mixtral and Qwen3-30B-A3B, and a part of the latter that is not divisible by any power of
    two."""

    def launch(tokens: int, experts: int, chosen: int, width: int, inner: int, dtype: torch.dtype) -> None:
        def weight(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        pair = pack(weight(2 * inner, width), None), pack(weight(width, inner), None)
        packed = pack_experts([pair] * experts, lambda rows: rows[:, :inner].contiguous(), range(experts))
        numbers = torch.zeros((tokens, chosen), dtype=torch.int64, device="meta")
        packed(weight(tokens, width), torch.empty((tokens, chosen), device="meta"), numbers)

    sizes = [(1, 128, 8, 2048, 768), (4096, 8, 2, 4096, 14336), (64, 128, 8, 2048, 250)]
    launches = record(lambda: [launch(*size, torch.bfloat16) for size in sizes])
    exact = record(lambda: launch(64, 8, 2, 1024, 3584, torch.float32))
    found = compile_for(launches + exact)
    assert_fits(found)
    products = [each for each in found[: len(launches)] if each.launch.kernel.name == "_multiply_experts"]
    assert len(products) == 6
    for product in products:
        assert product.has_wgmma if product.launch.constexprs["ROWS"] >= 64 else product.has_mma
