"""This project's Triton kernels: the base on a GPU, which other backends partly override. They support all dtypes, head
sizes and GPUs."""

from __future__ import annotations

from functools import partial

from serve_llm.kernels import linear, linear_fp8
from serve_llm.kernels.backends.backend import Offer
from serve_llm.kernels.linear_fp8_stored import pack_stored_fp8


def offer(batch_invariant: bool) -> Offer:
    """See `Offer`. Lists only activations that have a kernel."""
    try:
        from serve_llm.kernels.triton.activation import ACTIVATIONS
        from serve_llm.kernels.triton.attention import paged_attention
        from serve_llm.kernels.triton.delta_rule import gated_delta_rule
        from serve_llm.kernels.triton.fp8 import quantise_blocks, quantise_rows
        from serve_llm.kernels.triton.linear import pack, pack_heads
        from serve_llm.kernels.triton.linear_grouped import pack_grouped, pack_int8
        from serve_llm.kernels.triton.lora import TritonLoRASlots
        from serve_llm.kernels.triton.moe import pack_experts
        from serve_llm.kernels.triton.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
        from serve_llm.kernels.triton.rope import rope_and_cache, rope_and_latent
    except ImportError as error:
        return f"Triton's kernels cannot be imported: {error}"
    pack_grouped = partial(pack_grouped, batch_invariant=batch_invariant)
    stored_fp8 = partial(
        pack_stored_fp8, pack_grouped=pack_grouped, quantise_rows=quantise_rows, quantise_blocks=quantise_blocks
    )
    return {
        "paged_attention": partial(paged_attention, batch_invariant=batch_invariant),
        "rms_norm": rms_norm,
        "add_rms_norm": add_rms_norm,
        "layer_norm": layer_norm,
        "add_layer_norm": add_layer_norm,
        "rope_and_cache": rope_and_cache,
        "rope_and_latent": rope_and_latent,
        "gated_delta_rule": gated_delta_rule,
        "activations": ACTIVATIONS,
        "pack": pack if batch_invariant else linear.pack,
        "pack_int8": partial(pack_int8, batch_invariant=batch_invariant),
        "pack_grouped": pack_grouped,
        "pack_stored_fp8": None if batch_invariant else stored_fp8,
        "pack_heads": pack_heads if batch_invariant else linear.pack_heads,
        "pack_fp8": partial(linear_fp8.pack_fp8, quantise=quantise_rows),
        "pack_experts": partial(pack_experts, batch_invariant=batch_invariant),
        "allocate_lora_slots": TritonLoRASlots,
        "capturable": True,
    }
