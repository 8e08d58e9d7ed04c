"""Angles of rotary position embedding: a pure function of the position, for each kind of scaling.

The same position gives the same angle in every batch. Frequencies equal those of transformers' modeling_rope_utils.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.engine.model.inputs import TURNED
from serve_llm.engine.model.spec import DynamicScaling, LinearScaling, Llama3Scaling, LongScaling, Rope, YarnScaling

AnglesOf = Callable[[Tensor], tuple[Tensor, Tensor]]  # positions (tokens,) -> cos, sin (tokens, head_dim / 2) float32


def angles_of(rope: Rope, head_dim: int, device: torch.device) -> AnglesOf:
    """The function from positions (tokens,) int64 to cos and sin, each (tokens, head_dim / 2) float32.

    Where only a part of each head is turned, the pairs behind it are turned by nothing: cos 1, sin 0.
    """
    if rope.dims is not None:
        turned, still = angles_of(replace(rope, dims=None), rope.dims, device), (0, (head_dim - rope.dims) // 2)

        def padded(positions: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = turned(positions)
            return functional.pad(cos, still, value=1.0), functional.pad(sin, still)

        return padded
    if isinstance(rope.scaling, DynamicScaling):
        return _dynamic(rope.base, rope.scaling, head_dim, device)
    if isinstance(rope.scaling, LongScaling):
        return _long(rope.base, rope.scaling, head_dim, device)
    frequencies = inverse_frequencies(rope, head_dim).to(device)
    magnitude = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0

    def at(positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions[:, None].float() * frequencies
        return angle.cos() * magnitude, angle.sin() * magnitude

    return at


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, (head_dim / 2,) float32, of any scaling but dynamic and long."""
    plain = _plain(rope.base, head_dim)
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(plain, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn(plain, scaling, rope.base, head_dim)
    return plain


def _plain(base: float, head_dim: int) -> Tensor:
    return 1.0 / (base ** (torch.arange(0, head_dim, 2).float() / head_dim))


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelength = 2 * math.pi / plain
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    # 0: longer than original_length / low, divided by factor; 1: shorter than original_length / high, kept
    smooth = ((scaling.original_length / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _yarn(plain: Tensor, scaling: YarnScaling, base: float, head_dim: int) -> Tensor:
    def dimension(rotations: float) -> float:
        """The (fractional) pair of dimensions that turns so many times over the original length."""
        return head_dim * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = max(last - first, 0.001) if first == last else last - first
    ramp = ((torch.arange(head_dim // 2).float() - first) / width).clamp(0, 1)  # 0: as trained, 1: interpolated
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def _dynamic(base: float, scaling: DynamicScaling, head_dim: int, device: torch.device) -> AnglesOf:
    """NTK-aware scaling where position p is turned by the base for a sequence of p + 1 tokens.

    transformers uses one base for a whole forward pass, that of its last position, so the same token gets another angle
    when its prompt is cut elsewhere. Ours does not depend on that; generation, token by token, is the same in both.
    """
    exponents = torch.arange(0, head_dim, 2, device=device).double() / head_dim

    def at(positions: Tensor) -> tuple[Tensor, Tensor]:
        lengths = (positions + 1).clamp(min=scaling.original_length).double()
        stretch = scaling.factor * lengths / scaling.original_length - (scaling.factor - 1)
        logs = math.log(base) + stretch.log() * (head_dim / (head_dim - 2))
        frequencies = torch.exp(-exponents * logs[:, None]).float()
        angle = positions[:, None].float() * frequencies
        return angle.cos(), angle.sin()

    return at


def _long(base: float, scaling: LongScaling, head_dim: int, device: torch.device) -> AnglesOf:
    """By the short factors, and from `TURNED` on by the long ones."""
    plain = _plain(base, head_dim)
    short, long = ((plain / torch.tensor(f)).to(device) for f in (scaling.short_factors, scaling.long_factors))

    def at(positions: Tensor) -> tuple[Tensor, Tensor]:
        is_turned = positions >= TURNED
        angle = (positions % TURNED)[:, None].float() * torch.where(is_turned[:, None], long, short)
        return angle.cos() * scaling.attention_factor, angle.sin() * scaling.attention_factor

    return at
