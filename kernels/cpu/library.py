"""The compiled kernels of this folder, called by ctypes. Contracts stand at the functions of the same names in
`kernels/attention.py`.

torch is imported first, so that the library finds torch's OpenMP already loaded and shares its threads.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from serve_llm.kernels.attention import Lengths

VARIANTS = ("baseline", "avx2", "avx512", "avx512_bf16")  # as the library numbers them, slowest first
DTYPES = (torch.bfloat16, torch.float32)
HEAD_DIMS = range(16, 257, 8)
LATENT_DIMS = range(16, 1025, 8)  # head_dim of a cache whose values are a part of its keys


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
    )


class Library:
    """One variant of the kernels.

    For queries, keys and values of one type among DTYPES whose head_dim is among HEAD_DIMS or, with a value_dim,
    LATENT_DIMS, and contiguous, and caches of that type or int8.
    """

    def __init__(self, path: Path, variant: str | None = None) -> None:
        """variant: None for the fastest that this processor runs. Raises OSError if the file cannot be loaded, and
        ValueError if the variant is unknown, was not compiled, or does not run here."""
        self.compiled = ctypes.CDLL(str(path))
        check_sources(self.compiled, Problem)
        self.compiled.serve_llm_attention.restype = None
        compiled = VARIANTS[: self.compiled.serve_llm_variants()]
        self.variants = tuple(v for n, v in enumerate(compiled) if self.compiled.serve_llm_supported(n))
        self.variant = self.variants[-1] if variant is None else variant
        if self.variant not in self.variants:
            raise ValueError(f"{path.name} has no variant {variant} for this processor, but {', '.join(self.variants)}")
        self.number = VARIANTS.index(self.variant)

    def function(self, name: str, *arguments: type) -> Callable[..., None]:
        """A kernel of rows.cpp in this variant. arguments: ctypes of what it takes."""
        found = self.compiled[f"serve_llm_{name}_{self.variant}"]
        found.argtypes, found.restype = arguments, None
        return found

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
        value_dim: int | None = None,
        on_device: Lengths | None = None,
    ) -> Tensor:
        block, part, *rest = cache.stride()[:4]
        if value_dim is None:
            value_dim = query.shape[2]
        else:
            part = 0
        output = torch.empty((*query.shape[:2], value_dim), dtype=query.dtype)
        starts, contexts = array("i", query_starts), array("i", context_lens)
        block_size = cache.shape[3]
        problem = Problem(
            *(query.data_ptr(), query.stride(0), query.stride(1)),
            *(cache.data_ptr(), block, part, *rest, value_dim),
            *(block_table.data_ptr(), block_table.stride(0)),
            *(starts.buffer_info()[0], contexts.buffer_info()[0]),
            *(None if sinks is None else sinks.data_ptr(), output.data_ptr()),
            *(len(contexts), query.shape[1], cache.shape[2], query.shape[2]),
            *(block_size.bit_length() - 1, window or 0, scale, softcap or 0.0),
            *(query.dtype == torch.bfloat16, cache.dtype == torch.int8),
        )
        self.compiled.serve_llm_attention(ctypes.byref(problem), self.number, torch.get_num_threads())
        return output


def check_sources(compiled: ctypes.CDLL, structure: type[ctypes.Structure]) -> None:
    """Raises OSError unless the library has the structure, and of that size, which it tells in a function."""
    size = getattr(compiled, f"serve_llm_{structure.__name__.lower()}_bytes", None)
    if size is None or size() != ctypes.sizeof(structure):
        raise OSError(f"{Path(compiled._name).name} was compiled from other sources; install serve-llm again")


def find(folder: Path = Path(__file__).parent) -> Path | None:
    """The file that was compiled at installation, if it was."""
    return next(iter(sorted(folder.glob("compiled.*"))), None)
