"""Random LoRA adapters of tiny checkpoints, made and merged by PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from serve_llm.common.types import Adapter, Request
from serve_llm.engine.lora.files import compute_digest
from support.engine import Result

PLAIN = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
MODULES = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "falcon": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "bloom": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "mpt": ["Wqkv", "out_proj", "up_proj", "down_proj"],
    "qwen": ["c_attn", "c_proj", "w1", "w2"],
    "llama4_text": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen2_moe": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen3_moe": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen3_next": ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
}  # to adapt; in other families all linear layers


def make_adapter(
    checkpoint: Path,
    directory: Path,
    family: str = "",
    seed: int = 0,
    scale: float = 0.2,
    magnitude: float = 1.0,
    **config: Any,
) -> Adapter:
    """Write an adapter of the checkpoint to `directory`. scale: of its weights. magnitude: the width of the random
    factors of DoRA's lengths. config: fields of LoraConfig."""
    base = AutoModelForCausalLM.from_pretrained(checkpoint, **PLAIN)
    fields: dict[str, Any] = {"target_modules": MODULES.get(family, "all-linear"), "task_type": "CAUSAL_LM"}
    model = get_peft_model(base, LoraConfig(**(fields | {"r": 4, "lora_alpha": 8} | config)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:  # it begins as the length of each row
                parameter.mul_(1 + (torch.rand(parameter.shape, generator=generator) - 0.5) * magnitude)
            elif "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(directory)
    return describe(directory)


def write_adapter(directory: Path, layers: Mapping[str, tuple[int, int]], rank: int = 3, seed: int = 0) -> Adapter:
    """Write an adapter of these modules without PEFT. layers: outputs and inputs by the module's name."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in layers.items():
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.2
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.2
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in layers})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 5, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return describe(directory)


def describe(directory: Path, name: str = "") -> Adapter:
    """The adapter of a directory as the server registers it."""
    return Adapter(name or directory.name, str(directory), compute_digest(directory))


@torch.inference_mode()
def generate_with_peft(checkpoint: Path, adapter: Path | None, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy output ids of transformers with PEFT's own layers; adapter None: the base model."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, **PLAIN)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def check_as_peft(checkpoint: Path, requests: list[Request], results: dict[int, Result]) -> None:
    """Whether greedy results have the ids that transformers and PEFT compute."""
    for request in requests:
        directory = None if request.adapter is None else Path(request.adapter.directory)
        num_tokens = request.sampling.max_tokens
        expected = generate_with_peft(checkpoint, directory, request.prompt_ids, num_tokens)
        assert results[request.id].token_ids == expected, f"request {request.id}"


def merge(checkpoint: Path, adapter: Path, directory: Path) -> None:
    """Write the checkpoint with the adapter added to its weights."""
    base = AutoModelForCausalLM.from_pretrained(checkpoint, **PLAIN)
    merged: Any = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    merged.save_pretrained(directory)
