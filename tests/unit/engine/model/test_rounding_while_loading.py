"""Layers rounded while they load: merged layers become what their concatenated weights would, without a copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_llm.engine.model.build import ModelBuilder, WeightSlice
from serve_llm.engine.model.quantization_spec import FLOAT8, GroupQuantForm, GroupQuantSpec, Int8Spec
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.quantization import fp8, int4
from serve_llm.kernels.linear_grouped import GroupQuantWeight
from serve_llm.kernels.quantise_int4 import quantise_int4
from serve_llm.kernels.quantise_int8 import quantise_int8
from serve_llm.kernels.registry import PORTABLE
from support.tiny import config_of

OUTPUTS = {"gate": 9, "up": 5}
INPUTS = 70


class Recorder:
    """A builder's loader and kernels: what was loaded, rounded and packed."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.weights = {
            f"{name}.weight": torch.randn(size, INPUTS, generator=generator) for name, size in OUTPUTS.items()
        }
        self.rounded: list[int] = []  # addresses
        self.packed: list[Any] = []

    def load(
        self, name: str, shape: tuple[int, ...], part: WeightSlice | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return self.weights[name]

    def round_int8(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        self.rounded.append(weight.data_ptr())
        return quantise_int8(weight)

    def round_int4(self, weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
        self.rounded.append(weight.data_ptr())
        return quantise_int4(weight, group_size)

    def pack(self, *given: Any) -> Any:
        self.packed.append(given)
        return lambda x: x

    def builder(self, **forms: Any) -> ModelBuilder:
        kernels = replace(
            PORTABLE,
            quantise_int8=self.round_int8,
            quantise_int4=self.round_int4,
            pack_int8=self.pack,
            pack_grouped=self.pack,
        )
        spec, _ = read_model(config_of("llama"))
        return ModelBuilder(self.load, kernels, build_shard(spec, ParallelLayout(), 0), ProcessGroups(), **forms)

    def build(self, names: tuple[str, ...], **forms: Any) -> Any:
        """What is packed for one layer of these weights."""
        outputs = {name: OUTPUTS[name] for name in names}
        shares = {name: range(size) for name, size in outputs.items()}
        self.builder(**forms).column_parallel_linear(outputs, INPUTS, shares)
        return self.packed[-1]


@pytest.mark.parametrize("names", [("gate",), ("gate", "up")])
def test_int8(names: tuple[str, ...]) -> None:
    recorder = Recorder()
    numbers, scales, _ = recorder.build(names, int8=Int8Spec(in_checkpoint=False))
    weights = [recorder.weights[f"{name}.weight"] for name in names]
    wanted, wanted_scales = quantise_int8(torch.cat(weights))
    assert torch.equal(numbers, wanted) and torch.equal(scales, wanted_scales)
    assert recorder.rounded == [weight.data_ptr() for weight in weights]


@pytest.mark.parametrize("form", [GroupQuantForm(4, 32, has_zeros=True), FLOAT8])
@pytest.mark.parametrize("names", [("gate",), ("gate", "up")])
def test_weights_in_groups(names: tuple[str, ...], form: GroupQuantForm) -> None:
    recorder = Recorder()
    packed, *_ = recorder.build(names, grouped=GroupQuantSpec(in_checkpoint=False, default=form))
    assert isinstance(packed, GroupQuantWeight)
    weights = [recorder.weights[f"{name}.weight"] for name in names]
    whole = torch.cat(weights)
    wanted = fp8.quantise_codes(whole) if form.is_float8 else int4.quantise(whole, form.group_size)
    assert packed.is_like(wanted)
    assert torch.equal(packed.codes, wanted.codes) and torch.equal(packed.dequantise(), wanted.dequantise())
    if not form.is_float8:
        assert recorder.rounded == [weight.data_ptr() for weight in weights]
