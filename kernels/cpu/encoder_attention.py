"""Attention of encoders by the compiled kernels. `kernels.encoder_attention` states the contract.

The keys and values of a step are read like a cache whose blocks hold one token each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serve_llm.kernels.cpu.library import Library, Problem
from serve_llm.kernels.rope import Angles, HeadNorms

RopeAndCache = Callable[[Tensor, int, HeadNorms | None, Angles | None, Tensor, Tensor], Tensor]
EncoderKernel = Callable[..., Tensor]


def build_encoder_attention(library: Library, rope_and_cache: RopeAndCache) -> EncoderKernel:
    """rope_and_cache: the compiled one."""
    return CompiledEncoderAttention(library, rope_and_cache)


@dataclass(frozen=True, eq=False)
class _Prompts:
    """The prompts of a step, as the kernel reads them. `problem` points into the arrays, which must live as long."""

    query_starts: Sequence[int]
    starts: np.ndarray
    lengths: np.ndarray
    blocks: np.ndarray
    problem: Problem  # its other fields are those of the last call


class CompiledEncoderAttention:
    """Not thread-safe: all calls share a `Problem`. `query_starts` must not be changed between calls."""

    def __init__(self, library: Library, rope_and_cache: RopeAndCache) -> None:
        self._library = library
        self._rope_and_cache = rope_and_cache
        self._last: _Prompts | None = None  # those of the latest step: its layers share them

    def __call__(
        self,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        norms: HeadNorms | None,
        angles: Angles | None,
        query_starts: Sequence[int],
        *,
        scale: float,
        window: int | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        tokens, width = qkv.shape
        head_dim = width // (heads + 2 * kv_heads)
        queries = heads * head_dim
        prompts = self._last
        if prompts is None or prompts.query_starts is not query_starts:
            prompts = self._last = _describe_prompts(query_starts)
        self._library.keep(prompts)
        problem = prompts.problem
        if norms is None and angles is None:
            cache = qkv
            problem.query = qkv.data_ptr()
            problem.cache = problem.query + queries * qkv.element_size()
            problem.query_token = problem.cache_block = qkv.stride(0)
        else:
            cache = qkv.new_empty((tokens, 2, kv_heads, 1, head_dim))
            qkv = self._rope_and_cache(qkv, heads, norms, angles, cache, torch.arange(tokens))
            problem.query = qkv.data_ptr()
            problem.cache = cache.data_ptr()
            problem.query_token = queries
            problem.cache_block = 2 * kv_heads * head_dim
        output = torch.empty((tokens, queries), dtype=qkv.dtype)
        problem.query_head = problem.cache_head = problem.cache_token = problem.value_dim = head_dim
        problem.cache_part = kv_heads * head_dim
        problem.alibi_slopes = None if alibi_slopes is None else alibi_slopes.data_ptr()
        problem.output = output.data_ptr()
        problem.heads = heads
        problem.kv_heads = kv_heads
        problem.head_dim = head_dim
        problem.window = window or 0
        problem.scale = scale
        problem.bf16 = qkv.dtype == torch.bfloat16
        self._library.attention(ctypes.byref(problem), self._library.variant_index, torch.get_num_threads())
        return output


def _describe_prompts(query_starts: Sequence[int]) -> _Prompts:
    """The keys and values of a step are blocks of one token each, which lie one after the other."""
    starts = np.array(query_starts, np.int32)
    lengths = np.diff(starts)
    blocks = np.add.outer(starts[:-1], np.arange(lengths.max(), dtype=np.int32))
    problem = Problem(
        table=blocks.ctypes.data,
        table_row=blocks.shape[1],
        starts=starts.ctypes.data,
        contexts=lengths.ctypes.data,
        sequences=len(lengths),
    )
    return _Prompts(query_starts, starts, lengths, blocks, problem)
