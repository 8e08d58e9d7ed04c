"""Encoders with the layers of a decoder, Llama or Gemma 3, in which every token attends to all others."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.common.sentence_transformers import PoolingType
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families import gemma, llama
from serve_llm.engine.model.families.decoder import map_attention
from serve_llm.engine.model.families.pooled import Read, read_num_labels
from serve_llm.engine.model.spec import AttentionSpec, ModelSpec, PoolerLayer, PoolerSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule

HEAD = ("dense", "classifier")


def read_eurobert(architecture: str) -> Read:
    """EuroBERT: Llama's layers. Defaults of absent keys are transformers' own (EuroBertConfig)."""

    def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        config.set_defaults(rms_norm_eps=1e-5, max_position_embeddings=8192)
        config.ignore("mask_token_id", "bos_token", "eos_token", "pad_token", "mask_token")
        pooler = None
        if architecture.endswith("ForSequenceClassification"):
            pooler = _read_classifier(config)
        config.ignore("classifier_pooling", "clf_pooling")
        spec, weights = llama.read(config)
        spec = replace(_make_bidirectional(spec), architecture=architecture, pooler=pooler)
        if pooler is None:
            return spec, weights
        kinds = ("weight", "bias")
        rules = [WeightRule(f"{name}.{kind}", (f"pooler.{name}.{kind}",)) for name in HEAD for kind in kinds]
        return spec, replace(weights, rules=(*weights.rules, *rules), outside=tuple(f"{name}." for name in HEAD))

    return read


def read_embedding_gemma(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """EmbeddingGemma: Gemma 3's layers. A window has half of `sliding_window` tokens on each side."""
    config.only("use_bidirectional_attention", True)
    spec, weights = gemma.read_gemma3(config.without("use_bidirectional_attention"))
    return replace(_make_bidirectional(spec), architecture="Gemma3TextModel"), weights


def _make_bidirectional(spec: ModelSpec) -> ModelSpec:
    """The model without its LM head. A window counts the tokens on one side, including the token itself."""

    def attend_to_all(index: int, attention: AttentionSpec) -> AttentionSpec:
        window = attention.sliding_window
        return replace(attention, causal=False, sliding_window=None if window is None else window // 2 + 1)

    return replace(map_attention(spec, attend_to_all), lm_head=False)


def _read_classifier(config: ConfigReader) -> PoolerSpec:
    width = config.integer("hidden_size")
    pooling: PoolingType = "mean"
    key = "clf_pooling" if "clf_pooling" in config.keys else "classifier_pooling"  # older files have the second one
    if config.choice(key, {"bos": "bos", "mean": "mean"}, "late") == "bos":
        pooling = "cls"
    layers = (PoolerLayer("dense", width, activation="gelu"), PoolerLayer("classifier", read_num_labels(config)))
    return PoolerSpec((pooling,), layers, is_classifier=True)
