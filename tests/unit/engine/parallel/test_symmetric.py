"""Which sums go through symmetric memory and which through NCCL, with fakes; and how torch's operators are called."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from serve_llm.common.errors import OptionError
from serve_llm.engine.parallel import symmetric
from serve_llm.engine.parallel.symmetric import ONE_SHOT_BYTES, SYMMETRIC_BYTES, SymmetricGroup, TorchMemory
from support.ranks import Meeting, MemoryGroup, run_together

CPU = torch.device("cpu")
WIDTH = 1024  # values per row


class Shared:
    """The memory of all ranks of a group."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.buffer = torch.zeros(SYMMETRIC_BYTES, dtype=torch.uint8)
        self.calls: list[tuple[str, int]] = []
        self._meeting, self._rank = meeting, rank

    def one_shot(self, part: Tensor, x: Tensor) -> None:
        assert x.storage_offset() * x.element_size() % 16 == 0, "a thread would load from where it cannot"
        self.calls.append(("one shot", x.nbytes))
        part.copy_(x)
        x.copy_(self._sum(part))

    def in_place(self, part: Tensor) -> None:
        self.calls.append(("in place", part.nbytes))
        part.copy_(self._sum(part))

    def _sum(self, part: Tensor) -> Tensor:
        assert part.data_ptr() == self.buffer.data_ptr()
        total = torch.zeros_like(part)
        for x in self._meeting.exchange(self._rank, "symmetric", part):
            total += x
        return total


class Ranks:
    def __init__(self, size: int) -> None:
        self.meeting = Meeting(size)
        self.memories = [Shared(self.meeting, rank) for rank in range(size)]
        self.groups = [
            SymmetricGroup(MemoryGroup(self.meeting, rank), memory) for rank, memory in enumerate(self.memories)
        ]

    def all_reduce(self, xs: list[Tensor]) -> list[Tensor]:
        return run_together(len(xs), lambda rank: self.groups[rank].all_reduce(xs[rank]), self.meeting.abort)


