"""Tiny models with an MTP layer, in the layout of published checkpoints, trained on the model's output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from reference.mtp import MTPLayer
from support.tiny import HYBRIDS, make_checkpoint

NUM_LAYERS = 3  # of the served model
TRAINING_STEPS = 60
HYBRID_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}


def make_mtp_checkpoint(directory: Path, family: str, **overrides: object) -> MTPLayer:
    """Write a random model with a random MTP layer. overrides: see `make_checkpoint`."""
    if family in HYBRIDS:
        overrides["layer_types"] = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    make_checkpoint(directory, family, **{"num_hidden_layers": NUM_LAYERS + 1} | overrides)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
    model.config._attn_implementation = "eager"
    width = model.config.hidden_size
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"{name}.weight": 1.0 + 0.2 * torch.randn(width, generator=generator)
        for name in ("enorm", "hnorm", "shared_head.norm")
    }
    tensors["eh_proj.weight"] = 0.2 * torch.randn(width, 2 * width, generator=generator)
    layer = MTPLayer(model, tensors)
    write_mtp_checkpoint(layer, directory)
    return layer


def write_mtp_checkpoint(layer: MTPLayer, directory: Path) -> None:
    model = layer.model
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    prefix = f"model.layers.{NUM_LAYERS}"
    stored = load_file(path)
    if model.config.model_type in HYBRIDS:
        _write_hybrid(layer, directory, stored)
        return
    stored |= {f"{prefix}.{name}": tensor.detach().clone() for name, tensor in layer.tensors.items()}
    stored[f"{prefix}.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    stored[f"{prefix}.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(stored, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))


def _write_hybrid(layer: MTPLayer, directory: Path, stored: Mapping[str, Tensor]) -> None:
    """Write the layer next to the model, as Qwen does. The weights of norms are stored minus 1."""
    prefix = f"model.layers.{NUM_LAYERS}."
    tensors = {name.replace(prefix, "mtp.layers.0."): tensor for name, tensor in stored.items()}
    for name, tensor in layer.tensors.items():
        offset = 0.0 if name == "eh_proj.weight" else 1.0
        tensors[f"mtp.{HYBRID_NAMES[name.removesuffix('.weight')]}.weight"] = tensor.detach() - offset
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, "layer_types": config["layer_types"][:NUM_LAYERS]}
    if config["model_type"] != "qwen3_next":
        config["mtp_num_hidden_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))


def train(layer: MTPLayer, texts: Sequence[Sequence[int]]) -> None:
    """Train the layer to continue these texts from the model's states only."""
    with torch.no_grad():
        samples = [(torch.tensor(text[1:-1]), layer.states(text[:-2]), torch.tensor(text[2:])) for text in texts]
    weights = [tensor.requires_grad_() for tensor in layer.tensors.values()]
    weights += list(layer.model.model.layers[-1].parameters())
    optimizer = torch.optim.Adam(weights, lr=0.02)
    for _ in range(TRAINING_STEPS):
        optimizer.zero_grad()
        logits = [layer.logits(layer.outputs(ids, states)) for ids, states, _ in samples]
        functional.cross_entropy(torch.cat(logits), torch.cat([wanted for _, _, wanted in samples])).backward()
        optimizer.step()
    for weight in weights:
        weight.requires_grad_(False)
