"""The text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2, Qwen3 and Qwen3-MoE with other defaults."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families import qwen2, qwen3, qwen3_moe
from serve_llm.engine.model.families.experts import holds_stacks, transposed_stacks
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap


def read_qwen2_vl(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Qwen2VLTextConfig, Qwen2_5_VLTextConfig)."""
    _ignore_sections(config)
    config.set_defaults(num_key_value_heads=8, rope_theta=1_000_000.0, rms_norm_eps=1e-5)
    return qwen2.read(config)


def read_qwen3_vl(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Qwen3VLTextConfig)."""
    _ignore_sections(config)
    config.set_defaults(max_position_embeddings=128_000, rope_theta=500_000.0)
    return qwen3.read(config)


def read_qwen3_vl_moe(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Qwen3VLMoeTextConfig). Scores of the experts are normalised."""
    _ignore_sections(config)
    config.set_defaults(max_position_embeddings=128_000, rope_theta=500_000.0, num_key_value_heads=16)
    config.set_defaults(num_experts_per_tok=4, moe_intermediate_size=1408, norm_topk_prob=True)
    is_stacked = holds_stacks(config)
    spec, weights = qwen3_moe.read(config)
    if not is_stacked:
        return spec, weights
    others = [rule for rule in weights.rules if ".mlp.experts." not in rule.source]
    return spec, replace(weights, rules=(*others, *transposed_stacks(spec, "model.layers.{layer}.mlp.experts")))


def _ignore_sections(config: ConfigReader) -> None:
    """Which coordinate of a position each dimension of a head uses. For text, all coordinates are equal."""
    for key in ("rope_scaling", "rope_parameters"):
        if rope := config.inner(key):
            rope.ignore("mrope_section", "mrope_interleaved")
