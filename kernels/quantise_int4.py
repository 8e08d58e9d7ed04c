"""Rounding weights to 4 bits, with a scale and a zero point per group of inputs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MIDDLE = 8
TOP = 15
CHUNK = 512  # outputs converted at a time, to keep temporary memory small
# The range of a group is also tried narrower, and what gives the least squared error is kept: a range that cuts off a
# few large weights rounds all others less (minimum mean squared error quantisation, arXiv:1902.06822).
RANGES = (1.0, 0.9, 0.8)


def quantise_int4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """weight: (outputs, inputs), any float dtype -> codes of its shape, uint8 below 16; scales and zero points, both
    (outputs, groups) float32 numbers that float16 holds: a weight is about (code - zero point) * scale.

    The last group may be smaller. NaN and infinity propagate to the scale. Sums may be added in another order.
    """
    outputs, inputs = weight.shape
    num_groups = -(-inputs // group_size)
    codes = torch.empty((outputs, inputs), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((outputs, num_groups), device=weight.device)
    zeros = torch.empty_like(scales)
    for start in range(0, outputs if inputs else 0, CHUNK):
        rows = slice(start, start + CHUNK)
        padded = functional.pad(weight[rows].float(), (0, num_groups * group_size - inputs))
        found, scales[rows], zeros[rows] = _quantise_groups(padded.view(-1, num_groups, group_size))
        codes[rows] = found.flatten(1)[:, :inputs]
    return codes, scales, zeros


def _quantise_groups(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x: (rows, groups, size) float32 -> codes of its shape, scales and zero points (rows, groups)."""
    low = x.amin(-1).clamp_max_(0.0)
    high = x.amax(-1).clamp_min_(0.0)
    best_error = torch.full_like(low, torch.inf)
    best_codes = torch.zeros_like(x, dtype=torch.uint8)
    best_scales = (high - low) / TOP
    best_zeros = torch.full_like(low, MIDDLE)
    for part in RANGES:
        scales = ((high - low) * (part / TOP)).half().float()
        divisors = torch.where(scales > 0, scales, 1.0)
        zeros = (-low * part / divisors).round_().clamp_(0, TOP)
        levels = (x / divisors.unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(0, TOP)
        centred = levels - zeros.unsqueeze(-1)
        # With the codes given, this scale has the least error.
        fitted = (x * centred).sum(-1) / centred.square().sum(-1).clamp_min_(1e-30)
        fitted = torch.where(scales > 0, fitted, scales).half().float()
        error = (centred * fitted.unsqueeze(-1) - x).square_().sum(-1)
        is_better = error < best_error
        best_error = torch.where(is_better, error, best_error)
        best_scales = torch.where(is_better, fitted, best_scales)
        best_zeros = torch.where(is_better, zeros, best_zeros)
        best_codes = torch.where(is_better.unsqueeze(-1), levels.to(torch.uint8), best_codes)
    return best_codes, best_scales, best_zeros
