"""The compiled kernels of this folder, called through ctypes. The functions of the same names in `kernels/attention.py`
state the contracts.

Kernels have their own threads (pool.cpp), as many as `torch.get_num_threads` returns.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.cpu.call_recorder import BufferPool, CallRecorder, RecordedCall
from serve_llm.kernels.cpu.recorded_operations import RecordedOperations

VARIANTS = ("baseline", "avx2", "avx512", "avx512_bf16", "amx")  # as the library numbers them, slowest first
# The fastest variant that each value of oneDNN's variable allows, for these kernels as for torch's.
LIMIT_VARIABLE = "ONEDNN_MAX_CPU_ISA"
LIMITS = {
    "SSE41": "baseline",
    "AVX": "baseline",
    "AVX2": "avx2",
    "AVX2_VNNI": "avx2",
    "AVX2_VNNI_2": "avx2",
    "AVX512_CORE": "avx512",
    "AVX512_CORE_VNNI": "avx512",
    "AVX512_CORE_BF16": "avx512_bf16",
    "AVX512_CORE_FP16": "avx512_bf16",
    "AVX10_1_512": "avx512_bf16",
}
DTYPES = (torch.bfloat16, torch.float32)
HEAD_DIMS = range(16, 257, 8)
LATENT_DIMS = range(16, 1025, 8)  # supported head_dim of a cache whose values are part of its keys


class Problem(ctypes.Structure):
    """`Problem` in attend.h."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("query_token", ctypes.c_int64),
        ("query_head", ctypes.c_int64),
        ("cache", ctypes.c_void_p),
        ("cache_block", ctypes.c_int64),
        ("cache_part", ctypes.c_int64),
        ("cache_head", ctypes.c_int64),
        ("cache_token", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("table_row", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("contexts", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("alibi_slopes", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("sequences", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("head_dim", ctypes.c_int),
        ("block_shift", ctypes.c_int),
        ("window", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("bf16", ctypes.c_bool),
        ("int8", ctypes.c_bool),
        ("causal", ctypes.c_bool),
    )


class Library:
    """One variant of the kernels.

    Supports queries, keys and values of one type among DTYPES, contiguous, whose head_dim is among HEAD_DIMS or, with a
    value_dim, LATENT_DIMS; and caches of that type or int8.

    variants: those that were compiled, that this processor supports and that ONEDNN_MAX_CPU_ISA allows. missing: faster
    ones that were not compiled.
    """

    def __init__(self, path: Path, variant: str | None = None) -> None:
        """variant: None for the fastest among `variants`. Raises OSError if the file cannot be loaded or has
        no variant that runs here, and ValueError if the variant is unknown, was not compiled, or does not run here."""
        self.compiled = ctypes.CDLL(str(path))
        check_sources(self.compiled, "problem", ctypes.sizeof(Problem))
        check_sources(self.compiled, "recordedcall", ctypes.sizeof(RecordedCall))
        self._recorder: CallRecorder | None = None
        self._operations = RecordedOperations(self.compiled)
        allowed = enumerate(list_allowed_variants(os.environ))
        runnable = [index for index, _ in allowed if self.compiled.serve_llm_supported(index)]
        usable = [index for index in runnable if self.compiled.serve_llm_compiled(index)]
        self.variants = tuple(VARIANTS[index] for index in usable)
        if not usable:
            raise OSError(
                f"{path.name} was compiled for other processors, or {LIMIT_VARIABLE} excludes this one; install again "
                "with CPU_KERNELS=all"
            )
        self.missing = tuple(VARIANTS[index] for index in runnable if index > usable[-1])
        self.variant = self.variants[-1] if variant is None else variant
        if self.variant not in self.variants:
            raise ValueError(f"{path.name} has no variant {variant} for this processor, but {', '.join(self.variants)}")
        self.variant_index = VARIANTS.index(self.variant)
        self.attention = self.shared_function("attention", ctypes.c_void_p, ctypes.c_int, ctypes.c_int)

    @contextmanager
    def record(self, pool: BufferPool) -> Iterator[CallRecorder]:
        """A context that records the kernels of this library that are called. pool: holds their results."""
        repeat = self.compiled.serve_llm_repeat if self.compiled.serve_llm_can_repeat() else None
        with CallRecorder(pool, repeat, self._operations) as recorder:
            self._recorder = recorder
            try:
                yield recorder
            finally:
                self._recorder = None

    def keep(self, value: object) -> None:
        """If calls are being recorded, keep a value whose memory they read."""
        if self._recorder is not None:
            self._recorder.keep(value)

    def function(self, name: str, *arguments: type) -> Callable[..., None]:
        """Return a kernel of rows.cpp in this variant. arguments: ctypes of its parameters."""
        variant = "avx512_bf16" if self.variant == "amx" else self.variant  # rows.cpp has no variant for matrix units
        return self.shared_function(f"{name}_{variant}", *arguments)

    def shared_function(self, name: str, *arguments: type) -> Callable[..., None]:
        """Return a function that serves all variants. arguments: ctypes of its parameters."""
        found = self.compiled[f"serve_llm_{name}"]
        found.argtypes = arguments
        found.restype = None

        def call(*given: object) -> None:
            found(*given)
            if self._recorder is not None:
                self._recorder.add(found, given)

        return call

    def paged_attention(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        value_dim: int | None = None,
        on_device: Lengths | None = None,
        causal: bool = True,
    ) -> Tensor:
        block_stride, part_stride, head_stride, token_stride, _ = cache.stride()
        if value_dim is None:
            value_dim = query.shape[2]
        else:
            part_stride = 0
        output = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype)
        if on_device is None:
            starts = array("i", query_starts)
            contexts = array("i", context_lens)
            starts_address, contexts_address = starts.buffer_info()[0], contexts.buffer_info()[0]
        else:
            starts_address, contexts_address = on_device.query_starts.data_ptr(), on_device.context_lens.data_ptr()
        problem = Problem(
            query=query.data_ptr(),
            query_token=query.stride(0),
            query_head=query.stride(1),
            cache=cache.data_ptr(),
            cache_block=block_stride,
            cache_part=part_stride,
            cache_head=head_stride,
            cache_token=token_stride,
            value_dim=value_dim,
            table=block_table.data_ptr(),
            table_row=block_table.stride(0),
            starts=starts_address,
            contexts=contexts_address,
            sinks=None if sinks is None else sinks.data_ptr(),
            alibi_slopes=None if alibi_slopes is None else alibi_slopes.data_ptr(),
            output=output.data_ptr(),
            sequences=len(context_lens),
            heads=query.shape[1],
            kv_heads=cache.shape[2],
            head_dim=query.shape[2],
            block_shift=cache.shape[3].bit_length() - 1,
            window=window or 0,
            scale=scale,
            softcap=softcap or 0.0,
            bf16=query.dtype == torch.bfloat16,
            int8=cache.dtype == torch.int8,
            causal=causal,
        )
        self.attention(ctypes.byref(problem), self.variant_index, torch.get_num_threads())
        return output


def list_allowed_variants(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variants up to the limit set by oneDNN's variable (case-insensitive); all variants without a limit."""
    limit = LIMITS.get(environ.get(LIMIT_VARIABLE, "").upper())
    return VARIANTS if limit is None else VARIANTS[: VARIANTS.index(limit) + 1]


def check_sources(compiled: ctypes.CDLL, name: str, num_bytes: int) -> None:
    """Raise OSError unless the library's structure of that name, in lower case, has that size."""
    size = getattr(compiled, f"serve_llm_{name}_bytes", None)
    if size is None or size() != num_bytes:
        raise OSError(f"{Path(compiled._name).name} was compiled from other sources; install serve-llm again")


def find(folder: Path = Path(__file__).parent) -> Path | None:
    """Return the file that was compiled at installation, if any."""
    return next(iter(sorted(folder.glob("compiled.*"))), None)


def find_variant() -> str | None:
    """Return the variant that this process uses; None if it uses torch operations."""
    path = find()
    if path is None:
        return None
    try:
        return Library(path).variant
    except (OSError, AttributeError):  # compiled for another processor, or from other sources
        return None
