"""Activation functions of feed-forward layers. Knows tensors only.

Why not `torch.nn.functional`: on a CPU, torch computes silu, gelu and sigmoid by one formula in full vector registers
and by another in what is left at the end of a tensor or of a thread's share, so an element's bits depend on where it
stands. Measured: exp, tanh, erf and the four operations do not have that fault; everything here is made of those, in
float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, with silu rounded before the product as transformers does.

    gate_up: (tokens, 2 * width), gate first. Returns (tokens, width) in the same dtype.
    """
    gate, up = gate_up.chunk(2, -1)
    wide = gate.float()
    return (wide / torch.exp(-wide).add_(1.0)).to(up.dtype) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up, with gelu_tanh rounded before the product. Shapes as of `silu_and_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return gelu_tanh(gate) * up


def gelu(x: Tensor) -> Tensor:
    """x * P(Z <= x) for a standard normal Z (arXiv:1606.08415). Any shape; returns shape and dtype of x."""
    wide = x.float()
    return (0.5 * wide * (1.0 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of gelu (arXiv:1606.08415). Any shape; returns shape and dtype of x."""
    wide = x.float()
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)


ALPHA, LIMIT = 1.702, 7.0  # of swigluoai


def swigluoai_and_mul(gate_up: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(ALPHA * gate), where gate is at most LIMIT, and up from -LIMIT to LIMIT (gpt-oss,
    arXiv:2508.10925). gate_up: (tokens, 2 * width), gate first. Returns (tokens, width) in the same dtype."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=LIMIT).float(), up.clamp(-LIMIT, LIMIT).float().add_(1.0)
    return gate.div_((gate * -ALPHA).exp_().add_(1.0)).mul_(up).to(gate_up.dtype)


def relu(x: Tensor) -> Tensor:
    """max(x, 0). Any shape; returns shape and dtype of x."""
    return torch.relu(x)


def relu2(x: Tensor) -> Tensor:
    """The square of max(x, 0) (arXiv:2109.08668). Any shape; returns shape and dtype of x."""
    return torch.relu(x).square_()
