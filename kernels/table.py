"""Which version of each kernel a model is built with. The choice is made here, once, when the model is built.

`kernels.linear.pack` chooses its route by itself, since that depends on each weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_llm.kernels import activation, attention, linear, linear_int8, norm, rope


@dataclass(frozen=True)
class Kernels:
    """One version of each kernel; contracts stand at the functions of the same names in `kernels/`."""

    write_cache: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[..., Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
    apply_rope: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    activations: Mapping[str, Callable[[Tensor], Tensor]]  # silu_and_mul, gelu, gelu_tanh, relu
    pack: Callable[[Tensor, Tensor | None], linear.Linear]
    pack_int8: Callable[[Tensor, Tensor, Tensor | None], linear.Linear]


PORTABLE = Kernels(
    write_cache=attention.write_cache,
    paged_attention=attention.paged_attention,
    rms_norm=norm.rms_norm,
    layer_norm=norm.layer_norm,
    apply_rope=rope.apply_rope,
    activations={
        kernel.__name__: kernel
        for kernel in (activation.silu_and_mul, activation.gelu, activation.gelu_tanh, activation.relu)
    },
    pack=linear.pack,
    pack_int8=linear_int8.pack_int8,
)


def choose(device: torch.device) -> Kernels:
    """The fastest version of each kernel that runs on the device."""
    return PORTABLE
