"""Kinds of rotary embedding, as data. Torch-free; part of `engine.model.spec`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearScaling:
    """Divide positions by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """NTK-aware scaling: beyond `original_length` the base grows with the position."""

    factor: float
    original_length: int  # tokens


@dataclass(frozen=True)
class Llama3Scaling:
    """Divide low frequencies by `factor`, keep high ones, and interpolate smoothly between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int  # tokens


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): NTK-by-parts interpolation; cos and sin are multiplied by `attention_factor`."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    original_length: int  # tokens
    truncate: bool  # round the ends of the ramp outwards to whole dimensions


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE (arXiv:2402.13753): divide each frequency by its own factor; multiply cos and sin by `attention_factor`.

    All tokens of a sequence use the same factors: the long ones if the sequence is longer than `original_length`. See
    `inputs.LONG_ROPE_OFFSET`.
    """

    long_factors: tuple[float, ...]  # one per pair of dimensions
    short_factors: tuple[float, ...]
    attention_factor: float
    original_length: int  # tokens


@dataclass(frozen=True)
class RopeSpec:
    base: float
    scaling: LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling | None = None
    rotary_dim: int | None = None  # rotate only the first dimensions of each head; None: all
    interleaved: bool = False  # rotate adjacent dimensions together (GPT-J) instead of the two halves (GPT-NeoX)
