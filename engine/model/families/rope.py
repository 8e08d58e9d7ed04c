"""Rope in config.json, as transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters) writes it."""

from __future__ import annotations

import math
from dataclasses import replace

from serve_llm.engine.errors import ModelError
from serve_llm.engine.model.config import Config
from serve_llm.engine.model.spec import DynamicScaling, LinearScaling, Llama3Scaling, LongScaling, Rope, YarnScaling

KINDS = {kind: kind for kind in ("default", "linear", "dynamic", "llama3", "yarn", "longrope")} | {"su": "longrope"}
DEFAULT_BASE = 10000.0


def read_rope(
    config: Config,
    max_position: int,
    head_dim: int,
    partial: float | None = None,
    default_base: float = DEFAULT_BASE,
    scaling: Config | None = None,
) -> tuple[Rope, int]:
    """The rope, and the longest context in tokens that it makes usable.

    max_position: max_position_embeddings. Of linear and dynamic scaling it is the length before scaling (so say
    transformers' docs), so the context is that times the factor; of yarn it may be either, so the context is the
    larger of it and original_max_position_embeddings times the factor; of the others it is the context.
    partial: default of partial_rotary_factor, a share of each head; None: the family does not read that key.
    scaling: what stands in the place of rope_scaling or rope_parameters, where that is not one of these keys.
    """
    scaling = scaling or config.inner("rope_scaling") or config.inner("rope_parameters")
    config.ignore("rope_scaling", "rope_parameters")
    base = config.number("rope_theta", default_base)
    if partial is not None:
        partial = config.number("partial_rotary_factor", partial)
        partial = partial if scaling is None else scaling.number("partial_rotary_factor", partial)
    dims = head_dim if partial is None else int(head_dim * partial)
    part = part_of_head(dims, head_dim)
    if scaling is None:
        return Rope(base, dims=part), max_position
    base = scaling.number("rope_theta", base)
    older = scaling.choice("type", KINDS, "default")
    kind = scaling.choice("rope_type", KINDS, older)
    if kind == "longrope":
        rope, context = Rope(base, _long(config, scaling, max_position, dims // 2)), max_position
    else:
        rope, context = _scaled(kind, scaling, base, max_position)
    scaling.done()
    return replace(rope, dims=part), context


def part_of_head(dims: int, head_dim: int) -> int | None:
    """`Rope.dims` where so many numbers of each head are turned. Raises ModelError where they cannot be."""
    if dims % 2 or not 0 < dims <= head_dim or head_dim % 2:
        raise ModelError(f"config.json: rotary embedding needs an even head size, but it is {dims} of {head_dim}")
    return None if dims == head_dim else dims


def _scaled(kind: str, scaling: Config, base: float, max_position: int) -> tuple[Rope, int]:
    if kind == "linear":
        factor = scaling.number("factor")
        return Rope(base, LinearScaling(factor)), int(max_position * factor)
    if kind == "dynamic":
        factor = scaling.number("factor")
        return Rope(base, DynamicScaling(factor, max_position)), int(max_position * factor)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        original = scaling.integer("original_max_position_embeddings", max_position)
        return Rope(base, Llama3Scaling(scaling.number("factor"), low, high, original)), max_position
    if kind == "yarn":
        original = scaling.integer("original_max_position_embeddings", max_position)
        factor = scaling.number("factor", max_position / original)
        yarn = YarnScaling(
            factor=factor,
            attention_factor=_yarn_attention_factor(scaling, factor),
            beta_fast=scaling.number("beta_fast", 32.0),
            beta_slow=scaling.number("beta_slow", 1.0),
            original_length=original,
            truncate=scaling.flag("truncate", True),
        )
        return Rope(base, yarn), max(max_position, int(original * factor))
    return Rope(base), max_position


def _long(config: Config, scaling: Config, max_position: int, pairs: int) -> LongScaling:
    original = scaling.integer("original_max_position_embeddings", max_position, lowest=2)
    original = config.integer("original_max_position_embeddings", original, lowest=2)  # Phi-3 has it here
    factor = scaling.number("factor", max_position / original)
    computed = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongScaling(
        long_factors=scaling.numbers("long_factor", pairs),
        short_factors=scaling.numbers("short_factor", pairs),
        attention_factor=scaling.number("attention_factor", computed),
        original_length=original,
    )


def _yarn_attention_factor(scaling: Config, factor: float) -> float:
    """The temperature of arXiv:2309.00071, section 3.4, as a multiplier of cos and sin; or the ratio of two such."""
    mscale, all_dims = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    computed = yarn_magnitude(factor, 1.0)
    if mscale and all_dims:
        computed = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dims)
    return scaling.number("attention_factor", computed)


def yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def score_factor(config: Config, rope: Rope) -> float:
    """By what DeepSeek multiplies scores in place of queries and keys: YaRN's temperature of all their numbers, also
    of those that are not turned. `_yarn_attention_factor` gives what cos and sin have beyond that."""
    scaling = config.inner("rope_scaling") or config.inner("rope_parameters")
    if scaling is None or not isinstance(rope.scaling, YarnScaling):
        return 1.0
    return yarn_magnitude(rope.scaling.factor, scaling.number("mscale_all_dim", 0.0)) ** 2
