"""Activation functions of feed-forward layers.

They avoid silu, gelu and sigmoid of `torch.nn.functional`. On a CPU, torch computes these with one formula in full
vector registers and another in the remainder of a tensor or thread's share, so an element's bits depend on its index.
Measured: exp, tanh, erf and basic arithmetic do not have this problem, so everything here uses those, in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x). x: float32. Returns a new tensor of its shape."""
    return torch.exp(-x).add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x). x: float32. Returns a new tensor of its shape."""
    return x / torch.exp(-x).add_(1.0)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, with silu rounded before the product as transformers does.

    gate_up: (tokens, 2 * width), gate first. Returns (tokens, width) in the same dtype.
    """
    gate, up = gate_up.chunk(2, -1)
    return silu(gate.float()).to(up.dtype) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up, with gelu_tanh rounded before the product. Shapes as in `silu_and_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return gelu_tanh(gate) * up


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with gelu rounded before the product. Shapes as in `silu_and_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return gelu(gate) * up


def gelu(x: Tensor) -> Tensor:
    """x * P(Z <= x) for a standard normal Z (arXiv:1606.08415). Returns the shape and dtype of x."""
    wide = x.float()
    return (0.5 * wide * (1.0 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of gelu (arXiv:1606.08415). Returns the shape and dtype of x."""
    wide = x.float()
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1.0 + torch.tanh(inner))).to(x.dtype)


SWIGLUOAI_ALPHA = 1.702
SWIGLUOAI_LIMIT = 7.0


def swigluoai_and_mul(gate_up: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(1.702 * gate), with gate clamped to at most 7 and up to -7 .. 7 (gpt-oss,
    arXiv:2508.10925). gate_up: (tokens, 2 * width), gate first. Returns (tokens, width) in the same dtype."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.clamp(max=SWIGLUOAI_LIMIT).float()
    up = up.clamp(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT).float().add_(1.0)
    return gate.div_((gate * -SWIGLUOAI_ALPHA).exp_().add_(1.0)).mul_(up).to(gate_up.dtype)


def relu(x: Tensor) -> Tensor:
    """max(x, 0). Returns the shape and dtype of x."""
    return torch.relu(x)


def relu2(x: Tensor) -> Tensor:
    """The square of max(x, 0) (arXiv:2109.08668). Returns the shape and dtype of x."""
    return torch.relu(x).square_()
