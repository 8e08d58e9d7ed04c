"""Oracle for `kernels.activation`: torch functions in float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Same contract as `kernels.activation.silu_and_mul`, rounded once."""
    gate, up = gate_up.double().chunk(2, -1)
    return (functional.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Same contract as `kernels.activation.gelu_tanh_and_mul`, rounded once."""
    gate, up = gate_up.double().chunk(2, -1)
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Same contract as `kernels.activation.gelu_and_mul`, rounded once."""
    gate, up = gate_up.double().chunk(2, -1)
    return (functional.gelu(gate) * up).to(gate_up.dtype)


def gelu(x: Tensor) -> Tensor:
    """Same contract as `kernels.activation.gelu`."""
    return functional.gelu(x.double()).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """Same contract as `kernels.activation.gelu_tanh`."""
    return functional.gelu(x.double(), approximate="tanh").to(x.dtype)


def swigluoai_and_mul(gate_up: Tensor) -> Tensor:
    """Same contract as `kernels.activation.swigluoai_and_mul`."""
    gate, up = gate_up.double().chunk(2, -1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return ((up + 1.0) * gate * torch.sigmoid(1.702 * gate)).to(gate_up.dtype)


def relu(x: Tensor) -> Tensor:
    """Same contract as `kernels.activation.relu`."""
    return x.clamp(min=0)


def relu2(x: Tensor) -> Tensor:
    """Same contract as `kernels.activation.relu2`."""
    return x.double().clamp(min=0).square().to(x.dtype)
