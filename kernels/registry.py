"""Choose the version of each kernel, once, when a model is built.

`kernels.linear.pack` chooses its own route, because that depends on each weight.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from serve_llm.kernels import (
    activation,
    attention,
    delta_rule,
    embedding_table,
    encoder_attention,
    linear,
    linear_fp8,
    linear_grouped,
    linear_int8,
    moe,
    norm,
    quantise_int4,
    quantise_int8,
    rope,
    torch_sampling,
)
from serve_llm.kernels.backends import flash_attention, triton_kernels
from serve_llm.kernels.backends.backend import AttentionBackend, AttentionForm, BackendRequirements, UnavailableBackend
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.call_recorder import BufferPool, CallRecorder
from serve_llm.kernels.cpu.delta_rule import DeltaRuleKernel
from serve_llm.kernels.cpu.encoder_attention import build_encoder_attention
from serve_llm.kernels.cpu.linear import Packer
from serve_llm.kernels.cpu.linear_grouped import GroupQuantPacker
from serve_llm.kernels.cpu.lora import CompiledLoRA
from serve_llm.kernels.cpu.moe import ExpertPacker
from serve_llm.kernels.cpu.rows import RowKernels
from serve_llm.kernels.cpu.sampling import CpuSamplingKernels
from serve_llm.kernels.invariance import BatchInvarianceChecker, LayerKind
from serve_llm.kernels.linear_grouped import GroupQuantWeight
from serve_llm.kernels.lora import AllocateLoRASlots, LoRAKernels
from serve_llm.kernels.sampling import DeviceSamplingKernels, SamplingKernels
from serve_llm.kernels.torch_sampling import SyncSamplingKernels

logger = logging.getLogger(__name__)

Record = Callable[[BufferPool], AbstractContextManager[CallRecorder]]  # see `Library.record`
PackGrouped = Callable[[GroupQuantWeight, Tensor | None, torch.dtype], linear.Linear]


@dataclass(frozen=True)
class Kernels:
    """One version of each kernel. The functions of the same names in `kernels/` state the contracts."""

    paged_attention: Callable[..., Tensor]
    encoder_attention: Callable[..., Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
    add_layer_norm: Callable[[Tensor, Tensor, Tensor | None, Tensor | None, float], tuple[Tensor, Tensor]]
    compute_angles: Callable[..., rope.Angles]
    rope_and_cache: Callable[..., Tensor]
    rope_and_latent: Callable[..., Tensor]
    gated_delta_rule: Callable[..., Tensor]
    activations: Mapping[str, Callable[[Tensor], Tensor]]  # silu_and_mul, gelu_tanh_and_mul, ...
    pack: Callable[..., linear.Linear]
    pack_heads: Callable[[Tensor], linear.Linear]
    pack_int8: Callable[[Tensor, Tensor, Tensor | None], linear.Linear]
    pack_fp8: Callable[[Tensor, Tensor, Tensor | None], linear.Linear]
    pack_grouped: PackGrouped
    pack_int8_table: Callable[[Tensor, Tensor, Tensor | None, torch.dtype], embedding_table.EmbeddingTable]
    pack_grouped_table: Callable[[GroupQuantWeight, Tensor | None, torch.dtype], embedding_table.EmbeddingTable]
    quantise_int4: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
    quantise_int8: Callable[[Tensor], tuple[Tensor, Tensor]]
    pack_experts: Callable[..., moe.PackedExperts]
    lora: LoRAKernels | None = None  # None: adapters are computed with linear layers
    pack_stored_fp8: PackGrouped | None = None  # for weights whose inputs may be rounded to 8 bits
    allocate_lora_slots: AllocateLoRASlots | None = None  # None: layers have no slots that hold adapters
    capturable: bool = False  # steps may be captured: they read lengths on the device and do not synchronise
    record: Record | None = None  # on a CPU: how steps are captured

    def with_cache_scales(self, scales: Tensor) -> Kernels:
        """The kernels for a layer whose KV cache is in fp8. scales: see `kernels.attention.write_cache`."""
        return replace(
            self,
            paged_attention=partial(self.paged_attention, cache_scales=scales),
            rope_and_cache=partial(self.rope_and_cache, cache_scales=scales),
            rope_and_latent=partial(self.rope_and_latent, cache_scales=scales),
        )


PORTABLE = Kernels(
    paged_attention=attention.paged_attention,
    encoder_attention=encoder_attention.encoder_attention,
    rms_norm=norm.rms_norm,
    add_rms_norm=norm.add_rms_norm,
    layer_norm=norm.layer_norm,
    add_layer_norm=norm.add_layer_norm,
    compute_angles=rope.compute_angles,
    rope_and_cache=rope.rope_and_cache,
    rope_and_latent=rope.rope_and_latent,
    gated_delta_rule=delta_rule.gated_delta_rule,
    activations={
        kernel.__name__: kernel
        for kernel in (
            activation.silu_and_mul,
            activation.gelu_and_mul,
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
    pack_grouped=linear_grouped.pack_grouped,
    pack_int8_table=embedding_table.pack_int8_table,
    pack_grouped_table=embedding_table.pack_grouped_table,
    quantise_int4=quantise_int4.quantise_int4,
    quantise_int8=quantise_int8.quantise_int8,
    pack_experts=moe.pack_experts,
)

ATTENTION_BACKENDS = (  # in addition to Triton, the base; later ones take precedence
    AttentionBackend("FlashAttention-3", "flash", flash_attention.offer),
)


def choose(
    device: torch.device,
    dtype: torch.dtype,
    head_dims: Collection[int],
    latent_dims: Collection[int] = (),
    *,
    attention_forms: Collection[AttentionForm] = (),
    attention_backend: str = "auto",
    batch_invariant: bool = False,
    cache_dtype: torch.dtype | None = None,
) -> Kernels:
    """Return the fastest version of each kernel for the device, the dtype and the head sizes of the cache.

    latent_dims: head sizes of caches whose values are a part of the keys. attention_forms: on a GPU, what the layers
    need; empty: attention without windows and the like, with heads of head_dims. attention_backend: on a GPU "auto", or
    the `option` of the backend that computes attention. batch_invariant: whether a GPU's results must not depend on the
    rest of the batch; a CPU's never do. cache_dtype: of a GPU's KV cache, if that is not `dtype`.

    Log which instruction set a CPU's compiled kernels use, and which backend computes a GPU's attention. Warn where
    there are no compiled kernels, or a GPU lacks Triton's. Raises UnavailableBackend.
    """
    if device.type not in ("cpu", "cuda"):
        return PORTABLE
    if device.type == "cpu":
        compiled = with_library(library.find(), dtype)
    else:
        capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
        forms = attention_forms or {AttentionForm(head_dim) for head_dim in head_dims}
        requirements = BackendRequirements(device, dtype, capability, forms, batch_invariant, cache_dtype)
        compiled = choose_for_gpu(requirements, attention_backend)
    if isinstance(compiled, str):
        logger.warning("The model runs on plain torch operations, which is much slower: %s", compiled)
        pack = partial(linear.pack, checker=BatchInvarianceChecker())
        return replace(PORTABLE, pack=pack, pack_heads=partial(linear.pack_heads, pack=pack))
    for dims, known in ((head_dims, library.HEAD_DIMS), (latent_dims, library.LATENT_DIMS)):
        unknown = sorted(set(dims).difference(known))
        if not unknown or device.type != "cpu":
            continue
        reason = f"heads of {unknown[0]} numbers have no compiled kernel ({known[0]} to {known[-1]} in steps of 8 have)"
        logger.warning("Attention runs on plain torch operations, which is much slower: %s", reason)
        return replace(
            compiled,
            paged_attention=attention.paged_attention,
            encoder_attention=encoder_attention.encoder_attention,
            rope_and_cache=rope.rope_and_cache,
            capturable=False,
        )
    return compiled


def choose_for_gpu(requirements: BackendRequirements, attention_backend: str) -> Kernels | str:
    """Override Triton's kernels by those of other backends, or return why Triton's cannot be used. Log which backend
    computes attention, and why others do not. attention_backend, errors: see `choose`."""
    kernels = with_triton(requirements.batch_invariant)
    if isinstance(kernels, str):
        if attention_backend != "auto":
            raise UnavailableBackend(kernels)
        return kernels
    chosen = "Triton"
    reasons = []
    for backend in ATTENTION_BACKENDS:
        if attention_backend not in ("auto", backend.option):
            continue
        offer = backend.offer(requirements)
        if not isinstance(offer, str):
            kernels = replace(kernels, **offer)
            chosen = backend.name
        elif attention_backend == backend.option:
            raise UnavailableBackend(f"{backend.name}: {offer}")
        else:
            reasons.append(f"; not {backend.name}: {offer}")
    logger.info("GPU kernels: Triton; attention: %s%s", chosen, "".join(reasons))
    return kernels


def with_triton(batch_invariant: bool) -> Kernels | str:
    """Return kernels including Triton's, or the reason why they cannot be used."""
    offer = triton_kernels.offer(batch_invariant)
    if isinstance(offer, str):
        return offer
    return replace(PORTABLE, **{**offer, "activations": {**PORTABLE.activations, **offer["activations"]}})


