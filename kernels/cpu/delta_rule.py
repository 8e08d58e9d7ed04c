"""The compiled kernel of delta_rule.cpp. `kernels.delta_rule` states the contract."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from operator import add

import torch
from torch import Tensor

from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.cpu.library import Library
from serve_llm.kernels.delta_rule import DeltaRule, DraftCounts


class Layer(ctypes.Structure):
    """`Layer` in delta_rule.cpp."""

    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("qkv_token", ctypes.c_int64),
        ("gates", ctypes.c_void_p),
        ("gates_token", ctypes.c_int64),
        ("conv", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("decay_bias", ctypes.c_void_p),
        ("key_heads", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("cache_slot", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("contexts", ctypes.c_void_p),
        ("accepted", ctypes.c_void_p),
        ("drafts", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("mixed", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        *(
            (name, ctypes.c_int)
            for name in ("sequences", "heads", "num_key_heads", "key_dim", "value_dim", "row", "kernel", "channels")
        ),
    )


class DeltaRuleKernel:
    """For CPU tensors of a dtype of library.DTYPES, whose rows are contiguous."""

    def __init__(self, library: Library) -> None:
        """Raises AttributeError if the library was compiled from older sources."""
        self._run = library.function("gated_delta_rule", ctypes.c_int, ctypes.c_void_p, ctypes.c_int)

    def gated_delta_rule(
        self,
        qkv: Tensor,
        gates: Tensor,
        layer: DeltaRule,
        cache: Tensor,
        slots: Sequence[int],
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        *,
        drafts: DraftCounts | None = None,
        on_device: Lengths | None = None,
    ) -> Tensor:
        drafts = drafts or DraftCounts.none(len(slots))
        tokens = len(qkv)
        heads = layer.heads
        kernel, channels = layer.conv.shape
        own_slots = array("q", slots)
        starts = array("i", query_starts)
        contexts = array("i", context_lens)
        accepted = array("i", drafts.accepted)
        new_drafts = array("i", drafts.new)
        rows = array("i", map(add, starts, accumulate(accepted, initial=0)))
        mixed = torch.empty((rows[-1], 2 * layer.num_key_heads * layer.key_dim + heads * layer.row))
        factors = torch.empty((rows[-1], 2 * heads))
        output = torch.empty((tokens, heads, layer.value_dim), dtype=qkv.dtype)
        call = Layer(
            qkv=qkv.data_ptr(),
            qkv_token=qkv.stride(0),
            gates=gates.data_ptr(),
            gates_token=gates.stride(0),
            conv=layer.conv.data_ptr(),
            decay=layer.decay.data_ptr(),
            decay_bias=layer.decay_bias.data_ptr(),
            key_heads=layer.key_heads.data_ptr(),
            cache=cache.data_ptr(),
            cache_slot=cache.stride(0),
            slots=own_slots.buffer_info()[0],
            starts=starts.buffer_info()[0],
            contexts=contexts.buffer_info()[0],
            accepted=accepted.buffer_info()[0],
            drafts=new_drafts.buffer_info()[0],
            rows=rows.buffer_info()[0],
            mixed=mixed.data_ptr(),
            factors=factors.data_ptr(),
            output=output.data_ptr(),
            sequences=len(contexts),
            heads=heads,
            num_key_heads=layer.num_key_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            row=layer.row,
            kernel=kernel,
            channels=channels,
        )
        self._run(qkv.dtype == torch.bfloat16, ctypes.addressof(call), torch.get_num_threads())
        return output
