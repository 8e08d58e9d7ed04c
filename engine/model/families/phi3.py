"""Phi-3, Phi-3.5 and Phi-4 (Phi3ForCausalLM): Llama with joint weights, longrope and rope in only part of each head."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.names import JOINT_GATED, PRE_NORMS, QKV, weights
from serve_llm.engine.model.spec import ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

JOINT_ATTENTION = {"self_attn.qkv_proj": QKV, "self_attn.o_proj": "attention.output"}


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Phi3Config)."""
    window = config.integer("sliding_window", 0)
    spec = read_decoder(
        config,
        "Phi3ForCausalLM",
        default_kv_heads=None,
        default_max_position=4096,
        norm=NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
        partial_rotary=1.0,
        windows=[window or None] * config.layers("num_hidden_layers"),
    )
    config.ignore("original_max_position_embeddings")  # for models without longrope
    config.ignore("resid_pdrop", "embd_pdrop")
    config.ignore("full_attn_mod", "interpolate_factor")  # in Phi-4-mini; transformers does not read them
    config.refuse("attention_bias", "mlp_bias", "lm_head_bias")
    config.done()
    return spec, weights(spec, PRE_NORMS | JOINT_ATTENTION | JOINT_GATED)
