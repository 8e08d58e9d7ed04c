"""Rope in config.json, as transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters) writes it."""

from __future__ import annotations

import math
from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model import rope_spec as ropes
from serve_llm.engine.model.config import ConfigReader

KINDS = {kind: kind for kind in ("default", "linear", "dynamic", "llama3", "yarn", "longrope")} | {"su": "longrope"}
KINDS["mrope"] = "default"  # positions have several coordinates, which are equal for text
DEFAULT_BASE = 10000.0


def read_rope(
    config: ConfigReader,
    max_position: int,
    head_dim: int,
    partial_rotary: float | None = None,
    default_base: float = DEFAULT_BASE,
    scaling: ConfigReader | None = None,
) -> tuple[ropes.RopeSpec, int]:
    """Return the rope and the longest context in tokens that it makes usable.

    max_position: max_position_embeddings. With linear and dynamic scaling, it is the length before scaling (according
    to transformers' docs), so the context is that times the factor. With yarn, it may be either length, so the context
    is the larger of it and original_max_position_embeddings times the factor. Otherwise, it is the context.
    partial_rotary: default of partial_rotary_factor, a share of each head; None: the family does not read that key.
    scaling: what replaces rope_scaling or rope_parameters in files without these keys.
    """
    scaling = scaling or config.inner("rope_scaling") or config.inner("rope_parameters")
    config.ignore("rope_scaling", "rope_parameters")
    base = config.number("rope_theta", default_base)
    dims = head_dim
    if partial_rotary is not None:
        factor = config.number("partial_rotary_factor", partial_rotary)
        if scaling is not None:
            factor = scaling.number("partial_rotary_factor", factor)
        dims = int(head_dim * factor)
    rotary_dim = check_rotary_dim(dims, head_dim)
    if scaling is None:
        return ropes.RopeSpec(base, rotary_dim=rotary_dim), max_position
    base = scaling.number("rope_theta", base)
    kind = scaling.choice("rope_type", KINDS, scaling.choice("type", KINDS, "default"))
    if kind == "longrope":
        rope, context = ropes.RopeSpec(base, _long(config, scaling, max_position, dims // 2)), max_position
    else:
        rope, context = _scaled(kind, scaling, base, max_position)
    scaling.done()
    return replace(rope, rotary_dim=rotary_dim), context


def check_rotary_dim(dims: int, head_dim: int) -> int | None:
    """`RopeSpec.rotary_dim` when `dims` dimensions of each head are rotated. Raises ModelError if they cannot be."""
    if dims % 2 or not 0 < dims <= head_dim or head_dim % 2:
        raise ModelError(f"config.json: rotary embedding needs an even head size, but it is {dims} of {head_dim}")
    return None if dims == head_dim else dims


def _scaled(kind: str, scaling: ConfigReader, base: float, max_position: int) -> tuple[ropes.RopeSpec, int]:
    if kind in ("linear", "dynamic"):
        factor = scaling.number("factor")
        changed = ropes.LinearScaling(factor) if kind == "linear" else ropes.DynamicScaling(factor, max_position)
        return ropes.RopeSpec(base, changed), int(max_position * factor)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        original = scaling.integer("original_max_position_embeddings", max_position)
        return ropes.RopeSpec(base, ropes.Llama3Scaling(scaling.number("factor"), low, high, original)), max_position
    if kind == "yarn":
        scaling.ignore("finetuned")  # how the model was made
        if any(scaling.number(key, 1.0) != 1.0 for key in ("attn_factor", "extrapolation_factor")):  # vLLM's
            raise ModelError("config.json: attn_factor and extrapolation_factor of yarn must be 1: only vLLM uses them")
        original = scaling.integer("original_max_position_embeddings", max_position)
        factor = scaling.number("factor", max_position / original)
        yarn = ropes.YarnScaling(
            factor=factor,
            attention_factor=_yarn_attention_factor(scaling, factor),
            beta_fast=scaling.number("beta_fast", 32.0),
            beta_slow=scaling.number("beta_slow", 1.0),
            original_length=original,
            truncate=scaling.flag("truncate", True),
        )
        return ropes.RopeSpec(base, yarn), max(max_position, int(original * factor))
    return ropes.RopeSpec(base), max_position


def _long(config: ConfigReader, scaling: ConfigReader, max_position: int, pairs: int) -> ropes.LongScaling:
    original = scaling.integer("original_max_position_embeddings", max_position, lowest=2)
    original = config.integer("original_max_position_embeddings", original, lowest=2)  # Phi-3 has it here
    factor = scaling.number("factor", max_position / original)
    computed = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return ropes.LongScaling(
        long_factors=scaling.numbers("long_factor", pairs),
        short_factors=scaling.numbers("short_factor", pairs),
        attention_factor=scaling.number("attention_factor", computed),
        original_length=original,
    )


def _yarn_attention_factor(scaling: ConfigReader, factor: float) -> float:
    """The temperature of arXiv:2309.00071, section 3.4, as a multiplier of cos and sin, or the ratio of two of them."""
    mscale, all_dims = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    computed = yarn_magnitude(factor, 1.0)
    if mscale and all_dims:
        computed = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dims)
    return scaling.number("attention_factor", computed)


def yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def score_factor(config: ConfigReader, rope: ropes.RopeSpec) -> float:
    """Factor of DeepSeek's attention scores: YaRN's temperature for all dimensions. Cos and sin hold the rest."""
    scaling = config.inner("rope_scaling") or config.inner("rope_parameters")
    if scaling is None or not isinstance(rope.scaling, ropes.YarnScaling):
        return 1.0
    return yarn_magnitude(rope.scaling.factor, scaling.number("mscale_all_dim", 0.0)) ** 2
