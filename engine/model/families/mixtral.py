"""Mixtral (MixtralForCausalLM): Mistral with experts in place of every feed-forward part (arXiv:2401.04088)."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.experts import IN_TRAINING, read_router, with_experts
from serve_llm.engine.model.families.names import ATTENTION, PRE_NORMS, weights
from serve_llm.engine.model.spec import ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

NAMES = {
    **PRE_NORMS,
    **ATTENTION,
    "block_sparse_moe.gate": "ffn.router",
    "block_sparse_moe.experts.{member}.w1": "ffn.experts.{member}.gate",
    "block_sparse_moe.experts.{member}.w3": "ffn.experts.{member}.up",
    "block_sparse_moe.experts.{member}.w2": "ffn.experts.{member}.down",
}

# llm-compressor names the experts' projections as other families do.
OTHER_WORDS = ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."))


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (MixtralConfig)."""
    window = config.integer("sliding_window", 0)
    dense = read_decoder(
        config,
        "MixtralForCausalLM",
        default_kv_heads=8,
        default_max_position=131072,
        default_rope_base=1_000_000.0,
        norm=NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
        windows=[window or None] * config.layers("num_hidden_layers"),
    )
    spec = with_experts(dense, read_router(config, config.integer("num_local_experts", 8, highest=10_000), 2))
    config.ignore(*IN_TRAINING)
    config.done()
    return spec, replace(weights(spec, NAMES), other_words=OTHER_WORDS)
