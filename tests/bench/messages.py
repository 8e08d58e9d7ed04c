"""Measure communication between ranks: a step's message and its answer, through shared memory on one host and through
the encrypted channel to other hosts (here over the loopback interface, so without a network), and all-reduces.

Run: PYTHONPATH=tests python -m bench.messages [--ranks 2] [--count 2000] [--ray] [--python]. Prints a table of us, then
one JSON line. --ray: also with ranks that are Ray actors on this host, which should cost the same as processes.
--python: all-reduces without the compiled library, and the all-to-all between engines that share experts, through
shared memory and through gloo over the loopback interface. Needs as many free cores as ranks; on a busy machine the
figures mostly show how busy it is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch

from serve_llm.common.curve_zmq import Endpoint
from serve_llm.engine.distributed.messages import LOOPBACK
from serve_llm.engine.distributed.ray.discovery import LOCAL, local_cluster_settings
from serve_llm.engine.distributed.step_channels import (
    ShmStepChannel,
    ShmStepReceiver,
    SocketStepChannel,
    SocketStepReceiver,
)
from serve_llm.engine.parallel.groups import AllToAllGroup
from serve_llm.engine.parallel.shm import ChannelClosed, ShmHandle
from serve_llm.engine.parallel.shm_group import ShmGroup, build_shm_group
from serve_llm.engine.parallel.shm_ring import ShmRingBuffer
from serve_llm.engine.parallel.torch_group import TorchGroup, connect_store, create_store
from support.nodes import free_port

STEP_BYTES, ANSWER_BYTES = 2000, 200  # about the size for 32 running sequences
SHAPES = ((1, 896), (8, 896), (32, 896), (256, 896), (2048, 896))
TOKENS = (1, 32, 256)  # tokens of each engine
RING_BYTES = 1 << 20
WARM_UP = 50


def microseconds(count: int, work: Callable[[], object]) -> list[float]:
    found = []
    for _ in range(WARM_UP + count):
        began = time.perf_counter()
        work()
        found.append((time.perf_counter() - began) * 1e6)
    return found[WARM_UP:]


def rank_main(rank: int, count: int, rings: list[ShmRingBuffer], python: bool, port: int) -> None:
    """Run one rank in its own process: all-reduce like the others, then answer steps until the channel closes. port: a
    free one for the store of a network process group."""
    torch.set_num_threads(1)
    size = len(rings) // 2
    steps, answers, tensor = rings[0], rings[1 : 1 + size], rings[1 + size :]
    group = (ShmGroup if python else build_shm_group)(tensor, rank)
    source = ShmStepReceiver(steps, rank, answers[rank])
    found = {}
    for shape in SHAPES:
        x = torch.randn(shape).bfloat16()
        found[f"all_reduce {list(shape)} bf16"] = microseconds(count, lambda x=x: group.all_reduce(x))
    if isinstance(group, ShmGroup):
        store = create_store(LOOPBACK, port) if rank == 0 else connect_store(LOOPBACK, port)
        over_network = TorchGroup(store, "experts", rank, size, LOOPBACK)
        for tokens in TOKENS:
            name = f"experts' rows there and back [{tokens}, 896] bf16"
            found[name] = microseconds(count // 4, partial(exchange, group, tokens))
            found[f"{name} by gloo"] = microseconds(count // 4, partial(exchange, over_network, tokens))
    if rank == 0:
        print(json.dumps(found), flush=True)
    answer_steps(source)


def exchange(group: AllToAllGroup, tokens: int) -> None:
    """Exchange what one layer costs engines that share 64 experts, with 8 experts per token, evenly spread here."""
    group.all_gather(torch.zeros(64, dtype=torch.int64))
    rows = [[tokens * 8 // group.size] * group.size] * group.size
    group.all_to_all(group.all_to_all(torch.ones(sum(rows[0]), 896, dtype=torch.bfloat16), rows), rows)


def answer_steps(source: ShmStepReceiver) -> None:
    """Answer steps until the channel closes."""
    try:
        while True:
            source.receive()
            source.answer(bytes(ANSWER_BYTES))
    except ChannelClosed:
        return


class RayRank:
    """One rank in a Ray actor. Answers steps only: how a rank was started makes no difference to all-reduces."""

    def run(self, rank: int, handles: str) -> None:
        steps, *answers = (ShmRingBuffer.open(handle) for handle in msgspec.json.decode(handles, type=list[ShmHandle]))
        answer_steps(ShmStepReceiver(steps, rank, answers[rank]))


def time_steps(size: int, count: int, rings: list[ShmRingBuffer]) -> list[float]:
    channel = ShmStepChannel(rings[0], rings[1])
    others = [ring.reader(0) for ring in rings[2 : 1 + size]]

    def step() -> None:
        channel.send(bytes(STEP_BYTES))
        channel.receive()
        for other in others:
            other.receive()

    found = microseconds(count, step)
    channel.close()
    return found


def time_ray_steps(size: int, count: int) -> list[float]:
    os.environ.update(local_cluster_settings(os.environ))
    import ray

    from serve_llm.engine.distributed.ray.cluster import connect

    connect(LOCAL, size)
    rings, handles = make_rings(size)
    actors = [ray.remote(RayRank).options(num_cpus=1).remote() for _ in range(size)]
    ended = [actor.run.remote(rank, handles) for rank, actor in enumerate(actors)]
    found = time_steps(size, count, rings)
    ray.get(ended)
    ray.shutdown()
    return found


def make_rings(size: int) -> tuple[list[ShmRingBuffer], str]:
    """Create rings for steps and answers, and their handles. Every rank answers, as a real step needs all answers."""
    rings = [ShmRingBuffer.create(size, RING_BYTES), *(ShmRingBuffer.create(1, RING_BYTES) for _ in range(size))]
    return rings, handles_of(rings)


def handles_of(rings: list[ShmRingBuffer]) -> str:
    return msgspec.json.encode([ring.memory.handle for ring in rings]).decode()


def remote_rank_main(rank: int, url: str) -> None:
    """Run one rank as if on another host: answer steps until it is killed."""
    source = SocketStepReceiver(url, "secret", rank)
    while True:
        source.receive()
        source.answer(bytes(ANSWER_BYTES))


def time_remote_steps(size: int, count: int) -> list[float]:
    endpoint = Endpoint("127.0.0.1", "secret")
    channel = SocketStepChannel(endpoint, range(size))
    command = [sys.executable, __file__, "--url", channel.url, "--rank"]
    processes = [subprocess.Popen([*command, str(rank)]) for rank in range(size)]
    channel.connect(60.0)

    def step() -> None:
        channel.send(bytes(STEP_BYTES))
        for _ in range(size):
            channel.receive()

    found = microseconds(count, step)
    for process in processes:
        process.kill()
        process.wait()
    endpoint.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--python", action="store_true", help="all-reduces without the compiled library")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rings", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.url is not None:
        return remote_rank_main(arguments.rank, arguments.url)
    if arguments.rank is not None:
        handles = msgspec.json.decode(arguments.rings, type=list[ShmHandle])
        rings = [ShmRingBuffer.open(handle) for handle in handles]
        return rank_main(arguments.rank, arguments.count, rings, arguments.python, arguments.port)
    size = arguments.ranks
    rings, _ = make_rings(size)
    rings += [ShmRingBuffer.create(size - 1, RING_BYTES) for _ in range(size)]
    handles = handles_of(rings)
    command = [sys.executable, __file__, "--count", str(arguments.count), "--rings", handles]
    command += ["--port", str(free_port())]
    command += [*(["--python"] if arguments.python else []), "--rank"]
    processes = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(size)]
    assert processes[0].stdout is not None
    found = json.loads(processes[0].stdout.readline())
    found = {f"step to {size} ranks and answers": time_steps(size, arguments.count, rings)} | found
    for process in processes:
        process.wait()
    found[f"step to {size} other hosts and answers"] = time_remote_steps(size, arguments.count)
    if arguments.ray:
        found[f"step to {size} Ray actors and answers"] = time_ray_steps(size, arguments.count)
    report(found)


def report(found: dict[str, list[float]]) -> None:
    summary = {}
    for name, values in found.items():
        p50, p90 = statistics.median(values), statistics.quantiles(values, n=10)[-1]
        print(f"{name:56} p50 {p50:8.1f} us   p90 {p90:8.1f} us")
        summary[name] = {"p50_us": round(p50, 1), "p90_us": round(p90, 1)}
    print(json.dumps(summary | {"cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
