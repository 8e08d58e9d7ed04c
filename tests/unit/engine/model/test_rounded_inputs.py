"""Which fp8 formats say that the inputs of linear modules are rounded to 8 bits too, and with which scales."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.quantization_config import read_quantization_config
from serve_llm.engine.model.weight_format import Inputs, MarkedModules, ScaledNumbers, TargetedModules
from serve_llm.engine.weights.files import Checkpoint
from serve_llm.engine.weights.quantised import ModuleReader
from serve_llm.engine.weights.quantised_modules import read_module
from support.packed_floats import CONFIGS, FLOAT8


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("fp8-tensor", "static"),
        ("fp8-channel", "dynamic"),
        ("fp8-block", "as they are"),
        ("fp8-native", "dynamic"),
        ("autofp8", "static"),
        ("fbgemm", "dynamic"),
        ("modelopt-fp8", "static"),
        ("torchao-fp8", "as they are"),
        ("torchao-fp8-dynamic", "dynamic"),
    ],
)
def test_what_formats_say(form: str, expected: Inputs) -> None:
    stored = find(CONFIGS[form])
    assert stored.inputs == expected and stored.form.rounds_inputs == (expected != "as they are")


@pytest.mark.parametrize(
    ("activations", "expected"),
    [
        (FLOAT8 | {"dynamic": True, "strategy": "group", "group_size": 128}, "dynamic"),
        (FLOAT8 | {"dynamic": "local", "strategy": "tensor"}, "dynamic"),
        (FLOAT8 | {"symmetric": False}, "as they are"),
        (FLOAT8 | {"num_bits": 4}, "as they are"),
        (FLOAT8 | {"type": "int", "dynamic": True, "strategy": "token"}, "as they are"),
    ],
)
def test_other_activations_of_compressed_tensors(activations: dict[str, object], expected: Inputs) -> None:
    config = CONFIGS["fp8-channel"]
    group = config["config_groups"]["group_0"] | {"input_activations": activations}
    assert find(config | {"config_groups": {"group_0": group}}).inputs == expected


def find(config: dict[str, object]) -> ScaledNumbers:
    reader = ConfigReader({"quantization_config": config}).require("quantization_config")
    modules = read_quantization_config(reader)
    assert isinstance(modules, MarkedModules | TargetedModules)
    found = modules.find_format("model.layers.0.mlp.up_proj")
    assert isinstance(found, ScaledNumbers)
    return found


STATIC = ScaledNumbers("fp8", "tensor", inputs="static")


@pytest.mark.parametrize(
    ("stored", "more", "expected"),
    [
        (STATIC, {"input_scale": torch.tensor([0.5])}, 0.5),
        (STATIC, {"activation_scale": torch.tensor(0.25, dtype=torch.bfloat16)}, 0.25),
        (STATIC, {}, None),
        (STATIC, {"input_scale": torch.tensor([0.0])}, None),
        (STATIC, {"input_scale": torch.tensor([torch.nan])}, None),
        (STATIC, {"input_scale": torch.ones(4)}, None),
        (replace(STATIC, inputs="dynamic"), {"input_scale": torch.tensor([0.5])}, None),
        (replace(STATIC, inputs="as they are"), {"input_scale": torch.tensor([0.5])}, None),
    ],
)
def test_scales_of_inputs(
    stored: ScaledNumbers, more: dict[str, torch.Tensor], expected: float | None, tmp_path: Path
) -> None:
    numbers = torch.ones(8, 16).to(torch.float8_e4m3fn)
    tensors = {"weight": numbers, "weight_scale": torch.ones(1)} | more
    save_file({f"up.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    reader = ModuleReader(Checkpoint(tmp_path), "up", lambda tensor: tensor)
    matrix = read_module(reader, stored, (8, 16), range(2, 6), range(16))
    assert matrix.rounds_inputs == (stored.inputs != "as they are")
    assert (None if matrix.input_scale is None else float(matrix.input_scale)) == expected
    assert matrix.input_scale is None or (matrix.input_scale.shape, matrix.input_scale.dtype) == ((), torch.float32)
