"""Sequences in a paged KV cache, without a model: for tests of attention kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from serve_llm.kernels import attention
from serve_llm.kernels.cpu.library import Library
from serve_llm.kernels.cpu.rows import RowKernels

Shape = tuple[int, int, int, int]  # heads, kv_heads, head_dim, block_size
TOKENS = 4000  # tokens for which a cache has room


@dataclass
class Sequence:
    """All of one sequence's queries, keys and values, computed beforehand: (length, heads or kv_heads, head_dim)."""

    query: Tensor
    key: Tensor
    value: Tensor

    def __len__(self) -> int:
        return len(self.query)


def make_sequence(length: int, shape: Shape, dtype: torch.dtype, seed: int) -> Sequence:
    heads, kv_heads, head_dim, _ = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Tensor:
        return torch.randn((length, count, head_dim), generator=generator).to(dtype)

    return Sequence(draw(heads) * 2, draw(kv_heads), draw(kv_heads))


class Cache:
    """A strided view into a buffer full of NaN, with a random free list. dtype: torch.int8 for rows of `cache_int8`.
    parts: 1 if the values are part of the keys."""

    def __init__(self, shape: Shape, dtype: torch.dtype, rng: random.Random, parts: int = 2) -> None:
        _, kv_heads, head_dim, block_size = shape
        blocks, width = TOKENS // block_size, head_dim + (4 if dtype == torch.int8 else 0)
        self.nothing = -1 if dtype == torch.int8 else torch.nan  # four bytes of -1 are a NaN scale
        flat = torch.full((blocks, 3 * parts * kv_heads * block_size * width + 5), self.nothing, dtype=dtype)
        inner = parts * kv_heads * block_size * width
        self.view = flat[:, inner : 2 * inner].unflatten(1, (parts, kv_heads, block_size, width))
        self.block_size = block_size
        self.free = list(range(1, blocks))
        rng.shuffle(self.free)

    def table(self, length: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-length // self.block_size))]


class Compiled:
    """One variant of the compiled kernels under the names of `kernels.attention`."""

    def __init__(self, library: Library) -> None:
        self.paged_attention = library.paged_attention
        self._rope_and_cache = RowKernels(library).rope_and_cache

    def write_cache(self, key: Tensor, value: Tensor | None, cache: Tensor, slots: Tensor) -> None:
        if value is None:  # there is no compiled version
            attention.write_cache(key, None, cache, slots)
            return
        qkv = torch.cat((key, key, value), 1).flatten(1)  # with each token's keys in place of its queries
        self._rope_and_cache(qkv, key.shape[1], None, None, cache, slots)


def run(
    sequences: list[Sequence],
    shape: Shape,
    window: int | None,
    rng: random.Random,
    chunk: int | None = None,
    kernels: Any = attention,
    int8: bool = False,
    **how: Any,
) -> list[Tensor]:
    """Return each sequence's outputs, computed together in random chunks of at most `chunk` tokens (None: whole). how:
    more arguments of `paged_attention`."""
    is_latent = how.get("value_dim") is not None
    cache = Cache(shape, torch.int8 if int8 else sequences[0].query.dtype, rng, parts=1 if is_latent else 2)
    tables = [cache.table(len(sequence)) for sequence in sequences]
    done = [0] * len(sequences)
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    while any(done[n] < len(s) for n, s in enumerate(sequences)):
        members = [n for n, s in enumerate(sequences) if done[n] < len(s) and (chunk is None or rng.random() < 0.7)]
        if not members:
            continue
        counts = [len(sequences[n]) - done[n] if chunk is None else rng.randint(1, chunk) for n in members]
        counts = [min(count, len(sequences[n]) - done[n]) for n, count in zip(members, counts, strict=True)]
        starts = [0]
        table = torch.zeros((len(members), max(len(tables[n]) for n in members)), dtype=torch.int32)
        slots = []
        for row, (n, count) in enumerate(zip(members, counts, strict=True)):
            starts.append(starts[-1] + count)
            used = -(-(done[n] + count) // cache.block_size)
            gone = 0 if window is None else max(0, done[n] - window + 1) // cache.block_size
            table[row, gone:used] = torch.tensor(tables[n][gone:used], dtype=torch.int32)
            positions = range(done[n], done[n] + count)
            slots += [tables[n][p // cache.block_size] * cache.block_size + p % cache.block_size for p in positions]
            cache.view[tables[n][:gone]] = cache.nothing  # freed: may contain anything
        parts = [(sequences[n], slice(done[n], done[n] + count)) for n, count in zip(members, counts, strict=True)]
        key, value = torch.cat([s.key[part] for s, part in parts]), torch.cat([s.value[part] for s, part in parts])
        kernels.write_cache(key, None if is_latent else value, cache.view, torch.tensor(slots))
        lens = [part.stop for _, part in parts]
        query = torch.cat([s.query[part] for s, part in parts])
        result = kernels.paged_attention(query, cache.view, table, starts, lens, scale=0.3, window=window, **how)
        for n, (first, last) in zip(members, pairwise(starts), strict=True):
            outputs[n].append(result[first:last])
            done[n] += last - first
    return [torch.cat(parts) for parts in outputs]
