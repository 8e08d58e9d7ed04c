"""GLM-4 (GlmForCausalLM, Glm4ForCausalLM): Llama with biases on queries, keys and values, interleaved rope in a part of
each head, and a joint weight for gate and up; Glm4 also has norms after attention and feed-forward."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.names import ATTENTION, JOINT_GATED, PRE_NORMS, weights
from serve_llm.engine.model.spec import ModelSpec, NormPosition, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

SANDWICH = {
    "input_layernorm": "attention_norm",
    "post_self_attn_layernorm": "attention_post_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "ffn_post_norm",
}


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """GlmForCausalLM. Defaults of absent keys are transformers' own (GlmConfig)."""
    spec = _read(config, "GlmForCausalLM", "pre")
    return spec, weights(spec, PRE_NORMS | ATTENTION | JOINT_GATED)


def read_glm4(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Glm4ForCausalLM. Defaults of absent keys are transformers' own (Glm4Config)."""
    spec = _read(config, "Glm4ForCausalLM", "sandwich")
    return spec, weights(spec, SANDWICH | ATTENTION | JOINT_GATED)


def _read(config: ConfigReader, architecture: str, norm_position: NormPosition) -> ModelSpec:
    spec = read_decoder(
        config,
        architecture,
        default_kv_heads=2,
        default_max_position=131072,
        default_head_dim=128,
        partial_rotary=0.5,
        interleaved=True,
        norm_position=norm_position,
        norm=NormSpec("rms", config.number("rms_norm_eps", 1.5625e-7)),
        windows=[None] * config.layers("num_hidden_layers"),
        qkv_bias=config.flag("attention_bias", True),
    )
    config.done()
    return spec
