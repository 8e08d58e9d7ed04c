"""GGUF files of embedding models return the vectors computed from transformers' hidden states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from torch.nn import functional

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.hub import resolve_model
from serve_llm.server.prompt.tokenizer import load_tokenizer
from support.engine import make_engine
from support.gguf_files import make_gguf
from support.gguf_pieces import write_tensors
from support.pooled import compute_vectors, make_pooled_checkpoint, pooling_request, reference_hidden

POOLING = {"mean": gguf.PoolingType.MEAN, "cls": gguf.PoolingType.CLS}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
PROMPTS = [[3], [5, 7, 11, 2, 9], list(range(20, 90))]
NAMES = {"NomicBertModel": "nomic-bert", "ModernBertModel": "modern-bert", "EuroBertModel": "eurobert"}
MORE_SIZES: dict[str, dict[str, Any]] = {
    "EuroBertModel": {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": False, "mlp_bias": False}
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_encoder(directory: Path, architecture: str, pooling: gguf.PoolingType, storage: str = "Q8_0") -> None:
    """Write a random model to directory/model.gguf, and the same numbers in float32 to directory/plain."""
    plain = directory / "plain"
    vocab_size = make_pooled_checkpoint(plain, architecture, **SIZES | MORE_SIZES.get(architecture, {}))
    config: dict[str, Any] = json.loads((plain / "config.json").read_text())
    name = NAMES.get(architecture, "bert")
    writer = GGUFWriter(directory / "model.gguf", name)
    add_metadata(writer, config, pooling)
    add_words(writer, vocab_size)
    tensors = load_file(plain / "model.safetensors")
    pieces = {key: [tensor] for key, tensor in tensors.items() if not key.startswith("pooler.")}
    if architecture == "RobertaModel":  # the converter drops the rows before the first position
        (table,) = pieces["embeddings.position_embeddings.weight"]
        pieces["embeddings.position_embeddings.weight"] = [table[config["pad_token_id"] + 1 :]]
    number = next(number for number, one in gguf.MODEL_ARCH_NAMES.items() if one == name)
    write_tensors(writer, tensors, pieces, gguf.get_tensor_name_map(number, 4), storage)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})


def add_metadata(writer: GGUFWriter, config: dict[str, Any], pooling: gguf.PoolingType) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    for key in ("norm_eps", "rms_norm_eps"):
        if key in config:
            writer.add_layer_norm_rms_eps(config[key])
    if "layer_norm_eps" in config or "norm_eps" in config:
        writer.add_layer_norm_eps(config.get("norm_eps") or config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    if "num_key_value_heads" in config:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    rope = config.get("rope_parameters") or {}
    if rope:
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config["local_attention"])
        writer.add_sliding_window_pattern(3)


def add_words(writer: GGUFWriter, vocab_size: int) -> None:
    """Add a vocabulary of whole words."""
    writer.add_tokenizer_model("bert")
    words = [f"\u2581word{number}" for number in range(vocab_size - len(SPECIAL))]
    writer.add_token_list([*SPECIAL, *words])
    writer.add_token_types([3] * len(SPECIAL) + [1] * len(words))


@pytest.mark.parametrize(
    ("architecture", "pooling"),
    [
        ("BertModel", "cls"),
        ("RobertaModel", "mean"),
        ("NomicBertModel", "mean"),
        ("ModernBertModel", "cls"),
        ("EuroBertModel", "mean"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_encoders(architecture: str, pooling: str, ranks: int, tmp_path: Path) -> None:
    make_encoder(tmp_path, architecture, POOLING[pooling])
    engine = make_engine(resolve_model(str(tmp_path / "model.gguf")), dtype="float32", tensor=ranks)
    vectors = compute_vectors(engine, [pooling_request(number, ids) for number, ids in enumerate(PROMPTS)])
    for number, ids in enumerate(PROMPTS):
        hidden = reference_hidden(tmp_path / "plain", architecture, ids)
        expected = functional.normalize(hidden[0] if pooling == "cls" else hidden.mean(0), dim=0)
        assert (vectors[number] - expected).abs().max() < 1e-4


def test_their_tokenizer_and_pooling(tmp_path: Path) -> None:
    make_encoder(tmp_path, "BertModel", gguf.PoolingType.NONE, "F32")
    directory = resolve_model(str(tmp_path / "model.gguf"))
    assert load_tokenizer(directory).encode("Word3 word7", add_special_tokens=True) == [2, 8, 12, 3]
    with pytest.raises(OptionError, match=r"--pooling-type: .* give cls or mean"):
        make_engine(directory)
    make_encoder(tmp_path / "reranker", "BertModel", gguf.PoolingType.RANK, "F32")
    with pytest.raises(ModelError, match=r"bert\.pooling_type 4 is not supported \(supported: 1 for mean, 2 for cls"):
        resolve_model(str(tmp_path / "reranker" / "model.gguf"))


def test_a_decoder_that_pools_its_last_token(tmp_path: Path) -> None:
    """The decoder is like Qwen3-Embedding."""
    make_gguf(tmp_path, "qwen3", metadata={"qwen3.pooling_type": 3}, tie_word_embeddings=True)
    directory = resolve_model(str(tmp_path / "model.gguf"))
    found, expected = (
        compute_vectors(engine, [pooling_request(0, PROMPTS[1])])[0]
        for engine in (
            make_engine(directory, dtype="float32"),
            make_engine(tmp_path / "plain", dtype="float32", convert="embed", runner="pooling"),
        )
    )
    assert (found - expected).abs().max() < 1e-4
