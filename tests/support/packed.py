"""Checkpoints of packed integers (AWQ, GPTQ, compressed-tensors), written from the descriptions of their formats.

Each comes with the same weights in floating point, as numbers that transformers reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.quantised import is_linear
from support.tiny import make_checkpoint

SIZES: dict[str, dict[str, Any]] = {  # multiples of a word's 32 numbers
    "": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16},
    "opt": {"hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4, "word_embed_proj_dim": 64},
    "gpt2": {"n_embd": 64, "n_inner": 96, "n_head": 4},
    "qwen3_moe": {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 16}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3_next": {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "deepseek_v3": {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "q_lora_rank": 32}
    | {"kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_attention_heads": 4}
    | {"num_key_value_heads": 4},
    "gpt_neox": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "qwen": {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "kv_channels": 16},
    "bloom": {"hidden_size": 64, "n_head": 4},
    "mpt": {"d_model": 64, "n_heads": 4},
    "granitemoe": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    "falcon": {"hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_kv_heads": 2},
    "gptj": {"n_embd": 64, "n_inner": 96, "n_head": 4, "rotary_dim": 8},
    "phi3": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
}
SIZES["gemma3_text"] = SIZES[""] | {"num_key_value_heads": 2}
HEADS = {"num_key_value_heads": 2}
SCALED = {  # family -> the module whose input AutoAWQ scales, and the activation that undoes this
    "bloom": ("mlp.dense_4h_to_h", "mlp.gelu_impl"),
    "falcon": ("mlp.dense_4h_to_h", "mlp.act"),
    "gptj": ("mlp.fc_out", "mlp.act"),
    "gpt_neox": ("mlp.dense_4h_to_h", "mlp.act"),
    "mpt": ("ffn.down_proj", "ffn.act"),
    "starcoder2": ("mlp.c_proj", "mlp.act"),
}


@dataclass(frozen=True)
class Packing:
    """How to pack. group_size: 0 for one group of all inputs."""

    layout: str  # awq | awq_gemv | gptq | gptq_v2 | compressed
    bits: int = 4
    group_size: int = 16
    is_symmetric: bool = False
    has_order: bool = False  # inputs are assigned to groups in random order
    scale_dtype: torch.dtype = torch.float16
    scales_activations: bool = False  # as AutoAWQ does in `SCALED`


@dataclass(frozen=True)
class Integers:
    """value = (codes - zeros[:, groups]) * scales[:, groups]"""

    codes: np.ndarray  # (outputs, inputs)
    zeros: np.ndarray  # (outputs, groups)
    scales: Tensor  # (outputs, groups)
    groups: np.ndarray  # (inputs,)

    def dequantise(self) -> Tensor:
        codes, zeros = torch.from_numpy(self.codes), torch.from_numpy(self.zeros)
        return (codes - zeros[:, self.groups]).float() * self.scales[:, self.groups].float()


def quantise(weight: Tensor, packing: Packing) -> Integers:
    """Round to the nearest integers."""
    outputs, inputs = weight.shape
    size = packing.group_size or inputs
    groups = np.arange(inputs) // size
    if packing.has_order:
        groups = np.random.default_rng(inputs).permutation(groups)  # modules with the same input share their order
    top = 2**packing.bits - 1
    codes = np.zeros((outputs, inputs), np.int64)
    zeros = np.full((outputs, groups.max() + 1), (top + 1) // 2)
    scales = torch.zeros(zeros.shape, dtype=packing.scale_dtype)
    for group in range(zeros.shape[1]):
        part = weight[:, groups == group].double().numpy()
        if packing.is_symmetric:
            scale = np.abs(part).max(1) * 2 / top
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / top
            zeros[:, group] = np.clip(np.rint(-low / scale), 1, top)
        scales[:, group] = torch.from_numpy(scale).to(packing.scale_dtype)
        scale = scales[:, group].double().numpy()[:, None]
        codes[:, groups == group] = np.clip(np.rint(part / scale) + zeros[:, group, None], 0, top)
    return Integers(codes, zeros, scales, groups)


def pack_words(values: np.ndarray, bits: int) -> Tensor:
    """Pack (rows, numbers) into (rows, words) int32: a stream of bits, the lowest of each number first."""
    stream = (values[:, :, None] >> np.arange(bits)) & 1
    stream = stream.reshape(len(values), -1).astype(np.uint8)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little").view(np.int32).copy())


def pack_awq_words(values: np.ndarray) -> Tensor:
    """Pack 4-bit numbers, with the columns of a word in AutoAWQ's order."""
    columns = np.concatenate([8 * word + np.array([0, 2, 4, 6, 1, 3, 5, 7]) for word in range(values.shape[1] // 8)])
    return pack_words(values[:, columns], 4)


def pack_module(weight: Integers, packing: Packing) -> dict[str, Tensor]:
    """Return suffix -> tensor of one module."""
    bits = packing.bits
    if packing.layout == "awq":
        return {
            "qweight": pack_awq_words(weight.codes.T),
            "qzeros": pack_awq_words(weight.zeros.T),
            "scales": weight.scales.T.contiguous(),
        }
    if packing.layout == "awq_gemv":
        groups = weight.zeros.shape[1]
        padding = 8 * max(1, 128 // (packing.group_size or weight.codes.shape[1]))
        padded = -(-groups // padding) * padding - groups
        return {
            "qweight": pack_words(weight.codes, bits),
            "qzeros": pack_words(np.pad(weight.zeros, ((0, 0), (0, padded))), bits),
            "scales": torch.nn.functional.pad(weight.scales, (0, padded)),
        }
    if packing.layout == "compressed":
        tensors = {
            "weight_packed": pack_words(weight.codes, bits),
            "weight_scale": weight.scales,
            "weight_shape": torch.tensor(weight.codes.shape),
        }
        if not packing.is_symmetric:
            tensors["weight_zero_point"] = pack_words(weight.zeros.T, bits).T.contiguous()
        if packing.has_order:
            tensors["weight_g_idx"] = torch.from_numpy(weight.groups).int()
        return tensors
    stored_zeros = weight.zeros - (packing.layout == "gptq")
    return {
        "qweight": pack_words(weight.codes.T.T, bits).T.contiguous(),
        "qzeros": pack_words(stored_zeros.T, bits),
        "scales": weight.scales.T.contiguous(),
        "g_idx": torch.from_numpy(weight.groups).int(),
    }


def quantization_config(packing: Packing) -> dict[str, Any]:
    size = packing.group_size or -1
    if packing.layout in ("awq", "awq_gemv"):
        version = "gemv" if packing.layout == "awq_gemv" else "gemm"
        stored = {"quant_method": "awq", "bits": 4, "group_size": size, "version": version}
        return stored | {"zero_point": not packing.is_symmetric}
    if packing.layout == "compressed":
        weights = {"num_bits": packing.bits, "type": "int", "symmetric": packing.is_symmetric, "dynamic": False}
        weights |= {"strategy": "group", "group_size": size} if size > 0 else {"strategy": "channel"}
        weights |= {"actorder": "group" if packing.has_order else None, "observer": "minmax"}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        stored = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
        return stored | {"quantization_status": "compressed", "config_groups": {"group_0": group}}
    return {
        "quant_method": "gptq",
        "bits": packing.bits,
        "group_size": size,
        "desc_act": packing.has_order,
        "sym": packing.is_symmetric,
        "checkpoint_format": packing.layout,
        "lm_head": False,
        "damp_percent": 0.01,
        "true_sequential": True,
        "meta": {"quantizer": ["gptqmodel:4.0"]},
    }


def make_packed(
    directory: Path,
    family: str,
    packing: Packing,
    *,
    choose: Callable[[str], bool] = is_linear,
    **overrides: Any,
) -> int:
    """Write a random model to directory/packed, and the same numbers in float32 to directory/plain. Returns the
    vocabulary's size. choose: which tensors are packed."""
    sizes = {**SIZES.get(family, {**SIZES[""], **HEADS}), **overrides}
    vocab_size = make_checkpoint(directory / "plain", family, **sizes)
    pack_checkpoint(directory / "plain", directory / "packed", packing, choose)
    return vocab_size


def pack_checkpoint(plain: Path, packed: Path, packing: Packing, choose: Callable[[str], bool] = is_linear) -> None:
    """Write the checkpoint `plain` to `packed` with packed weights, and change `plain` to the values they represent."""
    packed.mkdir()
    tensors = load_file(plain / "model.safetensors")
    family = json.loads((plain / "config.json").read_text())["model_type"]
    is_gpt2 = family == "gpt2"
    scaled, activation = SCALED.get(family, ("", "")) if packing.scales_activations else ("", "")
    stored = {}
    for name in sorted(tensors):
        if not choose(name):
            stored[name] = tensors[name]
            continue
        is_transposed = is_gpt2 and ".c_" in name  # its modules keep (inputs, outputs)
        module = name.removesuffix(".weight")
        weight = tensors[name].float()
        scales = torch.ones(())
        if scaled and module.endswith(scaled):
            scales = torch.linspace(0.5, 2, weight.shape[1]).half().float()
            stored[f"{module.removesuffix(scaled)}{activation}.scales"] = scales.half()
        integers = quantise(weight.T if is_transposed else weight * scales, packing)
        whole = integers.dequantise()
        tensors[name] = whole.T.contiguous() if is_transposed else whole / scales
        stored |= {f"{module}.{suffix}": tensor for suffix, tensor in pack_module(integers, packing).items()}
    assert len(stored) > len(tensors)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config(packing)}))
