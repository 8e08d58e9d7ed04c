"""JinaBERT, which transformers lacks, against its definition (arXiv:2310.19923) in plain torch, in float32.

Its second form, that of jina-embeddings-v2-base-code, has layer norms of queries and keys, adds attention's input
twice, and names its tensors differently.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from serve_llm.common.hub import resolve_model
from support.engine import make_engine
from support.gguf_pieces import write_tensors
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
CODE = "jinaai/jina-bert-v2-qk-post-norm"
QK_NORM_CONFIG = {
    **CONFIG,
    "_name_or_path": "/models/mine",
    "architectures": ["JinaBertForMaskedLM"],
    "auto_map": {"AutoModel": f"{CODE}--modeling_bert.JinaBertModel"},
}
WIDTH, INNER, HEADS = 96, 97, 6
SLOPES = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]  # slopes of four heads, then every second slope of eight


def make_weights(has_qk_norm: bool) -> dict[str, Tensor]:
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
        up, down = ("up_gated_layer", "down_layer") if has_qk_norm else ("gated_layers", "wo")
        weights[f"{prefix}.mlp.{up}.weight"] = make(2 * INNER, WIDTH)
        weights[f"{prefix}.mlp.{down}.weight"] = make(WIDTH, INNER)
        weights[f"{prefix}.mlp.{down}.bias"] = make(WIDTH)
        norms.append(f"{prefix}.attention.output.LayerNorm")
        if has_qk_norm:
            own = ("attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2")
            norms += [f"{prefix}.{name}" for name in own]
        else:
            norms.append(f"{prefix}.mlp.layernorm")
    for name in norms:
        weights[f"{name}.weight"] = 1.0 + make(WIDTH)
        weights[f"{name}.bias"] = make(WIDTH)
    return weights


def compute_hidden(weights: dict[str, Tensor], ids: list[int], has_qk_norm: bool) -> Tensor:
    """Return the hidden states: (ids, width)."""

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
        projected = [linear(x, f"{prefix}.attention.self.{name}") for name in ("query", "key", "value")]
        if has_qk_norm:
            projected[0] = norm(projected[0], f"{prefix}.attention.self.layer_norm_q")
            projected[1] = norm(projected[1], f"{prefix}.attention.self.layer_norm_k")
        query, key, value = (one.view(len(ids), HEADS, -1).transpose(0, 1) for one in projected)
        scores = query @ key.transpose(1, 2) * (WIDTH // HEADS) ** -0.5 + bias
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        attended = norm(x + linear(mixed, f"{prefix}.attention.output.dense"), f"{prefix}.attention.output.LayerNorm")
        if has_qk_norm:
            x = norm(x + attended, f"{prefix}.layer_norm_1")
            up, gate = linear(x, f"{prefix}.mlp.up_gated_layer").chunk(2, -1)
            x = norm(x + linear(functional.gelu(gate) * up, f"{prefix}.mlp.down_layer"), f"{prefix}.layer_norm_2")
            continue
        x = attended
        gate, up = linear(x, f"{prefix}.mlp.gated_layers").chunk(2, -1)
        x = norm(x + linear(functional.gelu(gate) * up, f"{prefix}.mlp.wo"), f"{prefix}.mlp.layernorm")
    return x


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("has_qk_norm", [False, True])
def test_equals_the_definition(prefix: str, tensor: int, has_qk_norm: bool, tmp_path: Path) -> None:
    weights = make_weights(has_qk_norm)
    named = {f"{prefix}{name}": weight for name, weight in weights.items()}
    if prefix:
        named |= {"cls.predictions.bias": torch.zeros(331), "cls.predictions.transform.dense.bias": torch.zeros(WIDTH)}
    save_file(named, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(QK_NORM_CONFIG if has_qk_norm else CONFIG))
    rng = random.Random(1)
    prompts = [[rng.randrange(331) for _ in range(length)] for length in (1, 2, 17, 40, 250)]
    engine = make_engine(tmp_path, tensor=tensor, pooling_type="mean")
    found = compute_vectors(engine, [pooling_request(number, ids) for number, ids in enumerate(prompts)])
    for number, ids in enumerate(prompts):
        expected = functional.normalize(compute_hidden(weights, ids, has_qk_norm).mean(0), dim=0)
        torch.testing.assert_close(functional.normalize(found[number], dim=0), expected, rtol=1e-5, atol=1e-5)


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = make_weights(has_qk_norm=False)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "jina-bert-v2")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(3)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.JINA_BERT_V2, 3)
    write_tensors(writer, weights, {name: [weight] for name, weight in weights.items()}, names, "F32")
    engine = make_engine(resolve_model(str(tmp_path / "model.gguf")), dtype="float32")
    ids = list(range(40, 90))
    found = compute_vectors(engine, [pooling_request(0, ids)])[0]
    expected = functional.normalize(compute_hidden(weights, ids, has_qk_norm=False).mean(0), dim=0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("has_qk_norm", [False, True])
def test_classifier_equals_the_definition(has_qk_norm: bool, tensor: int, tmp_path: Path) -> None:
    weights = make_weights(has_qk_norm)
    generator = torch.Generator().manual_seed(4)
    dense, out = (torch.randn(rows, WIDTH, generator=generator) * 0.2 for rows in (WIDTH, 1))
    bias = torch.randn(WIDTH, generator=generator)
    head = {
        "bert.pooler.dense.weight": dense,
        "bert.pooler.dense.bias": bias,
        "classifier.weight": out,
        "classifier.bias": torch.ones(1),
    }
    save_file({f"bert.{name}": weight for name, weight in weights.items()} | head, tmp_path / "model.safetensors")
    config = {**(QK_NORM_CONFIG if has_qk_norm else CONFIG), "num_labels": 1}
    config["architectures"] = ["JinaBertForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = [[(7 * number + length) % 331 for number in range(length)] for length in (1, 2, 17, 40)]
    engine = make_engine(tmp_path, tensor=tensor)
    found = compute_vectors(engine, [pooling_request(number, ids) for number, ids in enumerate(prompts)])
    for number, ids in enumerate(prompts):
        first = compute_hidden(weights, ids, has_qk_norm)[0]
        expected = functional.linear(torch.tanh(functional.linear(first, dense, bias)), out, torch.ones(1))
        torch.testing.assert_close(found[number], expected, rtol=1e-5, atol=1e-5)
