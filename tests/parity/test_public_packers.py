"""Checkpoints packed by bitsandbytes, compressed-tensors and torchao, with random and trained weights, are the models
that transformers builds from their own dequantised weights. Needs the extra `packers`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from serve_llm.common.hub import resolve_model
from support.forward import Harness, load
from support.packed import HEADS, SIZES
from support.reference import reference_logprobs
from support.tiny import make_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]  # their warnings are not ours
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]


@pytest.fixture(params=["random", "demo"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    directory = tmp_path / "plain"
    if request.param == "demo":
        shutil.copytree(resolve_model("demo"), directory)
    else:
        sizes = SIZES[""] | HEADS | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
        make_checkpoint(directory, "llama", **sizes)
    return directory


def check(plain: Path, packed: Path, dequantise: Callable[[torch.nn.Module], Tensor | None], **how: Any) -> None:
    """Pack with transformers, write the dequantised weights to the plain checkpoint, and compare.

    dequantise: returns the weight of a module; None if it is not quantised.
    """
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, device_map="cpu", **how)
    save_plain(plain, model, dequantise)
    model.save_pretrained(packed)
    compare(plain, packed)


def save_plain(plain: Path, model: torch.nn.Module, dequantise: Callable[[torch.nn.Module], Tensor | None]) -> None:
    tensors = load_file(plain / "model.safetensors")
    found = {f"{name}.weight": dequantise(module) for name, module in model.named_modules()}
    whole = {name: weight.float().contiguous() for name, weight in found.items() if weight is not None}
    assert len(whole) > 10 and whole.keys() <= tensors.keys()
    save_file(tensors | whole, plain / "model.safetensors", metadata={"format": "pt"})


def compare(plain: Path, packed: Path) -> None:
    spec, decoder = load(packed)
    assert spec.grouped is not None
    (ours,) = Harness(spec, decoder, torch.float32).logprobs([PROMPT])
    assert (ours - reference_logprobs(plain, PROMPT)).abs().max() < 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
        {"load_in_8bit": True},
    ],
    ids=str,
)
def test_bitsandbytes(plain: Path, settings: dict[str, Any], tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    from transformers import BitsAndBytesConfig

    def dequantise(module: torch.nn.Module) -> Tensor | None:
        weight: Any = getattr(module, "weight", None)
        if type(weight).__name__ == "Params4bit":
            return functional.dequantize_4bit(weight.data, weight.quant_state).float()
        return weight.CB * weight.SCB[:, None] / 127 if type(weight).__name__ == "Int8Params" else None

    check(plain, tmp_path / "packed", dequantise, quantization_config=BitsAndBytesConfig(**settings))


@pytest.mark.parametrize("name", ["float8", "float8-rows", "int8", "int8-dynamic", "int4", "int3", "int8-int4"])
def test_torchao(plain: Path, name: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    rows, groups = quantization.PerRow(), quantization.PerGroup(32)
    configs: dict[str, Callable[[], object]] = {
        "float8": quantization.Float8WeightOnlyConfig,
        "float8-rows": lambda: quantization.Float8WeightOnlyConfig(granularity=rows),
        "int8": lambda: quantization.Int8WeightOnlyConfig(version=2),
        "int8-dynamic": lambda: quantization.Int8DynamicActivationInt8WeightConfig(version=2),
        "int4": lambda: quantization.IntxWeightOnlyConfig(torch.int4, groups),
        "int3": lambda: quantization.IntxWeightOnlyConfig(torch.int3, groups, quantization.MappingType.ASYMMETRIC),
        "int8-int4": lambda: quantization.Int8DynamicActivationIntxWeightConfig(torch.int4, groups),
    }

    def dequantise(module: torch.nn.Module) -> Tensor | None:
        weight = getattr(module, "weight", None)
        return weight.dequantize() if hasattr(weight, "qdata") else None

    check(plain, tmp_path / "packed", dequantise, quantization_config=TorchAoConfig(configs[name]()))


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "W8A16", "FP8_DYNAMIC", "MXFP4A16", "W4AFP8"])
def test_compressed_tensors(plain: Path, scheme: str, tmp_path: Path) -> None:
    """Scales come from the largest and smallest weights."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors import quantization
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    groups = {"group_0": quantization.preset_name_to_scheme(scheme, ["Linear"])}
    chosen = quantization.QuantizationConfig(config_groups=groups, ignore=["lm_head"])
    quantization.apply_quantization_config(model, chosen)

    def quantise(module: torch.nn.Module) -> Tensor | None:
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or scheme.weights is None:
            return None
        numbers, weight = scheme.weights, module.weight.detach()
        parts = weight.unflatten(-1, (-1, numbers.group_size or weight.shape[-1]))
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), numbers)
        module.weight_scale.data.copy_(scale)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero)
        module.quantization_status = quantization.QuantizationStatus.FROZEN
        return fake_quantize(weight, scale, zero, numbers)

    save_plain(plain, model, quantise)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "packed")
    compressor.update_config(tmp_path / "packed")
    compare(plain, tmp_path / "packed")
