"""Three processes over 127.0.0.1 run everything once; the tests check the results of each."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from serve_llm.common.errors import EngineError, OptionError
from serve_llm.engine.parallel import torch_group

RANKS = 3
RANK = """
import os, sys, torch
from serve_llm.common.errors import EngineError
from serve_llm.engine.parallel.groups import SingleRankGroup
from serve_llm.engine.parallel.torch_group import TorchGroup, build_hierarchical_group
from serve_llm.engine.parallel.torch_group import connect_store, create_store, gather_values

rank, folder, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if rank == 0:
    store = create_store("127.0.0.1", seconds=20)
    print(store.port, flush=True)
else:
    store = connect_store("127.0.0.1", port, 20)
got = {"gathered": gather_values(store, "names", rank, 3, f"I am {rank}")}
group = TorchGroup(store, "tensor 0", rank, 3, "127.0.0.1", 20)
hosts = ["a", "a", "b"]
local = TorchGroup(store, "on host a", rank, 2, "127.0.0.1", 20) if rank < 2 else SingleRankGroup()
spanning = build_hierarchical_group(store, "spanning", rank, hosts, local, "127.0.0.1", 20)
for dtype in (torch.float32, torch.bfloat16):
    x = torch.load(f"{folder}/x{rank}").to(dtype)
    for name, one in (("sum", group), ("spanning", spanning)):
        got[name, dtype] = one.all_reduce(x.clone())
        got[name, dtype, "rows"] = torch.cat([one.all_reduce(row.clone()[None]) for row in x])
got["all"] = group.all_gather(torch.tensor([rank, rank + 10]))
rows = [[1, 0, 2], [0, 0, 3], [4, 0, 0]]
sent = torch.arange(sum(rows[rank]) * 2, dtype=torch.bfloat16).view(-1, 2) + 100 * rank
got["to all"] = group.all_to_all(sent, rows)
got["to all, none"] = group.all_to_all(sent[:0], [[0] * 3] * 3)
got["spanning all"] = spanning.all_gather(torch.tensor([[rank == 1]]))
if rank < 2:
    link = group.link(rank + 1, torch.float16)
    for number in range(7):
        x = torch.full((2, 3), float(10 * rank + number), dtype=torch.float16)
        link.send(x)
        x.fill_(-1)
if rank > 0:
    link = group.link(rank - 1, torch.float16)
    got["received"] = [link.receive((2, 3)) for number in range(7)]
gather_values(store, "done", rank, 3)
if rank < 2:  # the last one is gone without a word
    for _ in range(2):
        try:
            group.all_reduce(torch.ones(3))
        except EngineError as error:
            got["error"] = str(error)
torch.save(got, f"{folder}/got{rank}")
os._exit(0)  # gloo's threads may abort an orderly exit
"""


@pytest.fixture(scope="module")
def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(37, 65) * 10**rank for rank in range(RANKS)]


@pytest.fixture(scope="module")
def got(tmp_path_factory: pytest.TempPathFactory, inputs: list[torch.Tensor]) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    for rank, x in enumerate(inputs):
        torch.save(x, folder / f"x{rank}")
    processes = [start(0, folder, 0)]
    assert processes[0].stdout is not None
    port = int(processes[0].stdout.readline())
    processes += [start(rank, folder, port) for rank in (2, 1)]
    for process in processes:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    return [torch.load(folder / f"got{rank}") for rank in range(RANKS)]


def start(rank: int, folder: Path, port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", RANK, str(rank), str(folder), str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["sum", "spanning"])
def test_sums_in_rank_order_rounded_once(
    got: list[dict[Any, Any]], inputs: list[torch.Tensor], name: str, dtype: torch.dtype
) -> None:
    first, second, third = (x.to(dtype).float() for x in inputs)
    expected = ((first + second) + third).to(dtype)
    assert not torch.equal(expected, (first + (second + third)).to(dtype)) or dtype == torch.bfloat16
    for result in got:
        assert torch.equal(result[name, dtype], expected)
        assert torch.equal(result[name, dtype, "rows"], expected)


def test_gathers_in_rank_order(got: list[dict[Any, Any]]) -> None:
    for result in got:
        assert result["gathered"] == ["I am 0", "I am 1", "I am 2"]
        assert [part.tolist() for part in result["all"]] == [[0, 10], [1, 11], [2, 12]]
        assert [part.tolist() for part in result["spanning all"]] == [[[False]], [[True]], [[False]]]


def test_all_to_all_in_rank_order(got: list[dict[Any, Any]]) -> None:
    expected = [
        [[0, 1], [200, 201], [202, 203], [204, 205], [206, 207]],
        [],
        [[2, 3], [4, 5], [100, 101], [102, 103], [104, 105]],
    ]
    for result, arrived in zip(got, expected, strict=True):
        assert result["to all"].tolist() == arrived
        assert result["to all, none"].shape == (0, 2)


def test_links_keep_order_and_what_was_sent(got: list[dict[Any, Any]]) -> None:
    for rank in (1, 2):
        values = [float(10 * (rank - 1) + number) for number in range(7)]
        assert [x.unique().tolist() for x in got[rank]["received"]] == [[value] for value in values]


def test_a_lost_rank_is_an_error_that_names_the_group(got: list[dict[Any, Any]]) -> None:
    for result in got[:2]:
        assert result["error"].startswith("tensor 0: all-gather failed on rank")


def test_nccl_connects_before_the_first_operation_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake group only: NCCL needs a GPU."""
    backend = Mock()
    monkeypatch.setattr(torch_group, "_nccl", lambda *_: backend)
    torch_group.TorchGroup(HashStore(), "tensor 0", 0, 1, "127.0.0.1", 5.0, "nccl", device="cpu")
    ((tensors,), _) = backend.allreduce.call_args
    assert tensors[0].nbytes == 4 and backend.allreduce.return_value.wait.called
    backend.allreduce.return_value.wait.side_effect = RuntimeError("no route to host")
    with pytest.raises(EngineError, match=r"^tensor 1: connecting failed on rank 0 of 1 .*: no route to host"):
        torch_group.TorchGroup(HashStore(), "tensor 1", 0, 1, "127.0.0.1", 5.0, "nccl", device="cpu")


def test_who_has_not_arrived() -> None:
    store = torch_group.create_store("127.0.0.1")
    store.set("start/2", "here")
    with pytest.raises(EngineError, match=r"^start: node 0, 3 of 0 to 3 missing after 0.05 s$"):
        torch_group.gather_values(store, "start", 1, 4, seconds=0.05, who="node")


def test_master_that_comes_late_or_never() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(EngineError, match=rf"no answer from the master at 127.0.0.1 port {port} within 0.2 s"):
            torch_group.connect_store("127.0.0.1", port, 0.2)
        with pytest.raises(OptionError, match=f"cannot listen on 127.0.0.1 port {port}"):
            torch_group.create_store("127.0.0.1", port)


def test_lost_master() -> None:
    code = (
        "from serve_llm.engine.parallel.torch_group import create_store; s = create_store('127.0.0.1'); print(s.port); "
    )
    command = [sys.executable, "-P", "-uc", code + "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as master:
        assert master.stdout is not None
        store = torch_group.connect_store("127.0.0.1", int(master.stdout.readline()), 5)
        master.kill()
        began = time.monotonic()
        with pytest.raises(EngineError, match="start: the connection to the master is lost"):
            torch_group.gather_values(store, "start", 1, 2, seconds=60)
        assert time.monotonic() - began < 30
