"""Shared by tests of node 0 and of scripted other nodes: no ranks run, but the connection is real."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from serve_llm.common.options.schema import Options
from serve_llm.common.options.sources import make_options

LIMIT = 60.0


class NoRanks:
    """A stand-in for `WorkerLauncher`."""

    def __init__(self, ranks: Sequence[int], url: str, **_: object) -> None:
        self.ranks, self.gone = ranks, {}
        self.ends = 0

    def find_ended(self) -> dict[int, str]:
        return dict(self.gone)

    def describe_place(self, rank: int) -> str:
        return f"host h, pid {100 + rank}"

    def state(self, rank: int) -> str:
        return "waiting"

    def pid(self, rank: int) -> int:
        return 100 + rank

    def serve(self) -> None:
        pass

    def end(self, cause: str = "") -> None:
        self.ends += 1


def options_of(master: int, **more: object) -> Options:
    """Return the options of a node. master: port of node 0."""
    network = {"nnodes": 3, "master_addr": f"127.0.0.1:{master}", "cluster_secret": "s", "device": "cpu"}
    return make_options("demo", **({"tensor_parallel_size": 5} | network | more))


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
