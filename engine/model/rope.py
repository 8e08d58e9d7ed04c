"""Angles of rotary position embedding (arXiv:2104.09864): a pure function of the position, for each kind of scaling.

A position has the same angles in every batch. The frequencies equal those of transformers' modeling_rope_utils.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.engine.model.inputs import LONG_ROPE_OFFSET
from serve_llm.engine.model.rope_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeSpec,
    YarnScaling,
)
from serve_llm.kernels.rope import Angles

ComputeAngles = Callable[[Tensor], Angles]  # see `build_angles`


def build_angles(
    rope: RopeSpec, head_dim: int, device: torch.device, compute_angles: Callable[..., Angles]
) -> ComputeAngles:
    """The function from positions (tokens,) int64 to cos and sin, each (tokens, head_dim / 2) float32.

    Pairs of dimensions beyond `rotary_dim` are not rotated: cos 1, sin 0. compute_angles: the kernel.
    """
    if rope.rotary_dim is not None:
        compute_rotated = build_angles(replace(rope, rotary_dim=None), rope.rotary_dim, device, compute_angles)
        padding = (0, (head_dim - rope.rotary_dim) // 2)

        def compute_padded(positions: Tensor) -> Angles:
            cos, sin = compute_rotated(positions)
            return functional.pad(cos, padding, value=1.0), functional.pad(sin, padding)

        return compute_padded
    if isinstance(rope.scaling, DynamicScaling):
        return _build_dynamic_angles(rope.base, rope.scaling, head_dim, device)
    if isinstance(rope.scaling, LongScaling):
        return _build_long_angles(rope.base, rope.scaling, head_dim, device)
    frequencies = inverse_frequencies(rope, head_dim).to(device)
    magnitude = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0

    return partial(compute_angles, frequencies=frequencies, magnitude=magnitude)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, (head_dim / 2,) float32. Not for dynamic and long scaling."""
    unscaled = _unscaled_frequencies(rope.base, head_dim)
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        return unscaled / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3_frequencies(unscaled, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn_frequencies(unscaled, scaling, rope.base, head_dim)
    return unscaled


def _unscaled_frequencies(base: float, head_dim: int) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, head_dim, 2).float() / head_dim))


def _llama3_frequencies(unscaled: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelength = 2 * math.pi / unscaled
    low = scaling.low_frequency_factor
    high = scaling.high_frequency_factor
    # 0 for wavelengths above original_length / low: divide by factor; 1 for those below original_length / high: keep
    smooth = ((scaling.original_length / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * unscaled / scaling.factor + smooth * unscaled


def _yarn_frequencies(unscaled: Tensor, scaling: YarnScaling, base: float, head_dim: int) -> Tensor:
    def find_dimension(rotations: float) -> float:
        """The (fractional) pair of dimensions that makes this many rotations over the original length."""
        return head_dim * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first = find_dimension(scaling.beta_fast)
    last = find_dimension(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, head_dim - 1)
    width = max(last - first, 0.001) if first == last else last - first
    ramp = ((torch.arange(head_dim // 2).float() - first) / width).clamp(0, 1)  # 0: unscaled, 1: divided by factor
    return unscaled / scaling.factor * ramp + unscaled * (1 - ramp)


def _build_dynamic_angles(base: float, scaling: DynamicScaling, head_dim: int, device: torch.device) -> ComputeAngles:
    """NTK-aware scaling where position p uses the base for a sequence of p + 1 tokens.

    transformers uses one base for a whole forward pass, that of its last position, so a token's angle depends on how
    its prompt is chunked. This version does not; token-by-token generation is the same in both.
    """
    exponents = torch.arange(0, head_dim, 2, device=device).double() / head_dim

    def compute(positions: Tensor) -> Angles:
        lengths = (positions + 1).clamp(min=scaling.original_length).double()
        stretch = scaling.factor * lengths / scaling.original_length - (scaling.factor - 1)
        logs = math.log(base) + stretch.log() * (head_dim / (head_dim - 2))
        frequencies = torch.exp(-exponents * logs[:, None]).float()
        angle = positions[:, None].float() * frequencies
        return angle.cos(), angle.sin()

    return compute


def _build_long_angles(base: float, scaling: LongScaling, head_dim: int, device: torch.device) -> ComputeAngles:
    """Short factors for positions below LONG_ROPE_OFFSET, long factors from there on."""
    unscaled = _unscaled_frequencies(base, head_dim)
    short = (unscaled / torch.tensor(scaling.short_factors)).to(device)
    long = (unscaled / torch.tensor(scaling.long_factors)).to(device)

    def compute(positions: Tensor) -> Angles:
        uses_long = positions >= LONG_ROPE_OFFSET
        angle = (positions % LONG_ROPE_OFFSET)[:, None].float() * torch.where(uses_long[:, None], long, short)
        return angle.cos() * scaling.attention_factor, angle.sin() * scaling.attention_factor

    return compute
