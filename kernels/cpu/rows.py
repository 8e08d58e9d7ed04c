"""The compiled kernels of rows.cpp. The functions of the same names in `kernels/norm.py`, `rope.py`, `activation.py`
and `linear_int8.py` state the contracts.

A step of one token makes more than a hundred of these calls of a few microseconds each, so they pass plain addresses
and numbers, whose types are declared once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from serve_llm.kernels.cpu.library import DTYPES, Library
from serve_llm.kernels.quantise_int4 import RANGES
from serve_llm.kernels.rope import Angles, HeadNorms

BF16 = torch.bfloat16


class RowKernels:
    """Kernels for CPU tensors. All tensors of a call have one dtype of library.DTYPES."""

    def __init__(self, library: Library) -> None:
        norm = (c_int, c_void_p, c_void_p, c_int, c_void_p, c_float, c_void_p, c_void_p, c_int64, c_int, c_int)
        layer_norm = (c_int, c_void_p, c_void_p, c_int, c_void_p, c_void_p, *norm[5:])
        gated = (c_int, c_void_p, c_int64, c_void_p, c_int64, c_int, c_int)
        elementwise = (c_int, c_void_p, c_void_p, c_int64, c_int)
        qkv = (c_int, c_void_p, c_int64)
        rope = (c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_float)
        query_and_cache = (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int)
        sizes = (c_int, c_int, c_int, c_int, c_int, c_int)
        quantised = (c_int, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int, c_int)
        self._quantise_int4 = library.function(
            "quantise_int4", c_int, c_void_p, c_int64, c_int64, c_int, c_int, c_void_p, c_int, *(c_void_p,) * 3, c_int
        )
        self._quantise_int8 = library.function(
            "quantise_int8", c_int, c_void_p, c_int64, c_int64, c_int, c_void_p, c_void_p, c_int
        )
        self._rms_norm = library.function("rms_norm", *norm)
        self._layer_norm = library.function("layer_norm", *layer_norm)
        self._silu_and_mul = library.function("silu_and_mul", *gated)
        self._gelu_tanh_and_mul = library.function("gelu_tanh_and_mul", *gated)
        self._gelu = library.function("gelu", *elementwise)
        self._gelu_tanh = library.function("gelu_tanh", *elementwise)
        self._compute_angles = library.function(
            "compute_angles", c_void_p, c_int64, c_void_p, c_int, c_float, c_void_p, c_void_p, c_int
        )
        self._rope_and_cache = library.function("rope_and_cache", *qkv, *rope, *query_and_cache, *sizes)
        self._quantise_rows = library.function("quantise_rows", *quantised)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        normed = torch.empty_like(x)
        width = weight.size(0)
        self._rms_norm(
            x.dtype == BF16,
            x.data_ptr(),
            None,
            weight.dtype != BF16,
            weight.data_ptr(),
            eps,
            None,
            normed.data_ptr(),
            x.numel() // width,
            width,
            torch.get_num_threads(),
        )
        return normed

    def add_rms_norm(self, hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        hidden = hidden.contiguous()
        total = delta.contiguous()
        normed = torch.empty_like(hidden)
        width = weight.size(0)
        self._rms_norm(
            hidden.dtype == BF16,
            hidden.data_ptr(),
            total.data_ptr(),
            weight.dtype != BF16,
            weight.data_ptr(),
            eps,
            total.data_ptr(),
            normed.data_ptr(),
            hidden.numel() // width,
            width,
            torch.get_num_threads(),
        )
        return total, normed

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        x = x.contiguous()
        normed = torch.empty_like(x)
        self._normalise_layer(x, None, weight, bias, eps, normed)
        return normed

    def add_layer_norm(
        self, hidden: Tensor, delta: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        hidden = hidden.contiguous()
        total = delta.contiguous()
        normed = torch.empty_like(hidden)
        self._normalise_layer(hidden, total, weight, bias, eps, normed)
        return total, normed

    def _normalise_layer(
        self, x: Tensor, total: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, normed: Tensor
    ) -> None:
        """total: added to x, and overwritten by the sum."""
        added = None if total is None else total.data_ptr()
        given = [one for one in (weight, bias) if one is not None]
        width = x.size(-1)
        self._layer_norm(
            x.dtype == BF16,
            x.data_ptr(),
            added,
            bool(given) and given[0].dtype != BF16,
            None if weight is None else weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            eps,
            added,
            normed.data_ptr(),
            x.numel() // width,
            width,
            torch.get_num_threads(),
        )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._and_mul(self._silu_and_mul, gate_up)

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._and_mul(self._gelu_tanh_and_mul, gate_up)

    def _and_mul(self, kernel: Callable[..., None], gate_up: Tensor) -> Tensor:
        rows = gate_up.size(0)
        width = gate_up.size(1) // 2
        y = gate_up.new_empty((rows, width))
        kernel(
            y.dtype == BF16,
            gate_up.data_ptr(),
            gate_up.stride(0),
            y.data_ptr(),
            rows,
            width,
            torch.get_num_threads(),
        )
        return y

    def gelu(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        self._gelu(x.dtype == BF16, x.data_ptr(), y.data_ptr(), x.numel(), torch.get_num_threads())
        return y

    def gelu_tanh(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        self._gelu_tanh(x.dtype == BF16, x.data_ptr(), y.data_ptr(), x.numel(), torch.get_num_threads())
        return y

    def compute_angles(self, positions: Tensor, frequencies: Tensor, magnitude: float = 1.0) -> Angles:
        positions = positions.contiguous()
        cos, sin = torch.empty((2, len(positions), len(frequencies)))
        self._compute_angles(
            positions.data_ptr(),
            len(positions),
            frequencies.data_ptr(),
            len(frequencies),
            magnitude,
            cos.data_ptr(),
            sin.data_ptr(),
            torch.get_num_threads(),
        )
        return cos, sin

    def rope_and_cache(
        self,
        qkv: Tensor,
        heads: int,
        norms: HeadNorms | None,
        angles: Angles | None,
        cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        tokens = qkv.size(0)
        _, _, kv_heads, block_size, _ = cache.shape
        head_dim = qkv.size(1) // (heads + 2 * kv_heads)
        query = qkv.new_empty((tokens, heads, head_dim))
        cos, sin = (None, None) if angles is None else (angles[0].data_ptr(), angles[1].data_ptr())
        query_norm = None
        key_norm = None
        wide = False
        eps = 0.0
        if norms is not None:
            query_norm = norms.query.data_ptr()
            key_norm = norms.key.data_ptr()
            wide = norms.query.dtype != BF16
            eps = norms.eps
        self._rope_and_cache(
            qkv.dtype == BF16,
            qkv.data_ptr(),
            qkv.stride(0),
            cos,
            sin,
            query_norm,
            key_norm,
            wide,
            eps,
            query.data_ptr(),
            cache.data_ptr(),
            *cache.stride()[:4],
            slots.data_ptr(),
            cache.dtype == torch.int8,
            tokens,
            heads,
            kv_heads,
            head_dim,
            block_size,
            torch.get_num_threads(),
        )
        return query

    def quantise_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        numbers = torch.empty((rows, width), dtype=torch.uint8)
        scales = torch.empty((rows, 1))
        self._quantise_rows(
            x.dtype == BF16,
            x.data_ptr(),
            x.stride(0),
            numbers.data_ptr(),
            scales.data_ptr(),
            rows,
            width,
            torch.get_num_threads(),
        )
        return numbers, scales

    def quantise_int8(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        weight = _with_dense_rows(weight if weight.dtype in DTYPES else weight.float())
        outputs, inputs = weight.shape
        numbers = torch.empty((outputs, inputs), dtype=torch.int8)
        scales = torch.zeros((outputs, 1))
        if inputs:
            self._quantise_int8(
                weight.dtype == BF16,
                weight.data_ptr(),
                weight.stride(0),
                outputs,
                inputs,
                numbers.data_ptr(),
                scales.data_ptr(),
                torch.get_num_threads(),
            )
        return numbers, scales

    def quantise_int4(self, weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
        weight = _with_dense_rows(weight if weight.dtype in DTYPES else weight.float())
        outputs, inputs = weight.shape
        num_groups = -(-inputs // group_size)
        codes = torch.empty((outputs, inputs), dtype=torch.uint8)
        scales = torch.empty((outputs, num_groups))
        zeros = torch.empty((outputs, num_groups))
        ranges = array("f", RANGES)
        if inputs:
            self._quantise_int4(
                weight.dtype == BF16,
                weight.data_ptr(),
                weight.stride(0),
                outputs,
                inputs,
                group_size,
                ranges.buffer_info()[0],
                len(ranges),
                codes.data_ptr(),
                scales.data_ptr(),
                zeros.data_ptr(),
                torch.get_num_threads(),
            )
        return codes, scales, zeros


def _with_dense_rows(weight: Tensor) -> Tensor:
    """The weight, copied if the numbers of a row are not neighbours in memory."""
    return weight if weight.stride(1) == 1 else weight.contiguous()
