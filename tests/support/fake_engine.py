"""The executor of an engine whose ranks are fake (`support.fake_hosts`) while everything on the engine's side is real:
it starts, runs steps, notices a lost host and stops."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from serve_llm.common.hub import resolve_model
from serve_llm.engine.distributed import messages, mp
from serve_llm.engine.distributed.multihost import leader
from serve_llm.engine.distributed.worker_group import WorkerGroup
from serve_llm.engine.scheduler.output import ScheduledTokens, SchedulerOutput
from support import fake_hosts
from support.config import CONFIG
from support.node_messages import options_of
from support.nodes import free_port

DIRECTORY = str(resolve_model("demo"))
START_SECONDS = 300.0
NUM_SEQUENCES = 32


class LocalRanks:
    """See `LaunchedWorkers`: ranks on the engine's host, in one process."""

    def __init__(self, ranks: Sequence[int], url: str, **_: object) -> None:
        self._process = fake_hosts.start(DIRECTORY, 0, url, ranks=ranks)

    def find_ended(self) -> dict[int, str]:
        return {}

    def describe_place(self, rank: int) -> str:
        return f"host h0, pid {10000 + rank}"

    def state(self, rank: int) -> str:
        return "waiting"

    def serve(self) -> None:
        pass

    def end(self, cause: str = "") -> None:
        stop(self._process)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


class FakeRanksEngine:
    """A context manager. times: seconds from the start until each phase was complete."""

    def __init__(self, nodes: int, ranks_per_node: int) -> None:
        """One pipeline stage per node. The last node is a process of its own, `last_node`."""
        self.size = nodes * ranks_per_node
        self.times: dict[str, float] = {}
        self._began = time.monotonic()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._executor: mp.MpExecutor | None = None
        sizes = {"tensor_parallel_size": ranks_per_node, "pipeline_parallel_size": nodes}
        self._config = replace(CONFIG, directory=DIRECTORY, **sizes)
        if nodes == 1:
            self._worker_group = WorkerGroup(self.size, lambda url: LocalRanks(range(self.size), url))
            return
        port = free_port()
        with patch.object(leader, "WorkerLauncher", LocalRanks):
            self._worker_group = leader.start_on_nodes(options_of(port, nnodes=nodes, **sizes))
        for numbers in (range(1, nodes - 1), range(nodes - 1, nodes)):
            if numbers:
                url = f"tcp://127.0.0.1:{port}"
                self._processes.append(fake_hosts.start(DIRECTORY, nodes, url, nodes=numbers))

    @property
    def last_node(self) -> subprocess.Popen[bytes]:
        return self._processes[-1]

    def _note(self, phase: str) -> None:
        self.times[phase] = time.monotonic() - self._began

    def __enter__(self) -> FakeRanksEngine:
        try:
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _connect(self) -> None:
        """Bring all ranks to the point at which they wait for steps."""
        self._worker_group.gather(messages.WorkerHello, START_SECONDS)
        self._note("all ranks have connected")
        spec = cast(Any, SimpleNamespace(hidden_size=7168))
        model = json.loads((Path(DIRECTORY) / "config.json").read_text())
        builder = mp.connect_workers(self._config, spec, model, self._worker_group, None)
        self._note("all ranks have a step connection")
        builder.load()
        configs = [ready.kv_cache_config for ready in builder.allocate_cache(fake_hosts.NUM_BLOCKS, 0)]
        self._note("all ranks are ready")
        self._executor = builder.build_executor(configs[0])
        self._worker_group.serve()

    def step(self) -> list[int | None]:
        """Run a step. Returns the ids of its sequences, which are their positions."""
        assert self._executor is not None
        scheduled = [ScheduledTokens(index, index, 1, ([7],), True, [11]) for index in range(NUM_SEQUENCES)]
        return [output.token_id for output in self._executor.execute(SchedulerOutput([], scheduled)).result()]

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.close()
        else:
            self._worker_group.close()
        for process in self._processes:
            stop(process)
