"""What the parts of a model are built with: their weights by name, and the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from serve_llm.engine.model.spec import Norm
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.table import Kernels

Load = Callable[[str, tuple[int, ...]], Tensor]  # parameter name, shape -> tensor of the model's dtype on its device
RowWise = Callable[[Tensor], Tensor]  # (rows, width) -> (rows, other width)


@dataclass(frozen=True)
class Builder:
    load: Load  # what it returns is not to be kept: it may be part of a mapped file
    kernels: Kernels
    prefix: str = ""

    def within(self, name: str) -> Builder:
        """A builder whose names start with this builder's prefix and `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A parameter that is used as it is."""
        return self.load(self.prefix + name, shape).clone(memory_format=torch.contiguous_format)

    def linear(self, outputs: dict[str, int], inputs: int, *, bias: bool = False) -> Linear:
        """One product for several parameters over the same input: their outputs stand side by side, in this order."""

        def joined(kind: str, *shape: int) -> Tensor:
            return torch.cat([self.load(f"{self.prefix}{name}.{kind}", (n, *shape)) for name, n in outputs.items()])

        return self.kernels.pack(joined("weight", inputs), joined("bias") if bias else None)

    def norm(self, name: str, spec: Norm, width: int) -> RowWise:
        eps, kernels = spec.eps, self.kernels
        if spec.kind == "rms":
            scale = self.tensor(f"{name}.weight", width)
            return lambda x: kernels.rms_norm(x, scale, eps)
        weight = self.tensor(f"{name}.weight", width) if spec.affine else None
        bias = self.tensor(f"{name}.bias", width) if spec.affine else None
        return lambda x: kernels.layer_norm(x, weight, bias, eps)
