"""Paged attention: equal to the definition, and the same bits for a row whatever stands around it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from serve_llm.kernels import attention
from serve_llm.kernels.reference import attention as definition

SHAPES = [  # heads, kv_heads, head_dim, block_size
    (6, 3, 7, 8),
    (3, 3, 20, 16),
    (10, 2, 36, 32),
    (7, 1, 80, 256),
    (4, 4, 64, 16),
]
DTYPES = [torch.float32, torch.bfloat16]
BLOCKS = 400


@dataclass
class Sequence:
    """All of one sequence's queries, keys and values, computed beforehand: (length, heads or kv_heads, head_dim)."""

    query: Tensor
    key: Tensor
    value: Tensor

    def __len__(self) -> int:
        return len(self.query)


def make_sequence(length: int, shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int) -> Sequence:
    heads, kv_heads, head_dim, _ = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> Tensor:
        return torch.randn((length, count, head_dim), generator=generator).to(dtype)

    return Sequence(draw(heads) * 2, draw(kv_heads), draw(kv_heads))


class Cache:
    """A strided view into a buffer full of NaN, with a random free list."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, rng: random.Random) -> None:
        _, kv_heads, head_dim, block_size = shape
        flat = torch.full((BLOCKS, 3 * 2 * kv_heads * block_size * head_dim + 5), torch.nan, dtype=dtype)
        inner = 2 * kv_heads * block_size * head_dim
        self.view = flat[:, inner : 2 * inner].unflatten(1, (2, kv_heads, block_size, head_dim))
        self.block_size = block_size
        self.free = list(range(1, BLOCKS))
        rng.shuffle(self.free)

    def table(self, length: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-length // self.block_size))]


def run(
    sequences: list[Sequence],
    shape: tuple[int, int, int, int],
    window: int | None,
    rng: random.Random,
    chunk: int | None = None,
    function=attention.paged_attention,
) -> list[Tensor]:
    """Each sequence's outputs, computed side by side in random chunks of at most `chunk` tokens (None: whole)."""
    dtype = sequences[0].query.dtype
    cache = Cache(shape, dtype, rng)
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
            cache.view[tables[n][:gone]] = torch.nan  # given back: anything may stand there
        parts = [(sequences[n], slice(done[n], done[n] + count)) for n, count in zip(members, counts, strict=True)]
        key, value = torch.cat([s.key[part] for s, part in parts]), torch.cat([s.value[part] for s, part in parts])
        attention.write_cache(key, value, cache.view, torch.tensor(slots))
        lens = [part.stop for _, part in parts]
        query = torch.cat([s.query[part] for s, part in parts])
        result = function(query, cache.view, table, starts, lens, scale=0.3, window=window)
        for n, (first, last) in zip(members, pairwise(starts), strict=True):
            outputs[n].append(result[first:last])
            done[n] += last - first
    return [torch.cat(parts) for parts in outputs]


@pytest.mark.parametrize("window", [None, 1, 19, 150])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_definition(shape: tuple[int, int, int, int], dtype: torch.dtype, window: int | None) -> None:
    sequences = [make_sequence(length, shape, dtype, length) for length in (1, 2, 65, 140)]
    ours = run(sequences, shape, window, random.Random(1))
    theirs = run(sequences, shape, window, random.Random(2), function=definition.paged_attention)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, atol=2e-5 if dtype == torch.float32 else 2e-2, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "threads"), [*((shape, 1) for shape in SHAPES), (SHAPES[2], 3)])
def test_bits_do_not_depend_on_batch_or_chunks(
    shape: tuple[int, int, int, int], dtype: torch.dtype, window: int | None, threads: int
) -> None:
    rng = random.Random(3)
    subject = make_sequence(300, shape, dtype, seed=0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (alone,) = run([subject], shape, window, rng)
        for chunk in (1, 9, 130):
            others = [make_sequence(rng.randint(1, 420), shape, dtype, rng.randrange(1000)) for _ in range(4)]
            together = run([*others[:2], subject, *others[2:]], shape, window, rng, chunk=chunk)
            assert torch.equal(together[2], alone)
    finally:
        torch.set_num_threads(before)


def test_write_cache_equals_the_definition() -> None:
    shape = (6, 3, 7, 8)
    caches = [Cache(shape, torch.float32, random.Random(0)).view.nan_to_num_() for _ in range(2)]
    tokens = make_sequence(30, shape, torch.float32, 0)
    slots = torch.randperm(BLOCKS * 8, generator=torch.Generator().manual_seed(0))[:30]
    attention.write_cache(tokens.key, tokens.value, caches[0], slots)
    definition.write_cache(tokens.key, tokens.value, caches[1], slots)
    assert torch.equal(caches[0], caches[1])
    assert caches[0].count_nonzero() == 2 * tokens.key.numel()
