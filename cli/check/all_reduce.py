"""An all-reduce over all hosts, as tensor-parallel ranks run it: checks that sums are exact, and measures their time.

Uses gloo with one rank per host, and NCCL with one rank per GPU if every host has GPUs; NCCL's log then names its
transports. On a single host, only NCCL has anything to do.

Runs as a separate process (`collective.AllReduceProcess`): importing torch blocks all other threads for seconds, and a
collective that hangs ends only with its process. It starts one more process for each GPU after the first. Opens a store
on the address in argv and writes its port as a line; then reads an `AllReduceTask` and writes its list of
`AllReduceResult`, each as a line of JSON.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from serve_llm.cli.check.collective import LARGE_BYTES, SMALL_BYTES, AllReduceResult, AllReduceTask, GpuRankTask
from serve_llm.cli.check.nccl_log import find_local_transport, find_transport
from serve_llm.common.errors import EngineError, OptionError
from serve_llm.engine.parallel.torch_group import TorchGroup, connect_store, create_store, gather_values

LIMIT_SECONDS = 5.0
NCCL_SECONDS = 60.0  # without persistence mode, the first use of many GPUs takes long, and so does NCCL's start
GPU_RANK = "--gpu-rank"  # instead of an address: run one GPU's part
ODD_SIZES = (1, 7, 1023, 65_537)  # elements


def all_reduce(task: AllReduceTask) -> list[AllReduceResult]:
    """Called on all hosts at the same time. Errors are part of the result."""
    rank = task.rank
    size = task.size
    results: list[AllReduceResult] = []
    backend = "gloo"
    try:
        store = connect_store(task.address, task.port, LIMIT_SECONDS)
        num_gpus = torch.cuda.device_count() if torch.distributed.is_nccl_available() else 0
        counts = [
            int(count) for count in gather_values(store, "gpus", rank, size, str(num_gpus), LIMIT_SECONDS, "node")
        ]
        if size > 1:
            group = TorchGroup(store, "gloo all-reduce", rank, size, task.own_address, LIMIT_SECONDS)
            results.append(_measure(group, backend, rank, "cpu"))
        if min(counts) > 0 and sum(counts) > 1:
            backend = "nccl"
            results.append(_reduce_on_gpus(task, counts))
    except (EngineError, OptionError, OSError) as error:
        results.append(AllReduceResult(backend=backend, error=str(error)))
    return results


def _reduce_on_gpus(task: AllReduceTask, counts: Sequence[int]) -> AllReduceResult:
    """Run the ranks of this host's GPUs. counts: GPUs of each host. Raises OSError."""
    first = sum(counts[: task.rank])
    tasks = [
        GpuRankTask(
            address=task.address,
            port=task.port,
            own_address=task.own_address,
            rank=first + device,
            size=sum(counts),
            device=device,
        )
        for device in range(counts[task.rank])
    ]
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={task.interface}")
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(GpuRankProcess(other)) for other in tasks[1:]]
        log = _enable_nccl_log()
        stack.callback(shutil.rmtree, log.parent, ignore_errors=True)
        own = reduce_on_gpu(tasks[0])
        found = [own, *(other.wait() for other in others)]
        text = log.read_text(errors="replace") if log.exists() else ""
    return AllReduceResult(
        backend="nccl",
        error=next((result.error for result in found if result.error), ""),
        small_us=max(result.small_us for result in found),
        large=min(result.large for result in found),
        transport=find_transport(text) if len(counts) > 1 else "",
        local_transport=find_local_transport(text),
    )


class GpuRankProcess:
    """A process that runs `reduce_on_gpu`."""

    def __init__(self, task: GpuRankTask) -> None:
        self._device = task.device
        command = [sys.executable, "-P", "-m", "serve_llm.cli.check.all_reduce", GPU_RANK]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line = msgspec.json.encode(task).decode() + "\n"

    def __enter__(self) -> GpuRankProcess:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `wait` says that it has ended
            self._process.stdin.write(self._line)
            self._process.stdin.flush()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def wait(self) -> AllReduceResult:
        try:
            output, _ = self._process.communicate(timeout=NCCL_SECONDS)
        except subprocess.TimeoutExpired:
            return AllReduceResult(
                backend="nccl", error=f"GPU {self._device}: did not finish within {NCCL_SECONDS:g} s"
            )
        if not output:
            return AllReduceResult(backend="nccl", error=f"GPU {self._device}: its process ended early")
        return msgspec.json.decode(output, type=AllReduceResult)


def reduce_on_gpu(task: GpuRankTask) -> AllReduceResult:
    """Called for all GPUs at the same time. Errors are part of the result."""
    try:
        torch.cuda.set_device(task.device)
        store = connect_store(task.address, task.port, NCCL_SECONDS)
        group = TorchGroup(store, "NCCL all-reduce", task.rank, task.size, task.own_address, NCCL_SECONDS, "nccl")
        return _measure(group, "nccl", task.rank, f"cuda:{task.device}")
    except (EngineError, OptionError, OSError, RuntimeError) as error:
        return AllReduceResult(backend="nccl", error=f"GPU {task.device}: {error}")


def _enable_nccl_log() -> Path:
    """Make NCCL log to a file, in this process."""
    log = Path(tempfile.mkdtemp(prefix="serve-llm-check-")) / "nccl.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,P2P,SHM", "NCCL_DEBUG_FILE": str(log)}
    return log


def _measure(group: TorchGroup, backend: str, rank: int, device: str) -> AllReduceResult:
    for count in ODD_SIZES:
        # Small integers: their sums are exact in any order and dtype.
        positions = torch.arange(count, device=device) % 31
        total = group.all_reduce((positions + rank).float())
        expected = positions.float() * group.size + sum(range(group.size))
        if not torch.equal(total, expected):
            wrong = int((total != expected).sum())
            return AllReduceResult(backend=backend, error=f"{wrong} of {count} sums are wrong")
    small = torch.zeros(SMALL_BYTES // 4, device=device)
    large = torch.zeros(LARGE_BYTES // 4, device=device)
    return AllReduceResult(
        backend=backend,
        small_us=_median_seconds(lambda: group.all_reduce(small), 50) * 1e6,
        large=LARGE_BYTES / _median_seconds(lambda: group.all_reduce(large), 5),
    )


def _median_seconds(operation: Callable[[], torch.Tensor], times: int) -> float:
    """Every host must run the same number of operations, so their number is fixed rather than the time."""
    durations = []
    for _ in range(times):
        began = time.perf_counter()
        operation().sum().item()  # also waits for a GPU
        durations.append(time.perf_counter() - began)
    return statistics.median(durations)


def main() -> None:
    if sys.argv[1] == GPU_RANK:
        result = reduce_on_gpu(msgspec.json.decode(sys.stdin.readline(), type=GpuRankTask))
        sys.stdout.write(msgspec.json.encode(result).decode())
        sys.stdout.flush()
        os._exit(0)
    store = create_store(sys.argv[1])
    sys.stdout.write(f"{store.port}\n")
    sys.stdout.flush()
    if line := sys.stdin.readline():
        results = all_reduce(msgspec.json.decode(line, type=AllReduceTask))
        sys.stdout.write(msgspec.json.encode(results).decode() + "\n")
        sys.stdout.flush()
    os._exit(0)  # a torch thread may still be waiting for a host that is gone


if __name__ == "__main__":
    main()
