"""An all-reduce over all hosts, as tensor-parallel ranks do it: are the sums exact, how long do they take.

Over gloo, and over NCCL when every host has a GPU; then NCCL's log says over what its packets go. One rank per host.

A process of its own, started by `collective.Process`: importing torch stops all other threads for seconds, and a
collective that hangs ends only with its process. It opens a store on the address that it is given and writes the port,
reads a `Reduce` and writes its list of `Collective`, each a line.
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

from serve_llm.engine.check.collective import LARGE, SMALL, Collective, Reduce
from serve_llm.engine.check.nccl_log import transport
from serve_llm.engine.errors import EngineError, OptionError
from serve_llm.engine.parallel.torch_group import TorchGroup, gather, host_store, join_store

LIMIT_SECONDS = 5.0
_ODD_SIZES = (1, 7, 1023, 65_537)  # elements


def run(task: Reduce) -> list[Collective]:
    """Called by all hosts. What goes wrong is in the result."""
    rank, size = task.rank, task.size
    found: list[Collective] = []
    backend = "gloo"
    try:
        shared = join_store(task.address, task.port, LIMIT_SECONDS)
        here = "yes" if torch.cuda.is_available() and torch.distributed.is_nccl_available() else "no"
        gpus = set(gather(shared, "gpus", rank, size, here, LIMIT_SECONDS, who="node")) == {"yes"}
        group = TorchGroup(shared, "gloo all-reduce", rank, size, task.own_address, LIMIT_SECONDS)
        found.append(_measure(group, backend, rank, "cpu"))
        if gpus:
            backend = "nccl"
            log = _log_nccl(task.interface)
            group = TorchGroup(shared, "NCCL all-reduce", rank, size, task.own_address, 4 * LIMIT_SECONDS, "nccl")
            result = _measure(group, backend, rank, "cuda:0")
            found.append(msgspec.structs.replace(result, transport=transport(log.read_text(errors="replace"))))
            shutil.rmtree(log.parent, ignore_errors=True)
    except (EngineError, OptionError, OSError) as error:
        found.append(Collective(backend=backend, error=str(error)))
    return found


def _log_nccl(interface: str) -> Path:
    """Make NCCL write down what it does, and use the interface that the check is about unless the user says another."""
    log = Path(tempfile.mkdtemp(prefix="serve-llm-check-")) / "nccl.log"
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH", "NCCL_DEBUG_FILE": str(log)}
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    return log


def _measure(group: TorchGroup, backend: str, rank: int, device: str) -> Collective:
    for count in _ODD_SIZES:
        # Small whole numbers: sums are exact in any order, in every type.
        positions = torch.arange(count, device=device) % 31
        total = group.all_reduce((positions + rank).float())
        expected = positions.float() * group.size + sum(range(group.size))
        if not torch.equal(total, expected):
            wrong = int((total != expected).sum())
            return Collective(backend=backend, error=f"{wrong} of {count} sums are wrong")
    small, large = (torch.zeros(size // 4, device=device) for size in (SMALL, LARGE))
    return Collective(
        backend=backend,
        small_us=_median_seconds(lambda: group.all_reduce(small), 50) * 1e6,
        large=LARGE / _median_seconds(lambda: group.all_reduce(large), 5),
    )


def _median_seconds(operation: Callable[[], torch.Tensor], times: int) -> float:
    """Every host does the same number of them: a limit of time would differ from host to host."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        operation().sum().item()  # waits for a GPU as well
        found.append(time.perf_counter() - began)
    return statistics.median(found)


if __name__ == "__main__":
    store = host_store(sys.argv[1])
    sys.stdout.write(f"{store.port}\n")
    sys.stdout.flush()
    if line := sys.stdin.readline():
        found = run(msgspec.json.decode(line, type=Reduce))
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
        sys.stdout.flush()
    os._exit(0)  # a thread in torch may wait for a host that is gone
