"""The compiled sampling kernels, called by ctypes. Contracts: `kernels.sampling.SamplingKernels`."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from serve_llm.kernels.cpu.library import Library, check_sources
from serve_llm.kernels.sampling import Draw, Logprobs


class Matrix(ctypes.Structure):
    """`Matrix` in sampling.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("bf16", ctypes.c_bool),
    )

    @classmethod
    def from_tensor(cls, logits: Tensor) -> Matrix:
        if logits.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"logits are float32 or bfloat16, not {logits.dtype}")
        rows, columns = logits.shape
        row_bytes = logits.stride(0) * logits.element_size()
        return cls(logits.data_ptr(), row_bytes, rows, columns, logits.dtype == torch.bfloat16)


class CpuSamplingKernels:
    """One variant of the kernels."""

    def __init__(self, library: Library) -> None:
        """Raises OSError if the library was compiled from other sources."""
        check_sources(library.compiled, "matrix", ctypes.sizeof(Matrix))
        check_sources(library.compiled, "draw", len(Draw._fields) * ctypes.sizeof(ctypes.c_double))
        self._variant_index = library.variant_index
        self._sample = library.compiled.serve_llm_choose
        self._argmax = library.compiled.serve_llm_likeliest
        self._top_k = library.compiled.serve_llm_largest
        self._logprobs = library.compiled.serve_llm_logprobs
        self._apply_masks = library.compiled.serve_llm_apply_masks
        for function in (self._sample, self._argmax, self._top_k, self._logprobs, self._apply_masks):
            function.restype = None

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        wanted = array("d", chain.from_iterable(draws))
        chosen = array("q", bytes(8 * len(draws)))
        self._call(self._sample, logits, _address(wanted), _address(chosen))
        return chosen.tolist()

    def logprobs(self, logits: Tensor, ids: Sequence[int], k: int) -> list[Logprobs]:
        rows = len(ids)
        k = min(k, logits.shape[1])
        wanted = array("q", ids)
        found = array("d", bytes(8 * rows))
        ranks = array("i", bytes(4 * rows))
        top_ids = array("i", bytes(4 * rows * k))
        top_found = array("d", bytes(8 * rows * k))
        results = [_address(numbers) for numbers in (found, ranks, top_ids, top_found)]
        self._call(self._logprobs, logits, _address(wanted), k, *results)
        if 0 in ranks:
            raise ValueError("logits are not finite")
        spans = [slice(row * k, (row + 1) * k) for row in range(rows)]
        return [
            Logprobs(logprob, rank, top_ids[span].tolist(), top_found[span].tolist())
            for logprob, rank, span in zip(found, ranks, spans, strict=True)
        ]

    def argmax(self, logits: Tensor) -> Tensor:
        chosen = torch.empty(len(logits), dtype=torch.int64)
        self._call(self._argmax, logits, ctypes.c_void_p(chosen.data_ptr()))
        return chosen

    def top_k(self, logits: Tensor, k: int) -> list[Tensor]:
        ids = torch.empty(logits.shape, dtype=torch.int32)
        counts = array("i", bytes(4 * len(logits)))
        self._call(self._top_k, logits, k, ctypes.c_void_p(ids.data_ptr()), _address(counts))
        return [row[:count].long() for row, count in zip(ids, counts, strict=True)]

    def apply_masks(self, scores: Tensor, rows: Sequence[int], masks: Tensor) -> None:
        assert scores.stride(1) == 1 or scores.shape[1] == 1, "the mask would go into a copy"
        wanted = array("q", rows)
        masks = masks.contiguous()
        self._call(self._apply_masks, scores, _address(wanted), ctypes.c_void_p(masks.data_ptr()), len(wanted))

    def _call(self, function: ctypes._FuncPointer, logits: Tensor, *arguments: object) -> None:
        if logits.stride(1) != 1 and logits.shape[1] > 1:
            logits = logits.contiguous()
        matrix = Matrix.from_tensor(logits)
        function(ctypes.byref(matrix), *arguments, self._variant_index, torch.get_num_threads())


def _address(numbers: array) -> ctypes.c_void_p:  # type: ignore[type-arg]
    return ctypes.c_void_p(numbers.buffer_info()[0])
