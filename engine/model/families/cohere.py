"""Command R (CohereForCausalLM, Cohere2ForCausalLM): parallel layers, layer norms without biases, interleaved rope.

In Cohere2, three of four layers have a sliding window, and only these use rope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import map_attention, read_decoder, read_local_windows
from serve_llm.engine.model.families.names import ATTENTION, GATED, HEAD_NORMS, weights
from serve_llm.engine.model.families.rope import DEFAULT_BASE
from serve_llm.engine.model.spec import ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

NAMES = {"input_layernorm": "attention_norm"} | ATTENTION | GATED


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """CohereForCausalLM. Defaults of absent keys are transformers' own (CohereConfig)."""
    windows = [None] * config.layers("num_hidden_layers")
    head_norm = config.flag("use_qk_norm", False)
    spec = _read(config, "CohereForCausalLM", windows, default_rope_base=500_000.0, head_norm=head_norm)
    # the first Command R supports a longer context than its max_position_embeddings
    spec = replace(spec, max_position=config.integer("model_max_length", spec.max_position))
    config.done()
    return spec, weights(spec, NAMES | HEAD_NORMS if head_norm else NAMES)


def read_cohere2(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Cohere2ForCausalLM. Defaults of absent keys are transformers' own (Cohere2Config)."""
    windows = read_local_windows(config, 4)
    spec = _read(config, "Cohere2ForCausalLM", windows, default_rope_base=DEFAULT_BASE)
    spec = map_attention(
        spec, lambda index, attention: attention if attention.sliding_window else replace(attention, rope=None)
    )
    # published files describe the architecture with these; transformers does not read them
    config.ignore("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct")
    config.ignore("use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding")
    config.ignore("use_qk_norm")
    config.done()
    return spec, weights(spec, NAMES)


def _read(
    config: ConfigReader,
    architecture: str,
    windows: Sequence[int | None],
    *,
    default_rope_base: float,
    head_norm: bool = False,
) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    spec = read_decoder(
        config,
        architecture,
        default_kv_heads=None,
        default_max_position=8192,
        default_rope_base=default_rope_base,
        default_tied=True,
        windows=windows,
        interleaved=True,
        norm_position="parallel",
        norm=NormSpec("layer", config.number("layer_norm_eps", 1e-5), bias=False),
        qkv_bias=bias,
        output_bias=bias,
        head_norm=head_norm,
    )
    return replace(spec, logits_multiplier=config.number("logit_scale", 0.0625))
