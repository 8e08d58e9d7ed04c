"""Which version of each kernel a model is built with. The choice is made here, once, when the model is built.

`kernels.linear.pack` chooses its route by itself, since that depends on each weight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from serve_llm.kernels import activation, attention, linear, linear_fp8, linear_int8, moe, norm, rope, sampling
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.linear import Packer
from serve_llm.kernels.cpu.rows import RowKernels
from serve_llm.kernels.cpu.sampling import CompiledSampling
from serve_llm.kernels.device_sampling import DeviceSampling, ListSampling
from serve_llm.kernels.reference import device_sampling as device_sampling_reference

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """One version of each kernel; contracts stand at the functions of the same names in `kernels/`."""

    paged_attention: Callable[..., Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
    rope_and_cache: Callable[[Tensor, int, rope.HeadNorms | None, rope.Angles | None, Tensor, Tensor], Tensor]
    rope_and_latent: Callable[[Tensor, Tensor, Tensor, float, rope.Angles | None, Tensor, Tensor], Tensor]
    activations: Mapping[str, Callable[[Tensor], Tensor]]  # silu_and_mul, gelu_tanh_and_mul, ...
    pack: Callable[..., linear.Linear]
    pack_heads: Callable[[Tensor], linear.Linear]
    pack_int8: Callable[[Tensor, Tensor, Tensor | None], linear.Linear]
    pack_fp8: Callable[[Tensor, Tensor, Tensor | None], linear.Linear]
    pack_experts: Callable[[Iterable[tuple[linear.Linear, linear.Linear]], moe.Activation, range], moe.Experts]
    capturable: bool = False  # they read lengths on the device and nothing back from it: a GPU may replay a launch


PORTABLE = Kernels(
    paged_attention=attention.paged_attention,
    rms_norm=norm.rms_norm,
    add_rms_norm=norm.add_rms_norm,
    layer_norm=norm.layer_norm,
    rope_and_cache=rope.rope_and_cache,
    rope_and_latent=rope.rope_and_latent,
    activations={
        kernel.__name__: kernel
        for kernel in (
            activation.silu_and_mul,
            activation.gelu_tanh_and_mul,
            activation.gelu,
            activation.gelu_tanh,
            activation.relu,
            activation.relu2,
            activation.swigluoai_and_mul,
        )
    },
    pack=linear.pack,
    pack_heads=linear.pack_heads,
    pack_int8=linear_int8.pack_int8,
    pack_fp8=linear_fp8.pack_fp8,
    pack_experts=moe.pack_experts,
)


def choose(
    device: torch.device,
    dtype: torch.dtype,
    head_dims: Collection[int],
    latent_dims: Collection[int] = (),
    *,
    batch_invariant: bool = False,
) -> Kernels:
    """The fastest version of each kernel that runs on the device, for a cache of that dtype and those head sizes.
    latent_dims: those of caches whose values are a part of the keys. batch_invariant: whether a GPU's results must not
    depend on what else is computed; a CPU's never do.

    One log line says so where a CPU has to do without compiled kernels, or a GPU without Triton's.
    """
    if device.type not in ("cpu", "cuda"):
        return PORTABLE
    compiled = with_library(library.find(), dtype) if device.type == "cpu" else with_triton(batch_invariant)
    if isinstance(compiled, str):
        logger.warning("The model runs on plain torch operations, which is much slower: %s", compiled)
        return PORTABLE
    for dims, known in ((head_dims, library.HEAD_DIMS), (latent_dims, library.LATENT_DIMS)):
        unknown = sorted(set(dims).difference(known))
        if not unknown or device.type != "cpu":
            continue
        reason = f"heads of {unknown[0]} numbers have no compiled kernel ({known[0]} to {known[-1]} in steps of 8 have)"
        logger.warning("Attention runs on plain torch operations, which is much slower: %s", reason)
        return replace(compiled, paged_attention=attention.paged_attention, rope_and_cache=rope.rope_and_cache)
    return compiled


def with_triton(batch_invariant: bool) -> Kernels | str:
    """Kernels with Triton's among them, or why they cannot be used. They take all dtypes and head sizes."""
    try:
        from serve_llm.kernels.triton.activation import ACTIVATIONS
        from serve_llm.kernels.triton.attention import paged_attention
        from serve_llm.kernels.triton.fp8 import quantise_rows
        from serve_llm.kernels.triton.linear import pack, pack_heads
        from serve_llm.kernels.triton.moe import pack_experts
        from serve_llm.kernels.triton.norm import add_rms_norm, layer_norm, rms_norm
        from serve_llm.kernels.triton.rope import rope_and_cache, rope_and_latent
    except ImportError as error:
        return f"Triton's kernels cannot be imported: {error}"
    return replace(
        PORTABLE,
        paged_attention=partial(paged_attention, batch_invariant=batch_invariant),
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        layer_norm=layer_norm,
        rope_and_cache=rope_and_cache,
        rope_and_latent=rope_and_latent,
        activations={**PORTABLE.activations, **ACTIVATIONS},
        pack=pack if batch_invariant else linear.pack,
        pack_heads=pack_heads if batch_invariant else linear.pack_heads,
        pack_fp8=partial(linear_fp8.pack_fp8, quantise=quantise_rows),
        pack_experts=partial(pack_experts, batch_invariant=batch_invariant),
        capturable=True,
    )


def with_library(path: Path | None, dtype: torch.dtype) -> Kernels | str:
    """Kernels with the compiled ones at `path` among them, or why they cannot be used."""
    if path is None:
        return "there was no C++ compiler (g++ 10 or newer) when serve-llm was installed; install one and repeat"
    if dtype not in library.DTYPES:
        return f"no kernel was compiled for {dtype}"
    try:
        found = library.Library(path)
        rows, packer = RowKernels(found), Packer(found)
    except (OSError, AttributeError) as error:  # the latter: compiled from older sources
        return f"the compiled kernels cannot be loaded: {error}"
    pack = packer.pack if _ours_are_faster() else linear.pack
    return replace(
        PORTABLE,
        paged_attention=found.paged_attention,
        rms_norm=rows.rms_norm,
        add_rms_norm=rows.add_rms_norm,
        rope_and_cache=rows.rope_and_cache,
        activations={
            **PORTABLE.activations,
            "silu_and_mul": rows.silu_and_mul,
            "gelu_tanh_and_mul": rows.gelu_tanh_and_mul,
            "gelu": rows.gelu,
            "gelu_tanh": rows.gelu_tanh,
        },
        pack=pack,
        pack_heads=partial(linear.pack_heads, pack=pack),
        pack_int8=partial(
            packer.pack_int8 if _ours_are_faster() and packer.has(torch.int8) else linear_int8.pack_int8,
            quantise=rows.quantise_rows,
        ),
    )


def _ours_are_faster() -> bool:
    """Where oneDNN has matrix units (AMX), for which our products have no code, it keeps them."""
    return not getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()


def choose_sampling(device: torch.device) -> sampling.SamplingKernels:
    """The fastest version that runs on the device. `choose` has said where there are no compiled kernels."""
    if device.type != "cpu":
        return ListSampling(choose_device_sampling(device))
    path = library.find()
    try:
        return sampling if path is None else CompiledSampling(library.Library(path))
    except (OSError, AttributeError):
        return sampling


def choose_device_sampling(device: torch.device) -> DeviceSampling:
    """The fastest version for who does not wait for results; a CPU, where there is nothing to wait for, has only the
    definition."""
    if device.type != "cuda":
        return device_sampling_reference
    from serve_llm.kernels.triton import sampling as compiled  # Triton is not installed everywhere

    return compiled
