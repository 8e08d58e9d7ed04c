"""Random LoRA adapters of tiny checkpoints, made and merged by PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from serve_llm.common.types import Adapter, EngineCoreRequest
from support.adapter_files import describe
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
}  # modules to adapt; in other families all linear layers


def make_adapter(
    checkpoint: Path,
    directory: Path,
    family: str = "",
    seed: int = 0,
    scale: float = 0.2,
    magnitude: float = 1.0,
    **config: Any,
) -> Adapter:
    """Write an adapter of the checkpoint to `directory`. scale: of its weights. magnitude: the spread of the random
    factors of DoRA's magnitudes. config: fields of LoraConfig."""
    base = AutoModelForCausalLM.from_pretrained(checkpoint, **PLAIN)
    fields: dict[str, Any] = {"target_modules": MODULES.get(family, "all-linear"), "task_type": "CAUSAL_LM"}
    model = get_peft_model(base, LoraConfig(**(fields | {"r": 4, "lora_alpha": 8} | config)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:  # its initial value is the norm of each row
                parameter.mul_(1 + (torch.rand(parameter.shape, generator=generator) - 0.5) * magnitude)
            elif "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(directory)
    return describe(directory)


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


def check_as_peft(checkpoint: Path, requests: list[EngineCoreRequest], results: dict[int, Result]) -> None:
    """Assert that greedy ids equal those of transformers with PEFT."""
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
