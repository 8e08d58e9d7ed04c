"""Random experts, and tokens routed to them, for tests of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """first: (experts, 2 * inner, width), last: (experts, width, inner), with biases where there are any."""

    x: Tensor
    weights: Tensor
    experts: Tensor
    first: Tensor
    last: Tensor
    biases: tuple[Tensor, Tensor] | None

    def pairs(self, own: range, pack: Callable[..., Any]) -> Iterator[tuple[Any, Any]]:
        first, last = self.biases or (len(self.first) * [None], len(self.last) * [None])
        return ((pack(self.first[n], first[n]), pack(self.last[n], last[n])) for n in own)

    def check(self, found: Tensor, expected: Tensor) -> None:
        """Check a result. Its values have a magnitude of about 1."""
        tolerance = 2e-5 if self.x.dtype == torch.float32 else 3e-2
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def make_case(
    tokens: int, experts: int, chosen: int, width: int, inner: int, dtype: torch.dtype, bias: bool = False
) -> Case:
    generator = torch.Generator().manual_seed(tokens + experts)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    scores, numbers = random(tokens, experts).topk(chosen)
    return Case(
        x=random(tokens, width).to(dtype),
        weights=scores.softmax(-1),
        experts=numbers,
        first=(random(experts, 2 * inner, width) * width**-0.5).to(dtype),
        last=(random(experts, width, inner) * inner**-0.5).to(dtype),
        biases=(random(experts, 2 * inner).to(dtype), random(experts, width).to(dtype)) if bias else None,
    )
