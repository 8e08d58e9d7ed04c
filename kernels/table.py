"""Which version of each kernel a model is built with. The choice is made here, once, when the model is built.

`kernels.linear.pack` chooses its route by itself, since that depends on each weight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from serve_llm.kernels import activation, attention, linear, linear_int8, norm, rope
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.linear import Packer

logger = logging.getLogger(__name__)


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


def choose(device: torch.device, dtype: torch.dtype, head_dims: Collection[int]) -> Kernels:
    """The fastest version of each kernel that runs on the device, for a cache of that dtype and those head sizes.

    One log line says so where attention on a CPU has to do without the compiled kernels.
    """
    if device.type != "cpu":
        return PORTABLE
    compiled = with_library(library.find(), dtype, head_dims)
    if isinstance(compiled, str):
        logger.warning("Attention runs on plain torch operations, which is much slower: %s", compiled)
        return PORTABLE
    return compiled


def with_library(path: Path | None, dtype: torch.dtype, head_dims: Collection[int]) -> Kernels | str:
    """Kernels with the compiled ones at `path` among them, or why they cannot be used."""
    if path is None:
        return "there was no C++ compiler (g++ 10 or newer) when serve-llm was installed; install one and repeat"
    if dtype not in library.DTYPES:
        return f"no kernel was compiled for {dtype}"
    unknown = sorted(set(head_dims).difference(library.HEAD_DIMS))
    if unknown:
        return f"heads of {unknown[0]} numbers have no compiled kernel (16 to 256 in steps of 8 have)"
    try:
        found = library.Library(path)
    except (OSError, AttributeError) as error:  # the latter: compiled from older sources
        return f"the compiled kernels cannot be loaded: {error}"
    return replace(
        PORTABLE, write_cache=found.write_cache, paged_attention=found.paged_attention, **linears(found.packer)
    )


def linears(packer: Packer) -> dict[str, Callable[..., linear.Linear]]:
    """Our own products with packed weights, except where oneDNN has matrix units (AMX), for which ours have no code."""
    if getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)():
        return {}
    int8 = {"pack_int8": packer.pack_int8} if packer.has(torch.int8) else {}
    return {"pack": packer.pack, **int8}
