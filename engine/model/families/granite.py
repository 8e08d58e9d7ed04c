"""Granite (GraniteForCausalLM): Llama with multipliers of embeddings, scores, attention and feed-forward
outputs, and logits."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import map_attention
from serve_llm.engine.model.families.llama import read_plain
from serve_llm.engine.model.families.names import weights
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (GraniteConfig)."""
    spec = read_granite(config, "GraniteForCausalLM")
    config.done()
    return spec, weights(spec)


def read_granite(config: ConfigReader, architecture: str) -> ModelSpec:
    """Read a decoder with Llama's keys and Granite's multipliers. The caller must call config.done().

    residual_multiplier r: only rms norms read the hidden rows x, and norm(x) with eps equals norm(x / r) with
    eps / r^2. So x + r * f(norm(x)) is computed as x / r + f(norm(x / r)), which needs no multiplication.
    """
    plain = read_plain(config, architecture)
    residual = config.number("residual_multiplier", 1.0)
    scale = config.number("attention_multiplier", 1.0)
    plain = map_attention(plain, lambda index, attention: replace(attention, scale=scale))
    norm = plain.layers[0].norm
    norm = replace(norm, eps=norm.eps / residual**2)
    return replace(
        plain,
        layers=tuple(replace(layer, norm=norm) for layer in plain.layers),
        final_norm=norm,
        embedding_multiplier=config.number("embedding_multiplier", 1.0) / residual,
        logits_multiplier=1.0 / config.number("logits_scaling", 1.0),
    )
