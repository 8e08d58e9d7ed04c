"""Sums, gathers and links through shared memory, between threads and between processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from serve_llm.common.errors import PeerLost
from serve_llm.engine.parallel import shm_group
from serve_llm.engine.parallel.groups import ProcessGroup
from serve_llm.engine.parallel.shm import ChannelClosed
from serve_llm.engine.parallel.shm_group import CompiledGroup, ShmGroup, ShmLink
from serve_llm.engine.parallel.shm_ring import ShmRingBuffer
from serve_llm.kernels.cpu import library
from support.matrix import mostly_slow

COMPILED = library.find()
needs_compiled = pytest.mark.skipif(COMPILED is None, reason="without a compiled library")

T = TypeVar("T")
LIMIT = 120.0


def on_all(size: int, capacity: int, work: Callable[[ShmGroup], T]) -> list[T]:
    """Return the result of `work` on each rank; ranks are threads, each with its own view of the rings."""
    rings = [ShmRingBuffer.create(size - 1, capacity) for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        groups = [ShmGroup(rings, rank) for rank in range(size)]
        return [future.result(LIMIT) for future in [pool.submit(work, group) for group in groups]]


def values(rank: int, rows: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, 96, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("capacity", [64, 1000, 1 << 20])  # 64: far smaller than a row
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_adds_in_rank_order_and_rounds_once(size: int, capacity: int, dtype: torch.dtype) -> None:
    inputs = [values(rank, 5, dtype) for rank in range(size)]
    expected = inputs[0].float()
    for x in inputs[1:]:
        expected = expected + x.float()
    for _ in range(2):
        for found in on_all(size, capacity, lambda group: group.all_reduce(inputs[group.rank].clone())):
            assert found.dtype == dtype and torch.equal(found, expected.to(dtype))


def test_a_rows_sum_does_not_depend_on_the_others() -> None:
    whole = on_all(3, 4096, lambda group: group.all_reduce(values(group.rank, 33, torch.bfloat16)))
    row = on_all(3, 4096, lambda group: group.all_reduce(values(group.rank, 33, torch.bfloat16)[7:8].contiguous()))
    for rank in range(3):
        assert torch.equal(whole[0], whole[rank]) and torch.equal(whole[rank][7:8], row[rank])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_all_gather_gives_everyone_their_own_copies(dtype: torch.dtype) -> None:
    def work(group: ShmGroup) -> tuple[Tensor, list[Tensor]]:
        x = torch.full((2, 3), group.rank, dtype=dtype)
        parts = group.all_gather(x)
        x.fill_(9)
        return x, parts

    for _, parts in on_all(3, 256, work):
        assert [part.tolist() for part in parts] == [[[rank] * 3] * 2 for rank in range(3)]


ROWS = [[2, 0, 5], [1, 3, 0], [0, 40, 0]]  # from rank to rank


@pytest.mark.parametrize("capacity", [64, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_to_all_brings_each_its_rows_in_rank_order(capacity: int, dtype: torch.dtype) -> None:
    inputs = [values(rank, sum(ROWS[rank]), dtype) for rank in range(3)]
    expected = [torch.cat([inputs[a].split(ROWS[a])[b] for a in range(3)]) for b in range(3)]
    back = [list(column) for column in zip(*ROWS, strict=True)]

    def work(group: ShmGroup) -> tuple[Tensor, Tensor]:
        arrived = group.all_to_all(inputs[group.rank], ROWS)
        return arrived, group.all_to_all(arrived, back)

    for rank, (arrived, returned) in enumerate(on_all(3, capacity, work)):
        assert torch.equal(arrived, expected[rank]) and torch.equal(returned, inputs[rank])


def test_all_to_all_without_rows() -> None:
    found = on_all(2, 64, lambda group: group.all_to_all(torch.empty(0, 7), [[0, 0], [0, 0]]))
    assert [tuple(arrived.shape) for arrived in found] == [(0, 7)] * 2


def test_an_empty_tensor_has_an_empty_sum() -> None:
    assert [found.shape for found in on_all(2, 64, lambda group: group.all_reduce(torch.empty(0, 4)))] == [(0, 4)] * 2


def test_links_are_deep_and_in_order() -> None:
    ring = ShmRingBuffer.create(1, 1 << 16)
    link = ShmLink(ring, torch.bfloat16)
    sent = [values(number, 1 + number, torch.bfloat16) for number in range(4)]
    for x in sent:
        copy = x.clone()
        link.send(copy)  # nobody receives yet
        copy.zero_()
    for x in sent:
        assert torch.equal(link.receive(tuple(x.shape)), x)


@needs_compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_compiled_group_has_the_same_bits(dtype: torch.dtype) -> None:
    def work(group: ProcessGroup) -> tuple[Tensor, list[Tensor]]:
        x = values(group.rank, 300, dtype)  # beyond a slot
        return group.all_reduce(x.clone()), group.all_gather(x.t())

    def compiled(rank: int) -> tuple[Tensor, list[Tensor]]:
        return work(shm_group.build_shm_group(rings, rank))

    rings = [ShmRingBuffer.create(2, 1 << 14) for _ in range(3)]
    assert isinstance(shm_group.build_shm_group(rings, 0), CompiledGroup)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(compiled, range(3)))
    for (total, parts), (expected, expected_parts) in zip(found, on_all(3, 1 << 14, work), strict=True):
        assert total.dtype == dtype and torch.equal(total, expected)
        assert len(parts) == 3 and all(map(torch.equal, parts, expected_parts))


def test_without_a_library_that_fits_torch_adds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rings = [ShmRingBuffer.create(1, 64) for _ in range(2)]
    (tmp_path / "compiled.so").write_text("none")
    for path in (None, tmp_path / "compiled.so"):
        monkeypatch.setattr(library, "find", lambda path=path: path)
        assert isinstance(shm_group.build_shm_group(rings, 0), ShmGroup)


@needs_compiled
def test_the_compiled_group_names_a_silent_rank_and_ends_when_closed() -> None:
    rings = [ShmRingBuffer.create(1, 1 << 10) for _ in range(2)]
    assert COMPILED is not None
    with pytest.raises(PeerLost, match="heard nothing from rank 1 of its tensor-parallel group for 0 s"):
        CompiledGroup(COMPILED, rings, 0, seconds=0.01).all_reduce(torch.ones(3))
    for ring in rings:
        ring.close()
    with pytest.raises(ChannelClosed):
        CompiledGroup(COMPILED, rings, 0).all_gather(torch.ones(3))


def test_closing_ends_an_exchange() -> None:
    rings = [ShmRingBuffer.create(1, 64) for _ in range(2)]
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(ShmGroup(rings, 0).all_reduce, torch.ones(3))
        for ring in rings:
            ring.close()
        with pytest.raises(ChannelClosed):
            found.result(LIMIT)


RANK = """
import sys, torch
from serve_llm.engine.parallel.shm_ring import ShmRingBuffer
from serve_llm.engine.parallel.shm import ShmHandle
from serve_llm.engine.parallel.shm_group import ShmGroup, build_shm_group
kind = {"ShmGroup": ShmGroup, "build_shm_group": build_shm_group}[sys.argv.pop()]
pid, rank, *places = sys.argv[1:]
rings = [ShmRingBuffer.open(ShmHandle(int(pid), *map(int, place.split(":")))) for place in places]
group = kind(rings, int(rank))
total = torch.zeros(700)
for number in range(50):
    total = group.all_reduce(torch.full((700,), float(rank) + number))
print(total.unique().tolist(), [part.tolist() for part in group.all_gather(torch.tensor([int(rank)]))])
"""


@pytest.mark.parametrize("kind", mostly_slow(["ShmGroup", "build_shm_group"], ["build_shm_group"]))
def test_processes(kind: str) -> None:
    rings = [ShmRingBuffer.create(2, 512) for _ in range(3)]
    places = [f"{ring.memory.handle.fd}:{ring.memory.handle.size}" for ring in rings]
    command = [sys.executable, "-P", "-c", RANK, str(os.getpid())]
    processes = [
        subprocess.Popen([*command, str(rank), *places, kind], stdout=subprocess.PIPE, text=True) for rank in range(3)
    ]
    for process in processes:
        assert process.communicate(timeout=LIMIT)[0] == f"[{3 + 3 * 49}.0] [[0], [1], [2]]\n"
