"""The Muon optimiser: momentum with matrix updates orthogonalised by a few Newton-Schulz iterations.

Only for the two-dimensional weights of the layers; embeddings and norms use AdamW. Used only by train_demo.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

# The quintic iteration of Keller Jordan's Muon drives every singular value into about [0.7, 1.2] in five steps.
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, num_iterations: int = 5) -> Tensor:
    """Replace the singular values of each matrix in (count, rows, columns) by roughly one."""
    a, b, c = QUINTIC
    x = matrices.bfloat16()
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum. Matrices of equal shape are processed as one batch."""

    def __init__(self, parameters: Iterable[Tensor], learning_rate: float, momentum: float, weight_decay: float):
        super().__init__(parameters, {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[tuple(parameter.shape)].append(parameter)
            for shape, parameters in by_shape.items():
                updates = torch.stack([self._momentum_update(parameter, group) for parameter in parameters])
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, orthogonalise(updates), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * scale)

    def _momentum_update(self, parameter: Tensor, group: dict) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
        return parameter.grad.lerp(state["momentum"], group["momentum"])
