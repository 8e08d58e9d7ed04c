"""What the parts of a model are built with: their weights by name, this rank's share of them, and the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from serve_llm.engine.errors import ModelError
from serve_llm.engine.model import norm
from serve_llm.engine.model.dispatch import Dispatch
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import Int8, Norm
from serve_llm.engine.parallel.comm import Neighbours
from serve_llm.engine.quant import fp8, int8
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.table import Kernels

RowWise = Callable[[Tensor], Tensor]  # (rows, width) -> (rows, other width)


class Part(NamedTuple):
    """Consecutive entries of a parameter's rows (dimension 0) or columns (1); may be none."""

    dimension: int
    own: range


def in_float32(name: str) -> bool:
    """Whether the parameter is float32 whatever the model's dtype."""
    return name.endswith(("_scale", ".correction", ".sinks"))


class Load(Protocol):
    """Reads parameters."""

    def __call__(
        self, name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The parameter of this name, or only a part of it, on the model's device and of `dtype`, by default the
        model's, but that int8 weights are int8, and float32 is what `in_float32` says.

        shape: of the whole parameter, (outputs, inputs) or (outputs,). What is returned is not to be written: it may be
        part of a mapped file, and whoever keeps it keeps the file mapped.
        """


@dataclass(frozen=True)
class Builder:
    load: Load
    kernels: Kernels
    shard: Shard
    neighbours: Neighbours
    int8: Int8 | None = None
    fp8: bool = False  # of all products; not beside int8
    prefix: str = ""
    dispatches: list[Dispatch] = field(default_factory=list)  # of all layers that have been built, in their order

    def within(self, name: str) -> Builder:
        """A builder whose names start with this builder's prefix and `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def tensor(self, name: str, *shape: int, part: Part | None = None) -> Tensor:
        """A parameter that is used as it is. shape: of the whole."""
        return self.load(self.prefix + name, shape, part).clone(memory_format=torch.contiguous_format)

    def table(self, name: str, *shape: int, part: Part | None = None) -> Tensor:
        """A parameter of which single rows are used: it stays in the mapped file if it is stored as the model wants it,
        so that only those rows take memory. shape: of the whole."""
        return self.load(self.prefix + name, shape, part)

    def linear(self, name: str, outputs: int, inputs: int) -> Linear:
        """A product that every rank computes in whole."""
        return self.columns({name: outputs}, inputs, {name: range(outputs)})

    def plain(self, outputs: Mapping[str, int], inputs: int, *, wide: bool = False, bias: bool = False) -> Linear:
        """A product of several parameters, side by side, that every rank computes in whole and in the model's dtype, or
        in float32 and of such rows if it is `wide`."""
        weights = [self.load(f"{self.prefix}{name}.weight", (count, inputs)) for name, count in outputs.items()]
        weights = [weight.float() if wide else weight for weight in weights]
        added = torch.cat([self.tensor(f"{name}.bias", count) for name, count in outputs.items()]) if bias else None
        return self.kernels.pack(weights[0], added, weights[1:])

    def columns(
        self, outputs: Mapping[str, int], inputs: int, own: Mapping[str, range], *, bias: bool = False
    ) -> Linear:
        """Column-parallel (Megatron-LM, arXiv:1909.08053): of each parameter's outputs those in `own`.

        One product for several parameters over the same input: their outputs stand side by side, in this order.
        """

        def parts(kind: str, *shape: int) -> list[Tensor]:
            return [
                self.load(f"{self.prefix}{name}.{kind}", (count, *shape), Part(0, own[name]))
                for name, count in outputs.items()
            ]

        def joined(kind: str, *shape: int) -> Tensor:
            return torch.cat(parts(kind, *shape))

        return self._packed(
            outputs, parts("weight", inputs), lambda: joined("weight_scale", 1), joined("bias") if bias else None
        )

    def rows(self, name: str, outputs: int, inputs: int, own: range, *, bias: bool = False) -> RowWise:
        """Row-parallel: takes the inputs in `own` only, (rows, len(own)), and sums what all ranks of the stage have."""
        return self.summed(self.addend(name, outputs, inputs, own, bias=bias))

    def spread(self, dispatch: Dispatch) -> Dispatch:
        """Experts that the decoder must also call in steps without tokens."""
        self.dispatches.append(dispatch)
        return dispatch

    def summed(self, addend: RowWise) -> RowWise:
        """The sum of what all ranks of the stage compute."""
        group = self.neighbours.tensor
        if group.size == 1:
            return addend
        return lambda x: group.all_reduce(addend(x))

    def addend(
        self, name: str, outputs: int, inputs: int, own: range, *, bias: bool = False, alone: bool = False
    ) -> Linear:
        """This rank's share of a row-parallel product, to be summed.

        The bias belongs to the first rank's share, so that one rank alone computes what it would without a group; or to
        this rank's, if it is `alone` in having a share.
        """
        weight = self.load(f"{self.prefix}{name}.weight", (outputs, inputs), Part(1, own))
        is_first = alone or self.shard.place == 0
        all_or_none = Part(0, range(outputs if is_first else 0))
        added = self.tensor(f"{name}.bias", outputs, part=all_or_none) if bias else None
        return self._packed(
            (name,), [weight], lambda: self.tensor(f"{name}.weight_scale", outputs, 1), added if is_first else None
        )

    def _packed(
        self, names: Iterable[str], weights: Sequence[Tensor], scale: Callable[[], Tensor], bias: Tensor | None
    ) -> Linear:
        """The product in the layout and the numbers that it is computed in. weights: whose outputs follow each other.
        scale: reads what is stored with int8 weights; (outputs, 1) float32."""
        if self.fp8:
            return self.kernels.pack_fp8(*fp8.quantise(torch.cat(tuple(weights))), bias)
        taken = {name: self.int8 is not None and self.int8.takes(self.prefix + name) for name in names}
        if len(set(taken.values())) > 1:
            apart = ", ".join(
                f"{self.prefix}{name} is {'int8' if is_int8 else 'not'}" for name, is_int8 in taken.items()
            )
            raise ModelError(f"config.json: quantization_config: {apart}; all of one product must be alike")
        if self.int8 is None or not all(taken.values()):
            return self.kernels.pack(weights[0], bias, weights[1:])
        weight = torch.cat(tuple(weights))
        if self.int8.stored:
            return self.kernels.pack_int8(weight, scale(), bias)
        return self.kernels.pack_int8(*int8.quantise(weight), bias)

    def rms_weight(self, name: str, spec: Norm, width: int) -> Tensor:
        """Of the rms norm of this name, in the dtype that says where `kernels.norm.rms_norm` rounds."""
        dtype = torch.float32 if spec.wide else None
        return self.load(f"{self.prefix}{name}.weight", (width,), dtype=dtype).clone()

    def norm(self, name: str, spec: Norm, width: int) -> norm.Norm:
        if spec.kind == "rms":
            return norm.RmsNorm(self.rms_weight(name, spec, width), spec.eps, self.kernels)
        weight = self.tensor(f"{name}.weight", width) if spec.affine else None
        bias = self.tensor(f"{name}.bias", width) if spec.has_bias else None
        return norm.LayerNorm(weight, bias, spec.eps, self.kernels)