def with_library(path: Path | None, dtype: torch.dtype) -> Kernels | str:
    """Return kernels including the compiled ones at `path`, or the reason why they cannot be used."""
    if path is None:
        return (
            "there was no C++ compiler (g++ 10 or newer) when serve-llm was installed; install one and serve-llm again"
        )
    if dtype not in library.DTYPES:
        return f"no kernel was compiled for {dtype}"
    try:
        found = library.Library(path)
        rows = RowKernels(found)
        packer = Packer(found)
        lora = CompiledLoRA(found)
        experts = ExpertPacker(found)
        delta_kernel = DeltaRuleKernel(found)
    except (OSError, AttributeError) as error:  # the latter: compiled from older sources
        return f"the compiled kernels cannot be loaded: {error}"
    logger.info("CPU kernels: compiled for %s", found.variant)
    if found.missing:
        logger.warning(
            "This processor runs %s, which is faster, but the kernels were not compiled for it: install again with "
            "CPU_KERNELS=all and g++ 11 or newer",
            found.missing[-1],
        )
    checker = BatchInvarianceChecker()

    def pack(weight: Tensor, bias: Tensor | None = None, merged: Sequence[Tensor] = ()) -> linear.Linear:
        outputs = weight.shape[0] + sum(one.shape[0] for one in merged)
        kind = LayerKind(found.variant, outputs, weight.shape[1], weight.dtype)
        return checker.make_invariant(packer.pack(weight, bias, merged), kind)

    def pack_int8(weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> linear.Linear:
        kind = LayerKind(f"{found.variant} from int8", weight.shape[0], weight.shape[1], dtype)
        return checker.make_invariant(packer.pack_int8(weight, scale, bias, quantise=rows.quantise_rows), kind)

    grouped_packer = _find_grouped_packer(found)

    def pack_grouped(weight: GroupQuantWeight, bias: Tensor | None, model_dtype: torch.dtype) -> linear.Linear:
        if grouped_packer is None or not grouped_packer.packs(weight):
            return linear_grouped.pack_grouped(weight, bias, model_dtype, pack=pack)
        return grouped_packer.pack(weight, bias)

    def pack_int8_table(
        weight: Tensor, scale: Tensor, bias: Tensor | None, model_dtype: torch.dtype
    ) -> embedding_table.EmbeddingTable:
        if weight.numel() == 0:
            return embedding_table.pack_int8_table(weight, scale, bias, model_dtype)
        kind = LayerKind(f"{found.variant} from int8", weight.shape[0], weight.shape[1], dtype)
        packed = packer.pack_int8_table(weight, scale, bias, model_dtype, rows.quantise_rows)
        return packed._replace(multiply=checker.make_invariant(packed.multiply, kind))

    def pack_grouped_table(
        weight: GroupQuantWeight, bias: Tensor | None, model_dtype: torch.dtype
    ) -> embedding_table.EmbeddingTable:
        if grouped_packer is None or not grouped_packer.packs(weight):
            return embedding_table.pack_grouped_table(weight, bias, model_dtype)
        return grouped_packer.pack_table(weight, bias, model_dtype)

    return replace(
        PORTABLE,
        paged_attention=found.paged_attention,
        encoder_attention=build_encoder_attention(found, rows.rope_and_cache),
        rms_norm=rows.rms_norm,
        add_rms_norm=rows.add_rms_norm,
        layer_norm=rows.layer_norm,
        add_layer_norm=rows.add_layer_norm,
        compute_angles=rows.compute_angles,
        rope_and_cache=rows.rope_and_cache,
        gated_delta_rule=delta_kernel.gated_delta_rule,
        activations={
            **PORTABLE.activations,
            "silu_and_mul": rows.silu_and_mul,
            "gelu_tanh_and_mul": rows.gelu_tanh_and_mul,
            "gelu": rows.gelu,
            "gelu_tanh": rows.gelu_tanh,
        },
        pack=pack,
        pack_heads=partial(linear.pack_heads, pack=pack),
        pack_int8=pack_int8,
        pack_grouped=pack_grouped,
        pack_int8_table=pack_int8_table,
        pack_grouped_table=pack_grouped_table,
        quantise_int4=rows.quantise_int4,
        quantise_int8=rows.quantise_int8,
        pack_experts=experts.pack_experts,
        lora=lora,
        capturable=True,
        record=found.record,
    )


def _find_grouped_packer(found: library.Library) -> GroupQuantPacker | None:
    """Return None if the library was compiled from sources without it."""
    with contextlib.suppress(OSError, AttributeError):
        return GroupQuantPacker(found)
    return None


def choose_sampling(device: torch.device) -> SamplingKernels:
    """Return the fastest version for the device. `choose` logs a warning if there are no compiled kernels."""
    if device.type != "cpu":
        return SyncSamplingKernels(choose_device_sampling(device))
    path = library.find()
    if path is not None:
        with contextlib.suppress(OSError, AttributeError):  # cannot be loaded, or compiled from older sources
            return CpuSamplingKernels(library.Library(path))
    return SyncSamplingKernels(torch_sampling)


def choose_device_sampling(device: torch.device) -> DeviceSamplingKernels:
    """Return the fastest version whose results stay on the device: Triton on a GPU, the torch definition elsewhere."""
    if device.type != "cuda":
        return torch_sampling
    from serve_llm.kernels.triton import sampling as triton_sampling

    return triton_sampling
