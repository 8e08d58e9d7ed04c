"""Tiny EAGLE-3 heads in the layout of published checkpoints, random or trained on a tiny model's output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from reference.eagle3 import Head

TRAINING_STEPS = 150
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "intermediate_size": 83,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 14,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


class Served:
    """The served model of a head, in transformers."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, experts_implementation="eager"
        )
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.vocab_size, self.hidden_size = self.embedding.shape

    @torch.no_grad()
    def states(self, ids: Sequence[int], layers: Sequence[int] | None = None) -> Tensor:
        """Return (tokens, 3 * hidden_size): the inputs of the layers that a head reads. layers: None for the
        default."""
        hidden = self.model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
        count = len(hidden) - 1
        return torch.cat([hidden[layer][0] for layer in layers or sorted((2, count // 2, count - 3))], dim=-1)


def build_head(served: Served, draft_vocab_size: int, *, std: float = 0.3, **overrides: object) -> Head:
    """Build a random head."""
    config = CONFIG | {
        "hidden_size": served.hidden_size,
        "vocab_size": served.vocab_size,
        "draft_vocab_size": draft_vocab_size,
    }
    config |= overrides
    width, inner = served.hidden_size, 83
    queries, keys = 6 * 14, 3 * 14
    shapes = {
        "fc": (width, 3 * width),
        "midlayer.hidden_norm": (width,),
        "midlayer.input_layernorm": (width,),
        "midlayer.post_attention_layernorm": (width,),
        "midlayer.self_attn.q_proj": (queries, 2 * width),
        "midlayer.self_attn.k_proj": (keys, 2 * width),
        "midlayer.self_attn.v_proj": (keys, 2 * width),
        "midlayer.self_attn.o_proj": (width, queries),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
        "norm": (width,),
        "lm_head": (draft_vocab_size, width),
    }
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[f"{name}.weight"] = 1.0 + 0.2 * noise if len(shape) == 1 else std * noise
    chosen = torch.randperm(served.vocab_size, generator=generator)[:draft_vocab_size].sort().values
    tensors["d2t"] = chosen - torch.arange(draft_vocab_size)
    tensors["t2d"] = torch.zeros(served.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    return Head(tensors, config, served.embedding)


def train(head: Head, served: Served, texts: Sequence[Sequence[int]], layers: Sequence[int] | None = None) -> None:
    """Train the head to continue these texts from the model's states only, as far as it has their ids. layers: as in
    `Served.states`."""
    own_ids = torch.full((served.vocab_size,), -100)
    own_ids[head.tensors["t2d"]] = torch.arange(len(head.tensors["d2t"]))
    samples = []
    for text in texts:
        ids = torch.tensor(list(text))
        samples.append((ids[1:-1], served.states(text, layers)[:-2], own_ids[ids[2:]]))
    weights = [tensor.requires_grad_() for tensor in head.tensors.values() if tensor.is_floating_point()]
    optimizer = torch.optim.Adam(weights, lr=0.01)
    for _ in range(TRAINING_STEPS):
        optimizer.zero_grad()
        logits = [head.logits(head.outputs(ids, head.fuse(states))) for ids, states, _ in samples]
        functional.cross_entropy(torch.cat(logits), torch.cat([wanted for _, _, wanted in samples])).backward()
        optimizer.step()
    for weight in weights:
        weight.requires_grad_(False)


def use_speculators_format(head: Head, layers: Sequence[int]) -> None:
    """Change the head's config and names to those of the speculators library. layers: whose inputs it reads."""
    outer = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": head.config["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "embed_requires_grad": False,
        "has_no_defaults_at_init": False,
        "model_type": "speculators",
        "norm_before_fc": False,
        "norm_before_residual": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "served"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.57.1",
    }
    dropped = ("architectures", "draft_vocab_size", "torch_dtype")
    inner = {key: value for key, value in head.config.items() if key not in dropped}
    head.config = {**outer, "transformer_layer_config": inner | {"attention_bias": False, "mlp_bias": False}}
    head.tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in head.tensors.items()}
    head.tensors["embed_tokens.weight"] = head.embedding


def write_head(head: Head, directory: Path, **more: Tensor) -> Path:
    """Write the checkpoint of a head. more: other tensors."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(head.config))
    tensors = {name: tensor.contiguous() for name, tensor in (head.tensors | more).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
