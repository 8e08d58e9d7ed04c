"""Qwen2 and Qwen2.5 (Qwen2ForCausalLM): Llama with biases on q, k and v, and a window on some layers."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder, read_windows
from serve_llm.engine.model.families.names import weights
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Qwen2Config)."""
    spec = read_decoder(
        config,
        "Qwen2ForCausalLM",
        default_kv_heads=32,
        default_max_position=32768,
        windows=read_windows(config),
        qkv_bias=True,
    )
    spec = limit_dual_chunk_context(config, spec)
    config.done()
    return spec, weights(spec)


def limit_dual_chunk_context(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    """Limit the context of Qwen's models for a million tokens to one chunk, in which dual chunk attention is the usual
    attention (arXiv:2402.17463). Their sparse attention approximates the usual one, so it is not needed."""
    chunks = config.inner("dual_chunk_attention_config")
    if chunks is None:
        return spec
    size = chunks.integer("chunk_size")
    local = chunks.integer("local_size", lowest=0)
    if local >= size:
        raise ModelError(
            f"config.json: dual_chunk_attention_config: local_size {local} must be below chunk_size {size}"
        )
    original = chunks.integer("original_max_position_embeddings", size)  # longer texts have other attention scores
    chunks.ignore("sparse_attention_config", "sparse_attention_enabled", "sparse_attention_threshold")
    chunks.done()
    return replace(spec, max_position=min(spec.max_position, size - local, original))
