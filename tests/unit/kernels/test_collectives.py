"""Compiled sums and gathers have the definition's bits, for any number of ranks and sizes, and waits can be
interrupted."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.collectives import Collectives, RankTimeout, WindowClosed

COMPILED = library.find()
pytestmark = pytest.mark.skipif(COMPILED is None, reason="without a compiled library")
T = TypeVar("T")
LIMIT = 120.0
HEADER = 192


class Windows:
    """Memory of one process in place of shared memory; ranks are threads."""

    def __init__(self, size: int, slot_bytes: int) -> None:
        self.bytes = HEADER + 2 * slot_bytes
        self._memory = torch.zeros(size, self.bytes // 64 + 2, 64, dtype=torch.uint8)
        self.addresses = [-(-part.data_ptr() // 64) * 64 for part in self._memory]

    def rank(self, rank: int, seconds: float = LIMIT) -> Collectives:
        assert COMPILED is not None
        return Collectives(COMPILED, self.addresses, self.bytes, rank, seconds)

    def close(self) -> None:
        ctypes.c_uint32.from_address(self.addresses[-1]).value = 1

    def on_all(self, work: Callable[[Collectives, int], T]) -> list[T]:
        ranks = range(len(self.addresses))
        with ThreadPoolExecutor(len(ranks)) as pool:
            return [one.result(LIMIT) for one in [pool.submit(work, self.rank(rank), rank) for rank in ranks]]


def numbers(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return numbers of very different magnitudes, so that the order of additions matters."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    scale = torch.randint(-6, 6, (count,), generator=generator).float().exp2()
    return (torch.randn(count, generator=generator) * scale).to(dtype)


def summed(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("slot_bytes", [64, 1 << 16])  # pieces with few numbers; from 8 KiB on each rank adds a share
def test_sums_have_the_bits_of_the_definition(size: int, dtype: torch.dtype, slot_bytes: int) -> None:
    counts = [1, 31, 33, 896, 257, 0, 5] + ([4096, 4097, 2048, 16385, 40001, 7] if slot_bytes > 64 else [])

    def work(collectives: Collectives, rank: int) -> list[Tensor]:
        inputs = [numbers(rank, count, dtype) for count in counts]
        for x in inputs:
            collectives.all_reduce(x)
        return inputs

    expected = [summed([numbers(rank, count, dtype) for rank in range(size)]) for count in counts]
    for found in Windows(size, slot_bytes).on_all(work):
        for x, wanted in zip(found, expected, strict=True):
            assert torch.equal(x, wanted)


def test_rounding_to_bfloat16_is_torchs() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    first = bits.view(torch.bfloat16)
    second = torch.tensor([2**-9, -0.0, 3e38, 1.0]).bfloat16()
    for addend in second:
        inputs = [first.clone(), addend.expand(1 << 16).contiguous()]
        expected = summed(inputs)
        found = Windows(2, 1 << 14).on_all(lambda collectives, rank, x=inputs: (collectives.all_reduce(x[rank]), x)[1])
        real = ~expected.isnan()
        assert torch.equal(found[0][0].isnan(), expected.isnan())
        assert torch.equal(found[0][0][real].view(torch.int16), expected[real].view(torch.int16))


def test_a_numbers_sum_does_not_depend_on_how_many_there_are() -> None:
    def work(collectives: Collectives, rank: int) -> bool:
        whole, part = numbers(rank, 9000, torch.bfloat16), numbers(rank, 9000, torch.bfloat16)[1234:1300].clone()
        collectives.all_reduce(whole)
        collectives.all_reduce(part)
        return torch.equal(whole[1234:1300], part)

    assert Windows(3, 1 << 15).on_all(work) == [True] * 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("slot_bytes", [64, 1 << 16])
def test_gathers(dtype: torch.dtype, slot_bytes: int) -> None:
    shapes = [(3,), (0, 4), (5, 67), (1, 1)]

    def work(collectives: Collectives, rank: int) -> list[list[Tensor]]:
        return [list(collectives.all_gather(torch.full(shape, 1 + rank).to(dtype))) for shape in shapes]

    for found in Windows(3, slot_bytes).on_all(work):
        for shape, parts in zip(shapes, found, strict=True):
            for rank, part in enumerate(parts):
                assert torch.equal(part, torch.full(shape, 1 + rank).to(dtype))


def test_sums_and_gathers_of_all_sizes_take_turns() -> None:
    """Slots are reused at once: a rank that runs ahead must not overwrite what another one still reads."""

    def work(collectives: Collectives, rank: int) -> bool:
        right = True
        for turn in range(300):
            count = (1, 700, 5000)[turn % 3]
            x = torch.full((count,), float(rank + turn))
            collectives.all_reduce(x)
            right &= bool((x == 6 + 4 * turn).all())
            if turn % 5 == rank:  # a different one is late each time
                time.sleep(0)
            right &= collectives.all_gather(torch.tensor([rank * turn])).flatten().tolist() == [
                other * turn for other in range(4)
            ]
        return right

    assert Windows(4, 1 << 13).on_all(work) == [True] * 4


def test_closing_ends_a_wait_that_sleeps() -> None:
    windows = Windows(2, 64)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(windows.rank(0).all_reduce, torch.ones(3))
        sleepers = ctypes.c_uint32.from_address(windows.addresses[1] + 128)
        deadline = time.monotonic() + LIMIT
        while not sleepers.value:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        windows.close()
        with pytest.raises(WindowClosed):
            found.result(LIMIT)


def test_a_late_rank_wakes_the_one_that_sleeps_and_waiting_takes_no_core() -> None:
    windows = Windows(2, 64)

    def wait() -> tuple[Tensor, float]:
        x = torch.ones(3)
        began = time.thread_time()
        windows.rank(0).all_reduce(x)
        return x, time.thread_time() - began

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(wait)
        time.sleep(0.5)
        windows.rank(1).all_reduce(torch.ones(3))
        x, cpu_seconds = found.result(LIMIT)
    assert x.tolist() == [2.0] * 3
    assert cpu_seconds < 0.05


def test_a_silent_rank_is_named() -> None:
    with pytest.raises(RankTimeout) as found:
        Windows(2, 64).rank(0, seconds=0.01).all_gather(torch.ones(3))
    assert found.value.rank == 1


def test_windows_without_room_and_other_libraries_are_refused(tmp_path: Path) -> None:
    assert COMPILED is not None
    with pytest.raises(ValueError, match="too small"):
        Collectives(COMPILED, [0, 0], HEADER + 100, 0, LIMIT)
    libc = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line)
    with pytest.raises(OSError, match="other sources"):
        Collectives(Path(libc), [0, 0], 4096, 0, LIMIT)
