"""Int8 compressed-tensors checkpoints as llm-compressor writes them, and transformers' results in int8."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

NUMBERS = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "block_structure": None}
NUMBERS |= {"actorder": None, "observer_kwargs": {}}


def quantization_config(ignore: Sequence[str] = ("lm_head",)) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**NUMBERS, "strategy": "channel", "dynamic": False, "observer": "minmax"},
                "input_activations": {**NUMBERS, "strategy": "token", "dynamic": True, "observer": None},
                "output_activations": None,
            }
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "global_compression_ratio": None,
        "version": "0.12.2",
    }


NEOX = ("query_key_value.weight", "attention.dense.weight", "dense_h_to_4h.weight", "dense_4h_to_h.weight")
GPTJ = ("fc_in.weight", "fc_out.weight")
DEEPSEEK = ("kv_a_proj_with_mqa.weight",)
QWEN1 = ("attn.c_attn.weight",)
MPT = ("attn.Wqkv.weight",)
DELTA_NET = ("in_proj_qkvz.weight", "in_proj_qkv.weight", "in_proj_z.weight")


def is_linear(name: str) -> bool:
    """Return whether a tensor of a Llama-like or OPT checkpoint is the weight of a linear module in its layers, except
    for routers of experts."""
    ends = ("proj.weight", "fc1.weight", "fc2.weight", "c_fc.weight", "w1.weight", "w2.weight", "w3.weight")
    return name.endswith((*ends, *NEOX, *GPTJ, *DEEPSEEK, *QWEN1, *MPT, *DELTA_NET))


def quantise_checkpoint(
    source: Path,
    directory: Path,
    *,
    scale_dtype: torch.dtype = torch.float32,
    ignore: Sequence[str] = ("lm_head",),
    heads: Sequence[str] = (),
) -> Path:
    """Write `source` to `directory` (created) with int8 weights in all linear modules except those in `ignore`, which
    may be patterns, and in the modules `heads`, such as LM heads.

    Also write the same weights in floating point to `directory`/dequantised. Returns that folder.
    """
    plain = directory / "dequantised"
    plain.mkdir(parents=True)
    stored, whole = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = whole[name] = tensor
        module = name.removesuffix(".weight")
        if module in heads or (is_linear(name) and not _is_ignored(module, ignore)):
            scale = (tensor.float().abs().amax(-1, keepdim=True) / 127).to(scale_dtype)
            numbers = (tensor.float() / scale.float()).round().clamp(-128, 127)
            stored[name], stored[f"{name}_scale"] = numbers.to(torch.int8), scale
            whole[name] = numbers * scale.float()
    config = json.loads((source / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    save_file(whole, plain / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config(ignore)}))
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    return plain


def _is_ignored(module: str, ignore: Sequence[str]) -> bool:
    return any(
        re.match(entry[3:], module) is not None if entry.startswith("re:") else entry == module for entry in ignore
    )


def edit_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change quantization_config in place."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def _as_int8(module: object, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Round each token's numbers to 8 bits, halves up."""
    (x,) = inputs
    largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return (((x * (127 / largest) + 0.5).floor() * largest / 127),)


@torch.inference_mode()
def int8_logprobs(
    plain: Path, prompts: Sequence[Sequence[int]], ignore: Sequence[str] = (), heads: Sequence[str] = ()
) -> list[Tensor]:
    """Return transformers' logprobs after each id, in float32, when every linear module of the layers and of `heads`
    gets rounded activations. plain: a checkpoint whose weights int8 can represent."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    for name, module in model.named_modules():
        if name in heads or (is_linear(f"{name}.weight") and name not in ignore):
            module.register_forward_pre_hook(_as_int8)
    return [model(torch.tensor([list(ids)])).logits[0].log_softmax(-1) for ids in prompts]