@pytest.mark.parametrize(
    ("rows", "dtype", "way"),
    [
        (1, torch.bfloat16, "one shot"),
        (ONE_SHOT_BYTES // WIDTH // 2, torch.bfloat16, "one shot"),
        (ONE_SHOT_BYTES // WIDTH // 2 + 1, torch.bfloat16, "in place"),
        (ONE_SHOT_BYTES // WIDTH // 4, torch.float32, "one shot"),
        (SYMMETRIC_BYTES // WIDTH // 4, torch.float32, "in place"),
        (SYMMETRIC_BYTES // WIDTH // 4 + 1, torch.float32, None),
        (3, torch.float16, None),
    ],
)
def test_the_way_follows_from_size_and_dtype(rows: int, dtype: torch.dtype, way: str | None) -> None:
    ranks = Ranks(2)
    xs = [torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(2)]
    wanted = (xs[0].float() + xs[1].float()).to(dtype)
    for found in ranks.all_reduce([x.clone() for x in xs]):
        assert torch.equal(found, wanted)
    size = rows * WIDTH * xs[0].element_size()
    assert [memory.calls for memory in ranks.memories] == [[] if way is None else [(way, size)]] * 2
    assert any("all_reduce" in call for call in ranks.meeting.calls) == (way is None)


def test_one_after_the_other_through_the_same_memory() -> None:
    """Leftovers of a larger sum do not get into a smaller one, and no result is a view of the buffer."""
    ranks = Ranks(3)
    kept = []
    for number, rows in enumerate((200, 1, 70, 2)):
        wanted = torch.full((rows, WIDTH), 3.0 * number)
        found = ranks.all_reduce([torch.full((rows, WIDTH), float(number + rank - 1)) for rank in range(3)])
        kept += [(one, wanted) for one in found]
    assert all(torch.equal(one, wanted) for one, wanted in kept)
    assert [way for way, _ in ranks.memories[0].calls] == ["in place", "one shot", "in place", "one shot"]


def test_odd_sizes_and_places() -> None:
    ranks = Ranks(2)
    odd = [torch.full((1, 3), rank + 1.0) for rank in range(2)]  # 12 bytes
    assert all(found.tolist() == [[3.0] * 3] for found in ranks.all_reduce(odd))
    assert ranks.memories[0].calls == []
    shifted = [torch.full((5 + rank,), rank + 1.0)[1 + rank :].view(1, 4) for rank in range(2)]
    assert all(found.tolist() == [[3.0] * 4] for found in ranks.all_reduce(shifted))
    assert ranks.memories[0].calls == [("one shot", 16)]
    assert ranks.all_reduce([torch.empty(0, 4), torch.empty(0, 4)])[1].shape == (0, 4)
    gathered = run_together(2, lambda rank: ranks.groups[rank].all_gather(torch.tensor([rank])), ranks.meeting.abort)
    assert torch.cat(gathered[1]).tolist() == [0, 1]


def test_joining_registers_the_group_that_operators_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Torchs:
        @staticmethod
        def empty_strided_p2p(size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
            seen.append((size, stride, device))
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

        @staticmethod
        def rendezvous(buffer: Tensor, name: str) -> SimpleNamespace:
            found = c10d._resolve_process_group(name)
            seen.append((found.rank(), found.size(), name))
            return SimpleNamespace(multicast_ptr=4096)

    monkeypatch.setattr(c10d, "_SymmetricMemory", Torchs)
    store = c10d.HashStore()
    group = symmetric.build_symmetric_group(store, "group of stage 3", MemoryGroup(Meeting(4), 2), ["here"] * 4, CPU)
    assert seen == [((SYMMETRIC_BYTES,), (1,), CPU), (2, 4, "group of stage 3, symmetric memory")]
    assert (group.rank, group.size) == (2, 4)
    memory = group._memory
    assert isinstance(memory, TorchMemory) and memory.by_switch and memory.buffer.nbytes == SYMMETRIC_BYTES


def test_gpus_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"--all-reduce: symmetric needs each .* group on one host, not on 2; use"):
        symmetric.build_symmetric_group(
            c10d.HashStore(), "group of stage 0", MemoryGroup(Meeting(2), 0), ["a", "b"], CPU
        )
    # A CPU has no symmetric memory, and torch reports that.
    with pytest.raises(OptionError, match=r"--all-reduce: symmetric: .* cannot map each other's memory .*; use nccl"):
        symmetric.build_symmetric_group(
            c10d.HashStore(), "group of stage 9", MemoryGroup(Meeting(2), 0), ["a", "a"], CPU
        )


class Liar(Shared):
    """Memory whose sums are wrong."""

    def in_place(self, part: Tensor) -> None:
        super().in_place(part)
        part[-1] += 1


FASTER = {64: [8.0, 14.0], 1024: [20.0, 30.0], 8192: [70.0, 80.0]}


def fastest(
    memories: list[Shared], meeting: Meeting, micros: dict[int, list[float]], monkeypatch: pytest.MonkeyPatch
) -> list[SymmetricGroup | MemoryGroup]:
    """Return the choice of each rank. micros: times of symmetric memory and of the other group, by the size of the sum
    in KiB."""
    groups = [MemoryGroup(meeting, rank) for rank in range(meeting.size)]

    def build(store: object, name: str, group: MemoryGroup, *_: object) -> SymmetricGroup:
        return SymmetricGroup(group, memories[group.rank])

    monkeypatch.setattr(symmetric, "build_symmetric_group", build)

    def measure(group: object, num_bytes: int, device: object) -> float:
        return micros[num_bytes >> 10][isinstance(group, MemoryGroup)]

    monkeypatch.setattr(symmetric, "measure_micros", measure)
    store = c10d.HashStore()
    return run_together(
        meeting.size,
        lambda rank: symmetric.build_fastest_group(store, "stage 0", groups[rank], ["a"] * meeting.size, CPU),
        meeting.abort,
    )


def test_auto_takes_what_is_faster_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(2)
    with caplog.at_level("INFO"):
        found = fastest(ranks.memories, ranks.meeting, FASTER, monkeypatch)
        assert [group.max_bytes for group in found if isinstance(group, SymmetricGroup)] == [SYMMETRIC_BYTES] * 2
        assert "symmetric memory up to 10240 KiB: 64 KiB in 8.0 us, by NCCL in 14.0 us; 1024 KiB in" in caplog.text
        ranks = Ranks(2)
        found = fastest(ranks.memories, ranks.meeting, FASTER | {64: [14.0, 8.0]}, monkeypatch)
    assert all(isinstance(group, MemoryGroup) for group in found) and "it is not faster (64 KiB" in caplog.text


def test_auto_leaves_large_sums_to_nccl_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2)
    ranks.groups = fastest(ranks.memories, ranks.meeting, FASTER | {8192: [90.0, 80.0]}, monkeypatch)  # type: ignore[assignment]
    for num_bytes, calls in ((4 << 20, 1), ((4 << 20) + WIDTH, 0)):
        ranks.memories[0].calls.clear()
        ranks.all_reduce([torch.ones(num_bytes // 4) for _ in range(2)])
        assert len(ranks.memories[0].calls) == calls


def test_auto_takes_no_group_that_adds_wrongly_on_any_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    meeting = Meeting(3)
    memories = [Shared(meeting, 0), Liar(meeting, 1), Shared(meeting, 2)]
    with caplog.at_level("INFO"):
        found = fastest(memories, meeting, FASTER, monkeypatch)
    assert all(isinstance(group, MemoryGroup) for group in found)
    assert "not symmetric memory: 1 of 131080 sums in torch.bfloat16 are wrong on rank 1" in caplog.text


def test_auto_falls_back_where_memory_cannot_be_mapped(caplog: pytest.LogCaptureFixture) -> None:
    group = MemoryGroup(Meeting(1), 0)
    with caplog.at_level("INFO"):
        assert symmetric.build_fastest_group(c10d.HashStore(), "stage 1", group, ["a"], CPU) is group
    assert "cannot map each other's memory" in caplog.text


def test_times_are_of_the_group() -> None:
    meeting = Meeting(1)
    assert symmetric.measure_micros(MemoryGroup(meeting, 0), 64, CPU, repeats=3) > 0 and len(meeting.calls) == 8


def test_eight_ranks_have_a_larger_buffer() -> None:
    assert [symmetric.buffer_bytes(size) >> 20 for size in (2, 4, 8)] == [10, 10, 64]


@pytest.mark.parametrize(("by_switch", "in_place"), [(True, "multimem_all_reduce_"), (False, "two_shot_all_reduce_")])
def test_operators_are_called_as_they_are_declared(
    by_switch: bool, in_place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {
        "one_shot_all_reduce_copy_out": ["symm_buffer", "local_input", "reduce_op", "group_name", "out"],
        in_place: ["input", "reduce_op", "group_name"],
    }
    called: list[tuple[str, tuple[Any, ...]]] = []
    for name, names in arguments.items():
        schema = str(getattr(torch.ops.symm_mem, name).default._schema)
        assert re.findall(r"(\w+)[,)]", schema.partition(" ->")[0]) == names
    fake = SimpleNamespace(**{name: lambda *args, name=name: called.append((name, args)) for name in arguments})
    monkeypatch.setattr(torch.ops, "symm_mem", fake)
    memory = TorchMemory(torch.empty(0), "a group", None, by_switch)  # type: ignore[arg-type]
    part, x = torch.zeros(2), torch.ones(2)
    memory.one_shot(part, x)
    memory.in_place(part)
    assert called == [
        ("one_shot_all_reduce_copy_out", (part, x, "sum", "a group", x)),
        (in_place, (part, "sum", "a group")),
    ]
