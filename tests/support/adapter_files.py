"""LoRA adapters as files, written without PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from serve_llm.common.types import Adapter
from serve_llm.engine.lora.hashed_files import compute_digest


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
    """Describe the adapter in a directory, as the server registers it."""
    return Adapter(name or directory.name, str(directory), compute_digest(directory))
