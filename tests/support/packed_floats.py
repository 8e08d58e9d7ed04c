"""Checkpoints in fp8, int8, NVFP4 and bitsandbytes formats, written from the descriptions of the formats.

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

from support.packed import HEADS, SIZES, pack_awq_words, pack_words
from support.quantised import is_linear
from support.tiny import make_checkpoint

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NF4 = torch.tensor([-1.0, -0.7, -0.5, -0.4, -0.3, -0.2, -0.1, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0])
Packed = tuple[dict[str, Tensor], Tensor]  # suffix -> tensor of one module, and the weight that they represent


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


def _torchao(kind: str, **settings: Any) -> dict[str, Any]:
    data = {
        key: {"_type": value[0], "_data": value[1]} if isinstance(value, tuple) else value
        for key, value in settings.items()
    }
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}},
        "include_input_output_embeddings": False,
        "modules_to_not_convert": None,
        "untie_embedding_weights": False,
    }


def _quark(dtype: str, scheme: str, pack_method: str = "reorder", **change: Any) -> dict[str, Any]:
    spec = {"dtype": dtype, "qscheme": scheme, "ch_axis": None, "group_size": None, "symmetric": True}
    spec |= {"is_dynamic": False, "round_method": "half_even", "scale_type": "float", "scale_format": None}
    spec |= {"scale_calculation_mode": None, "mx_element_dtype": None, "observer_cls": "PerTensorMinMaxObserver"}
    spec |= {"is_scale_quant": False, **change}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": spec, "input_tensors": spec | {"is_dynamic": True}}
        | {"output_tensors": None, "bias": None, "target_device": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head", "*.gate", "re:.*router"],
        "export": {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": pack_method}
        | {"weight_format": "real_quantized", "weight_merge_groups": None},
        "algo_config": [{"name": "awq", "scaling_layers": []}],
        "softmax_quant_spec": None,
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "quant_mode": "eager_mode",
        "version": "0.11",
    }


ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
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
    "nf4-bfloat16": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    | {"bnb_4bit_quant_storage": "bfloat16"},
    "nf4-of-cpu": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "mxfp4": _compressed(
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
        | {"scale_dtype": "torch.uint8"},
        None,
    ),
    "mxfp8": _compressed(
        "mxfp8-quantized",
        FLOAT8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        FLOAT8 | {"strategy": "group", "group_size": 32, "dynamic": True},
    ),
    "modelopt-mxfp8": {"quant_method": "modelopt", "producer": {"name": "modelopt"}}
    | {"quantization": {"quant_algo": "MXFP8", "group_size": 32, "exclude_modules": ["lm_head"]}},
    "quark-fp8": _quark("fp8_e4m3", "per_tensor"),
    "quark-fp8-channel": _quark("fp8_e4m3", "per_channel", ch_axis=0),
    "quark-fp8-group": _quark("fp8_e4m3", "per_group", ch_axis=-1, group_size=16),
    "quark-mxfp4": _quark("fp4", "per_group", ch_axis=-1, group_size=32, symmetric=None, scale_format="e8m0"),
    "quark-mxfp8": _quark("fp8_e4m3", "per_group", ch_axis=-1, group_size=32, scale_format="e8m0"),
    "quark-int8": _quark("int8", "per_channel", ch_axis=0),
    "quark-int4": _quark("int4", "per_group", ch_axis=-1, group_size=16),
    "quark-uint4": _quark("uint4", "per_group", ch_axis=1, group_size=16, symmetric=False, pack_method="order"),
    "torchao-fp8": _torchao("Float8WeightOnlyConfig", weight_dtype=("torch.dtype", "float8_e4m3fn"), granularity=ROW),
    "torchao-fp8-dynamic": _torchao(
        "Float8DynamicActivationFloat8WeightConfig",
        activation_dtype=("torch.dtype", "float8_e4m3fn"),
        granularity=[{"_type": "PerTensor", "_version": 1, "_data": {}}] * 2,
        packing_format=("Float8PackingFormat", "PLAIN"),
    ),
    "torchao-int8": _torchao("Int8WeightOnlyConfig", granularity=ROW, group_size=None),
    "torchao-int4-in-bytes": _torchao(
        "Int8DynamicActivationIntxWeightConfig",
        weight_dtype=("torch.dtype", "int4"),
        weight_granularity={"_type": "PerGroup", "_version": 1, "_data": {"group_size": 16}},
        weight_mapping_type=("MappingType", "ASYMMETRIC"),
        intx_packing_format=("IntxPackingFormat", "UNPACKED_TO_INT8"),
    ),
    "torchao-int4": _torchao(
        "Int4WeightOnlyConfig",
        group_size=32,
        int4_packing_format=("Int4PackingFormat", "PLAIN"),
        set_inductor_config=True,
    ),
    "bitsandbytes-int8": {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0},
    "fp8-128": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
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
    if form.startswith("torchao"):
        return _pack_torchao(weight, form)
    if form.startswith("quark"):
        return _pack_quark(weight, form)
    if form in ("mxfp8", "modelopt-mxfp8"):
        groups = weight.view(outputs, -1, 32)
        exponents = (groups.abs().amax(-1) / 448).log2().ceil()
        numbers = (groups / exponents.exp2().unsqueeze(-1)).to(torch.float8_e4m3fn)
        stored = {"weight": numbers.flatten(1), "weight_scale": (exponents + 127).byte()}
        return stored, (numbers.float() * exponents.exp2().unsqueeze(-1)).flatten(1)
    if form in ("fp8-channel", "fbgemm"):
        scale = weight.abs().amax(1, keepdim=True) / 448
        numbers = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale
    if form in ("fp8-block", "fp8-native", "fp8-128"):
        rows, columns = (128, 128) if form == "fp8-128" else (24, 40)
        scale = torch.rand(-(-outputs // rows), -(-inputs // columns)) * 0.001 + 0.002
        whole = scale.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
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
    if form == "mxfp4":
        groups = weight.view(outputs, -1, 32)
        exponents = (groups.abs().amax(-1) / 6).log2().ceil()
        factors = exponents.exp2().unsqueeze(-1)
        codes = ((groups / factors).unsqueeze(-1) - E2M1).abs().argmin(-1)
        packed = (codes[..., ::2] | codes[..., 1::2] << 4).flatten(1).byte()
        return {"weight_packed": packed, "weight_scale": (exponents + 127).byte()}, (E2M1[codes] * factors).flatten(1)
    return _pack_nf4(weight, form)


def _pack_torchao(weight: Tensor, form: str) -> Packed:
    outputs = len(weight)
    names = {"weight": "_weight_qdata", "weight_scale": "_weight_scale", "weight_zero_point": "_weight_zero_point"}
    if form == "torchao-int4":
        groups = weight.view(outputs, -1, 32)
        scale = ((groups.amax(-1) - groups.amin(-1)) / 15).bfloat16()
        offset = (groups.amin(-1) + scale.float() * 8).bfloat16()
        codes = ((groups - offset.unsqueeze(-1).float()) / scale.unsqueeze(-1).float()).round().clamp(-8, 7)
        nibbles = codes.flatten(1).to(torch.int8).view(torch.uint8) & 0xF
        stored = {
            "weight": nibbles[:, ::2] | nibbles[:, 1::2] << 4,
            "weight_scale": scale.T,
            "weight_zero_point": offset.T,
        }
        whole = (codes * scale.unsqueeze(-1).float() + offset.unsqueeze(-1).float()).flatten(1)
    elif form == "torchao-int8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        numbers = (weight / scale).round().to(torch.int8)
        stored = {"weight": numbers, "weight_scale": scale}
        stored["weight_zero_point"] = torch.zeros(outputs, 1, dtype=torch.int8)
        whole = numbers * scale
    else:
        known = {"torchao-fp8": "fp8-channel", "torchao-fp8-dynamic": "fp8-tensor"}
        stored, whole = pack_module(weight, known.get(form, "int4-in-bytes"))
        stored.pop("input_scale", None)
        if form == "torchao-fp8-dynamic":
            stored["weight_scale"] = stored["weight_scale"].view(1, 1)
    return {names[suffix]: tensor for suffix, tensor in stored.items()}, whole


def _pack_quark(weight: Tensor, form: str) -> Packed:
    """Scales and zero points of integers are stored transposed; the former of a tensor or channels lack a dimension."""
    outputs = len(weight)
    if form in ("quark-int4", "quark-uint4"):
        lowest, highest = (-8, 7) if form == "quark-int4" else (0, 15)
        groups = weight.view(outputs, -1, 16)
        if form == "quark-int4":
            scale = groups.abs().amax(-1) / 7
            zeros = torch.zeros_like(scale)
        else:
            scale = (groups.amax(-1) - groups.amin(-1)) / 15
            zeros = (-groups.amin(-1) / scale).round().clamp(0, 15)
        codes = (groups / scale.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(lowest, highest)
        whole = (codes - zeros.unsqueeze(-1)) * scale.unsqueeze(-1)
        bits = (codes.flatten(1).T.int().numpy() & 15, zeros.T.int().numpy() & 15)
        packed = [pack_awq_words(part) if form == "quark-int4" else pack_words(part, 4) for part in bits]
        stored = {"weight": packed[0], "weight_zero_point": packed[1], "weight_scale": scale.T}
        return stored, whole.flatten(1)
    if form == "quark-mxfp4":
        stored, whole = pack_module(weight, "mxfp4")
        return {"weight": stored["weight_packed"], "weight_scale": stored["weight_scale"]}, whole
    if form == "quark-fp8-group":
        groups = weight.view(outputs, -1, 16)
        scale = groups.abs().amax(-1) / 448
        numbers = (groups / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
        stored = {"weight": numbers.flatten(1), "weight_scale": scale}
        return stored, (numbers.float() * scale.unsqueeze(-1)).flatten(1)
    known = {"quark-fp8": "autofp8", "quark-int8": "int8-static", "quark-mxfp8": "mxfp8"}
    stored, whole = pack_module(weight, known.get(form, "fp8-channel"))
    if form in ("quark-fp8-channel", "quark-int8"):
        stored["weight_scale"] = stored["weight_scale"].flatten()
    if form == "quark-int8":
        stored["weight_zero_point"] = torch.zeros(outputs, dtype=torch.int8)
    return stored, whole


def _pack_nf4(weight: Tensor, form: str) -> Packed:
    count = weight.numel()
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -count % 32)).view(-1, 32)
    absmax = blocks.abs().amax(-1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 32, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors: dict[str, Tensor] = {"weight.quant_map": NF4.clone(), "weight.absmax": absmax}
    if form == "nf4-of-cpu":
        tensors["weight.absmax"] = absmax.view(len(weight), -1).T
    if form == "nf4-nested":
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
    if form == "nf4-bfloat16":
        tensors["weight"] = tensors["weight"].view(-1).view(torch.bfloat16).unsqueeze(1)
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
    """Write the model in directory/plain to directory/packed, and round the former in the same way. See
    `make_packed`."""
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
