"""JinaBERT, which transformers does not have, against its definition (arXiv:2310.19923) in plain torch, in float32."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from support.engine import make_engine
from support.pooled import compute_vectors, pooling_request

CONFIG = {
    "architectures": ["JinaBertModel"],
    "attn_implementation": None,
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "hidden_act": "gelu",
    "hidden_size": 96,
    "intermediate_size": 97,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 256,
    "model_type": "bert",
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "position_embedding_type": "alibi",
    "type_vocab_size": 2,
    "vocab_size": 331,
}
WIDTH, INNER, HEADS = 96, 97, 6
SLOPES = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]  # those of four heads, and every second one of eight


def make_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    weights = {
        "embeddings.word_embeddings.weight": make(331, WIDTH),
        "embeddings.token_type_embeddings.weight": make(2, WIDTH),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(3):
        prefix = f"encoder.layer.{layer}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            weights[f"{prefix}.attention.{name}.weight"] = make(WIDTH, WIDTH)
            weights[f"{prefix}.attention.{name}.bias"] = make(WIDTH)
        weights[f"{prefix}.mlp.gated_layers.weight"] = make(2 * INNER, WIDTH)
        weights[f"{prefix}.mlp.wo.weight"] = make(WIDTH, INNER)
        weights[f"{prefix}.mlp.wo.bias"] = make(WIDTH)
        norms += [f"{prefix}.attention.output.LayerNorm", f"{prefix}.mlp.layernorm"]
    for name in norms:
        weights[f"{name}.weight"] = 1.0 + make(WIDTH)
        weights[f"{name}.bias"] = make(WIDTH)
    return weights


def compute_hidden(weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """(ids, width)."""

    def linear(x: Tensor, name: str) -> Tensor:
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    positions = torch.arange(len(ids))
    bias = -(positions[:, None] - positions).abs() * torch.tensor(SLOPES)[:, None, None]
    for layer in range(3):
        prefix = f"encoder.layer.{layer}"
        query, key, value = (
            linear(x, f"{prefix}.attention.self.{name}").view(len(ids), HEADS, -1).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        scores = query @ key.transpose(1, 2) * (WIDTH // HEADS) ** -0.5 + bias
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        x = norm(x + linear(mixed, f"{prefix}.attention.output.dense"), f"{prefix}.attention.output.LayerNorm")
        gate, up = linear(x, f"{prefix}.mlp.gated_layers").chunk(2, -1)
        x = norm(x + linear(functional.gelu(gate) * up, f"{prefix}.mlp.wo"), f"{prefix}.mlp.layernorm")
    return x


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_equals_the_definition(prefix: str, tensor: int, tmp_path: Path) -> None:
    weights = make_weights()
    named = {f"{prefix}{name}": weight for name, weight in weights.items()}
    if prefix:
        named |= {"cls.predictions.bias": torch.zeros(331), "cls.predictions.transform.dense.bias": torch.zeros(WIDTH)}
    save_file(named, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    rng = random.Random(1)
    prompts = [[rng.randrange(331) for _ in range(length)] for length in (1, 2, 17, 40, 250)]
    engine = make_engine(tmp_path, tensor=tensor, pooling_type="mean")
    found = compute_vectors(engine, [pooling_request(number, ids) for number, ids in enumerate(prompts)])
    for number, ids in enumerate(prompts):
        expected = functional.normalize(compute_hidden(weights, ids).mean(0), dim=0)
        torch.testing.assert_close(functional.normalize(found[number], dim=0), expected, rtol=1e-5, atol=1e-5)
