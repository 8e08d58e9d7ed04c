"""An all-reduce over all hosts, as tensor-parallel ranks do it: whether the sums are exact, and how long they take.

Uses gloo, and NCCL as well if every host has a GPU; NCCL's log then names its transport. One rank per host.

Runs as a process of its own (`collective.AllReduceProcess`): importing torch blocks all other threads for seconds, and
a collective that hangs ends only with its process. Opens a store on the address in argv and writes its port as a line;
then reads an `AllReduceTask` and writes its list of `AllReduceResult`, each as a line of JSON.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from serve_llm.cli.check.collective import LARGE_BYTES, SMALL_BYTES, AllReduceResult, AllReduceTask
from serve_llm.cli.check.nccl_log import find_transport
from serve_llm.common.errors import EngineError, OptionError
from serve_llm.engine.parallel.torch_group import TorchGroup, connect_store, create_store, gather_values

LIMIT_SECONDS = 5.0
ODD_SIZES = (1, 7, 1023, 65_537)  # elements


def all_reduce(task: AllReduceTask) -> list[AllReduceResult]:
    """Called on all hosts at the same time. Errors are part of the result."""
    rank, size = task.rank, task.size
    results: list[AllReduceResult] = []
    backend = "gloo"
    try:
        store = connect_store(task.address, task.port, LIMIT_SECONDS)
        has_gpu = "yes" if torch.cuda.is_available() and torch.distributed.is_nccl_available() else "no"
        all_have_gpus = set(gather_values(store, "gpus", rank, size, has_gpu, LIMIT_SECONDS, who="node")) == {"yes"}
        group = TorchGroup(store, "gloo all-reduce", rank, size, task.own_address, LIMIT_SECONDS)
        results.append(_measure(group, backend, rank, "cpu"))
        if all_have_gpus:
            backend = "nccl"
            log = _enable_nccl_log(task.interface)
            group = TorchGroup(store, "NCCL all-reduce", rank, size, task.own_address, 4 * LIMIT_SECONDS, "nccl")
            result = _measure(group, backend, rank, "cuda:0")
            transport = find_transport(log.read_text(errors="replace"))
            results.append(msgspec.structs.replace(result, transport=transport))
            shutil.rmtree(log.parent, ignore_errors=True)
    except (EngineError, OptionError, OSError) as error:
        results.append(AllReduceResult(backend=backend, error=str(error)))
    return results


def _enable_nccl_log(interface: str) -> Path:
    """Make NCCL log to a file, and use the checked interface unless the user chose another one."""
    log = Path(tempfile.mkdtemp(prefix="serve-llm-check-")) / "nccl.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH", "NCCL_DEBUG_FILE": str(log)}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
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
    """Every host must run the same number of operations, so the number is fixed and not the time."""
    durations = []
    for _ in range(times):
        began = time.perf_counter()
        operation().sum().item()  # also waits for a GPU
        durations.append(time.perf_counter() - began)
    return statistics.median(durations)


def main() -> None:
    store = create_store(sys.argv[1])
    sys.stdout.write(f"{store.port}\n")
    sys.stdout.flush()
    if line := sys.stdin.readline():
        results = all_reduce(msgspec.json.decode(line, type=AllReduceTask))
        sys.stdout.write(msgspec.json.encode(results).decode() + "\n")
        sys.stdout.flush()
    os._exit(0)  # a thread of torch may still wait for a host that is gone


if __name__ == "__main__":
    main()
