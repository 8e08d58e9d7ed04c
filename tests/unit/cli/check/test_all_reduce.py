"""How the GPUs of a host take part in the check's all-reduce. NCCL and the GPUs are fakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from serve_llm.cli.check import all_reduce
from serve_llm.cli.check.collective import AllReduceResult, AllReduceTask, GpuRankTask

TASK = AllReduceTask(address="10.0.0.1", port=5, size=2, rank=1, own_address="10.0.0.2", interface="eth0")


class RankProcess:
    """Stands in for the process of one GPU, and returns the given findings."""

    found: AllReduceResult
    tasks: list[GpuRankTask]

    def __init__(self, task: GpuRankTask) -> None:
        assert "NCCL_DEBUG" not in os.environ, "only one rank writes a log"
        self.tasks.append(task)

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(self, *error: object) -> None: ...

    def wait(self) -> AllReduceResult:
        return self.found


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)


def reduce(monkeypatch: pytest.MonkeyPatch, found: AllReduceResult) -> AllReduceResult:
    monkeypatch.setattr(RankProcess, "found", found, raising=False)
    monkeypatch.setattr(RankProcess, "tasks", [], raising=False)
    monkeypatch.setattr(all_reduce, "GpuRankProcess", RankProcess)

    def run(task: GpuRankTask) -> AllReduceResult:
        RankProcess.tasks.insert(0, task)
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text(
            "host:1:2 [0] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM\n"
            "host:1:2 [0] NCCL INFO Channel 01 : 2[0] -> 3[1] via SHM/direct/direct\n"
            "host:1:2 [0] NCCL INFO Channel 00/0 : 1[0] -> 2[0] [receive] via NET/Socket/0\n"
        )
        return AllReduceResult(backend="nccl", small_us=10.0, large=5e9)

    monkeypatch.setattr(all_reduce, "reduce_on_gpu", run)
    return all_reduce._reduce_on_gpus(TASK, [2, 3])


def test_every_gpu_of_every_host_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reduce(monkeypatch, AllReduceResult(backend="nccl", small_us=14.0, large=4e9))
    assert [(task.rank, task.size, task.device) for task in RankProcess.tasks] == [(2, 5, 0), (3, 5, 1), (4, 5, 2)]
    assert {(task.address, task.port, task.own_address) for task in RankProcess.tasks} == {("10.0.0.1", 5, "10.0.0.2")}
    assert (found.error, found.small_us, found.large) == ("", 14.0, 4e9), "the slowest rank's"
    assert (found.transport, found.local_transport) == ("NET/Socket", "SHM")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth0"


def test_an_error_of_any_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reduce(monkeypatch, AllReduceResult(backend="nccl", error="GPU 2: its process ended early"))
    assert found.error == "GPU 2: its process ended early"


@pytest.mark.parametrize(("num_gpus", "backends"), [(0, []), (1, []), (2, ["nccl"])])
def test_a_single_host_has_something_to_sum_if_it_has_several_gpus(
    num_gpus: int, backends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_reduce, "connect_store", lambda *_: HashStore())
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(all_reduce, "_reduce_on_gpus", lambda task, counts: AllReduceResult(backend="nccl"))
    task = AllReduceTask(address="127.0.0.1", port=1, size=1, own_address="127.0.0.1")
    assert [result.backend for result in all_reduce.all_reduce(task)] == backends


def test_a_gpu_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: int) -> None:
        raise RuntimeError("invalid device ordinal")

    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    task = GpuRankTask(address="a", port=1, own_address="a", rank=0, size=2, device=7)
    assert all_reduce.reduce_on_gpu(task).error == "GPU 7: invalid device ordinal"
