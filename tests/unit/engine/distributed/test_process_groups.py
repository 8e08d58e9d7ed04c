"""The groups and links that a rank on a GPU builds; fakes of torch's groups record how they are made."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from serve_llm.common.errors import OptionError
from serve_llm.engine.config import Config
from serve_llm.engine.distributed import messages, process_groups
from serve_llm.engine.parallel import symmetric, torch_group
from serve_llm.engine.parallel.groups import ProcessGroups, SingleRankGroup
from serve_llm.engine.parallel.layout import ParallelLayout
from support.config import CONFIG

STORE = object()


class Torchs:
    """A fake `TorchGroup` that records how it was made."""

    def __init__(
        self,
        store: object,
        name: str,
        rank: int,
        size: int,
        address: str,
        seconds: float = 60.0,
        backend: str = "gloo",
        in_order: bool = False,
    ) -> None:
        assert store is STORE
        self.name, self.rank, self.size = name, rank, size
        self.address, self.backend, self.in_order = address, backend, in_order

    def link(self, other: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Any, ...]:
        return self, other, dtype, str(device)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_group, "TorchGroup", Torchs)
    monkeypatch.setattr(torch_group, "connect_store", lambda *_: STORE)
    monkeypatch.setattr(process_groups._GroupBuilder, "check_gpus", lambda self: None)
    monkeypatch.setattr(process_groups, "find_interface", lambda address: f"eth of {address}")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # so that monkeypatch restores it
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")


def build(
    grid: ParallelLayout, rank: int, address: str = "", hosts: list[str] | None = None, **fields: Any
) -> ProcessGroups:
    on_gpu: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "batch_invariant": False}
    config: Config = replace(CONFIG, **on_gpu | fields)
    group_hosts = [hosts[peer] if hosts else "here" for peer in grid.tp_group(rank)]
    span = messages.Rendezvous(group_hosts, "127.0.0.1", 1)
    rings = messages.RankRings([], None, None)
    steps = messages.StepsUrl("tcp://127.0.0.1:1")
    begin = messages.InitWorker(config, "{}", grid.size, rank, "info", steps, rings, span)
    return process_groups.build_process_groups(grid, rank, begin, address)


def build_experts(address: str, **fields: Any) -> tuple[Torchs, Callable[[], object]]:
    """Build the expert-parallel group of rank 1 in engine 2 of 3."""
    engines = {"data_parallel_size": 3, "data_parallel_rank": 2, "enable_expert_parallel": True}
    setup = messages.ExpertGroupSetup([], "10.0.0.1", 5)
    group, wait_for_all = process_groups.build_expert_group(setup, replace(CONFIG, **engines | fields), 1, address)
    assert isinstance(group, Torchs)
    assert (group.name, group.rank, group.size) == ("expert-parallel group of rank 1", 2, 3)
    assert group.address == address
    return group, wait_for_all


def test_experts_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch_group, "gather_values", lambda *given, **more: waited.append((*given, more)))
    group, wait_for_all = build_experts("10.0.0.3", device="cpu")
    assert group.backend == "gloo" and "NCCL_SOCKET_IFNAME" not in os.environ
    group, _ = build_experts("10.0.0.3", device="cuda")
    assert group.backend == "nccl" and os.environ["NCCL_SOCKET_IFNAME"] == "=eth of 10.0.0.3"
    wait_for_all()
    limits = {"seconds": messages.LOAD_SECONDS, "who": "engine"}
    assert waited == [(STORE, "expert-parallel group of rank 1: weights", 2, 3, limits)]


def test_experts_on_the_gpus_of_one_host() -> None:
    group, _ = build_experts(messages.LOOPBACK, device="cuda")
    assert group.backend == "nccl" and "NCCL_SOCKET_IFNAME" not in os.environ


def test_two_ranks_on_one_gpu_are_an_error() -> None:
    process_groups.check_own_gpus(["GPU-a", "GPU-b", "GPU-c"])
    with pytest.raises(
        OptionError, match=r"^rank 1 and rank 3 have the same GPU \(GPU-b\), and each rank needs its own"
    ):
        process_groups.check_own_gpus(["GPU-a", "GPU-b", "GPU-c", "GPU-b"])


def test_a_rank_waits_until_all_have_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[Any, ...]] = []

    def gather_values(*given: Any, seconds: float) -> list[str]:
        waited.append((*given, seconds))
        return ["True", others, "True", given[-1]]

    monkeypatch.setattr(torch_group, "gather_values", gather_values)
    others = "True"
    assert build(ParallelLayout(2, 2), 3).wait_for_all(True)
    assert waited == [(STORE, "weights", 3, 4, "True", messages.LOAD_SECONDS)]
    assert not build(ParallelLayout(2, 2), 3).wait_for_all(False)
    others = "False"
    assert not build(ParallelLayout(2, 2), 3).wait_for_all(True)
    alone = build(ParallelLayout(1, 1), 0, device="cpu")
    assert alone.wait_for_all(True) and not alone.wait_for_all(False)
    assert len(waited) == 3, "ranks on CPUs wait for each other in shared memory"


def test_gpus_of_their_own_meet_by_nccl() -> None:
    found = build(ParallelLayout(2, 2), 2)
    group = found.tensor
    assert isinstance(group, Torchs)
    assert (group.name, group.rank, group.size) == ("tensor-parallel group of stage 1", 0, 2)
    assert (group.backend, group.in_order, group.address) == ("nccl", False, messages.LOOPBACK)
    assert found.next is None
    pair, other, *how = found.previous  # type: ignore[misc]
    assert (pair.name, pair.rank, pair.size, pair.backend) == ("link from rank 0 to rank 2", 1, 2, "nccl")
    assert (other, how) == (0, [torch.bfloat16, "cuda"])


def test_sums_in_rank_order_where_they_must_not_depend_on_sizes() -> None:
    group = build(ParallelLayout(2, 1), 1, batch_invariant=True).tensor
    assert isinstance(group, Torchs) and group.in_order and group.rank == 1


def test_a_rank_alone_in_its_stage() -> None:
    found = build(ParallelLayout(1, 2), 0)
    assert isinstance(found.tensor, SingleRankGroup) and found.next is not None


@pytest.mark.parametrize(("address", "name"), [("", None), ("10.0.0.3", "=eth of 10.0.0.3")])
def test_nccl_is_told_the_network_between_hosts(address: str, name: str | None) -> None:
    build(ParallelLayout(2, 1), 0, address)
    assert os.environ.get("NCCL_SOCKET_IFNAME") == name


def test_symmetric_memory_stands_before_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(symmetric, "build_symmetric_group", lambda *given: made.append(given))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    build(ParallelLayout(2, 2), 2, hosts=["a", "a", "b", "c"], all_reduce="symmetric")
    ((store, name, group, hosts, device),) = made
    assert (store, name, hosts) == (STORE, "tensor-parallel group of stage 1", ["b", "c"])
    assert isinstance(group, Torchs) and group.backend == "nccl" and device == torch.device("cuda", 5)


def test_auto_tries_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(symmetric, "build_fastest_group", lambda store, name, *_: tried.append(name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    build(ParallelLayout(2, 1), 0, all_reduce="auto")
    assert tried == ["tensor-parallel group of stage 0"]
