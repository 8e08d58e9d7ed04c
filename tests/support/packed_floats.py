"""Checkpoints of 8-bit floats, int8, NVFP4 and bitsandbytes, written from the descriptions of their formats.

Each comes with the same weights in floating point, as numbers that transformers reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.packed import HEADS, SIZES
from support.quantised import is_linear
from support.tiny import make_checkpoint

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.tensor([-1.0, -0.7, -0.5, -0.4, -0.3, -0.2, -0.1, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0])
Packed = tuple[dict[str, Tensor], Tensor]  # suffix -> tensor of one module, and the weight that they stand for


def _compressed(stored: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
    }


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
STATIC = {"strategy": "tensor"}
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8-tensor": _compressed("float-quantized", FLOAT8 | STATIC, FLOAT8 | STATIC),
    "fp8-channel": _compressed(
        "float-quantized", FLOAT8 | {"strategy": "channel"}, FLOAT8 | {"strategy": "token", "dynamic": True}
    ),
    "fp8-block": _compressed("float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [24, 40]}, None),
    "fp8-native": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]},
    "autofp8": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "fp8-ministral": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    | {"dequantize": False, "modules_to_not_convert": ["lm_head"]},
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    "int8-static": _compressed("int-quantized", INT8 | {"strategy": "channel"}, INT8 | STATIC),
    "int8-weights": _compressed("int-quantized", INT8 | STATIC, None),
    "int8-asymmetric": _compressed("int-quantized", INT8 | {"symmetric": False, "strategy": "channel"}, None),
    "int4-in-bytes": _compressed(
        "int-quantized",
        INT8 | {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 16},
        FLOAT8 | {"strategy": "token", "dynamic": True},
    ),
    "nvfp4": _compressed(
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
    ),
    "modelopt-fp8": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    "modelopt-nvfp4": {"quant_method": "modelopt", "producer": {"name": "modelopt"}}
    | {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    | {"bnb_4bit_compute_dtype": "bfloat16", "_load_in_4bit": True},
    "nf4-nested": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    | {"bnb_4bit_use_double_quant": True},
    "bitsandbytes-int8": {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0},
}


def pack_module(weight: Tensor, form: str) -> Packed:
    outputs, inputs = weight.shape
    if form in ("fp8-tensor", "autofp8", "fp8-ministral", "modelopt-fp8"):
        scale = weight.abs().max().reshape(1 if form == "fp8-tensor" else ()) / 448
        numbers = (weight / scale).to(torch.float8_e4m3fn)
        if form == "fp8-ministral":
            stored = {"weight_scale_inv": scale, "activation_scale": torch.tensor(0.1)}
        else:
            stored = {"weight_scale": scale, "input_scale": torch.tensor([0.1])}
        return {"weight": numbers, **stored}, numbers.float() * scale
    if form in ("fp8-channel", "fbgemm"):
        scale = weight.abs().amax(1, keepdim=True) / 448
        numbers = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale
    if form in ("fp8-block", "fp8-native"):
        scale = torch.rand(-(-outputs // 24), -(-inputs // 40)) * 0.001 + 0.002
        whole = scale.repeat_interleave(24, 0)[:outputs].repeat_interleave(40, 1)[:, :inputs]
        numbers = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        name = "weight_scale" if form == "fp8-block" else "weight_scale_inv"
        return {"weight": numbers, name: scale}, numbers.float() * whole
    if form in ("int4-in-bytes", "int8-asymmetric"):
        size, lowest, highest = (16, -8, 7) if form == "int4-in-bytes" else (inputs, -128, 127)
        groups = weight.view(outputs, -1, size)
        scale = (groups.amax(-1) - groups.amin(-1)) / (highest - lowest)
        zeros = (lowest - groups.amin(-1) / scale).round().clamp(lowest, highest).to(torch.int8)
        integers = (groups / scale.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(lowest, highest)
        stored = {"weight": integers.flatten(1).to(torch.int8), "weight_scale": scale, "weight_zero_point": zeros}
        return stored, ((integers - zeros.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(1)
    if form.startswith(("int8", "bits")):
        scale = (weight.abs().amax() if form == "int8-weights" else weight.abs().amax(1, keepdim=True)) / 127
        integers = (weight / scale).round().to(torch.int8)
        if form == "bitsandbytes-int8":
            stored = {"weight": integers, "SCB": scale.flatten() * 127, "weight_format": torch.tensor(0).byte()}
            return stored, integers.float() * scale
        return {"weight": integers, "weight_scale": scale.reshape(-1, 1)}, integers.float() * scale
    if form in ("nvfp4", "modelopt-nvfp4"):
        whole_scale = torch.tensor([448 * 6 / float(weight.abs().max())])
        groups = weight.view(outputs, -1, 16)
        scale = (groups.abs().amax(-1) / 6 * whole_scale).to(torch.float8_e4m3fn)
        factors = (scale.float() / whole_scale).unsqueeze(-1)
        codes = ((groups / factors).unsqueeze(-1) - E2M1).abs().argmin(-1)
        packed = (codes[..., ::2] | codes[..., 1::2] << 4).flatten(1).byte()
        if form == "modelopt-nvfp4":
            stored = {"weight": packed, "weight_scale_2": 1 / whole_scale.reshape(()), "input_scale": torch.tensor(0.1)}
            return stored | {"weight_scale": scale}, (E2M1[codes] * factors).flatten(1)
        tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": whole_scale}
        return tensors | {"input_global_scale": torch.ones(1)}, (E2M1[codes] * factors).flatten(1)
    return _pack_nf4(weight, is_nested=form == "nf4-nested")


def _pack_nf4(weight: Tensor, is_nested: bool) -> Packed:
    count = weight.numel()
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -count % 32)).view(-1, 32)
    absmax = blocks.abs().amax(-1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors: dict[str, Tensor] = {"weight.quant_map": NF4.clone(), "weight.absmax": absmax}
    if is_nested:
        offset = float(absmax.mean())
        values = torch.linspace(-1, 1, 256)
        outer = torch.stack([part.abs().max() for part in (absmax - offset).split(8)])
        relative = (absmax - offset) / outer.repeat_interleave(8)[: len(absmax)]
        indices = (relative.unsqueeze(-1) - values).abs().argmin(-1)
        absmax = values[indices] * outer.repeat_interleave(8)[: len(absmax)] + offset
        tensors |= {"weight.absmax": indices.byte(), "weight.nested_absmax": outer, "weight.nested_quant_map": values}
        state |= {"nested_blocksize": 8, "nested_offset": offset, "nested_dtype": "float32"}
    codes = ((blocks / absmax.unsqueeze(-1)).unsqueeze(-1) - NF4).abs().argmin(-1).flatten()
    packed = torch.nn.functional.pad(codes[:count], (0, count % 2))
    tensors["weight"] = (packed[::2] << 4 | packed[1::2]).byte().unsqueeze(1)
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors, (NF4[codes].view(-1, 32) * absmax.unsqueeze(-1)).flatten()[:count].view(weight.shape)


def make_packed(
    directory: Path, family: str, form: str, choose: Callable[[str], bool] = is_linear, **overrides: Any
) -> int:
    """Write a random model to directory/packed, and the same numbers in float32 to directory/plain. Returns the
    vocabulary's size. form: one of CONFIGS. choose: which tensors are packed. overrides: see `make_checkpoint`."""
    sizes = SIZES.get(family, {**SIZES[""], **HEADS}) | overrides
    vocab_size = make_checkpoint(directory / "plain", family, **sizes)
    pack_checkpoint(directory, form, choose)
    return vocab_size


def pack_checkpoint(directory: Path, form: str, choose: Callable[[str], bool] = is_linear) -> None:
    """Write the model in directory/plain to directory/packed, and round the former likewise. See `make_packed`."""
    tensors = load_file(directory / "plain" / "model.safetensors")
    stored = {}
    for name in sorted(tensors):
        if not choose(name):
            stored[name] = tensors[name]
            continue
        packed, tensors[name] = pack_module(tensors[name].float(), form)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
    if "kv_cache_scheme" in CONFIGS[form]:
        stored |= {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in "kv"}
    (directory / "packed").mkdir()
    save_file(tensors, directory / "plain" / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, directory / "packed" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "plain" / "config.json").read_text())
    stored_config = json.dumps(config | {"quantization_config": CONFIGS[form]})
    (directory / "packed" / "config.json").write_text(stored_config)
