"""How many steps are in flight, and how long the executor waits for a step's result."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from serve_llm.engine.config import Config
from serve_llm.engine.distributed import mp
from serve_llm.engine.distributed.step_channels import STEP_SECONDS
from serve_llm.engine.scheduler.output import SchedulerOutput
from support.config import CONFIG


class Steps:
    """A step channel that answers immediately, and records timeouts."""

    def __init__(self) -> None:
        self.limits: list[float] = []

    def send(self, message: bytes, seconds: float, remote_message: bytes | None) -> None:
        pass

    def receive(self, seconds: float) -> bytes:
        self.limits.append(seconds)
        return msgspec.msgpack.encode([])


def build(config: Config) -> tuple[mp.MpExecutor, Steps]:
    steps = Steps()
    setup = SimpleNamespace(step_channel=lambda: steps, has_remote_ranks=False)
    return mp.MpExecutor(config, cast(Any, None), cast(Any, setup), cast(Any, None)), steps


@pytest.mark.parametrize(
    ("fields", "later"),
    [({"device": "cuda"}, mp.WARM_STEP_SECONDS), ({"device": "cpu"}, STEP_SECONDS), ({"step_timeout": 7.0}, 7.0)],
    ids=str,
)
def test_a_gpus_steps_have_less_time_once_many_had_results(
    fields: dict[str, object], later: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mp, "time", SimpleNamespace(monotonic=lambda: 0.0))  # no step takes long
    executor, steps = build(replace(CONFIG, **fields))
    for _ in range(mp.WARM_STEPS + 2):
        executor.execute(SchedulerOutput([], [])).result()
    first = later if fields.get("step_timeout") else STEP_SECONDS
    assert steps.limits == [first] * mp.WARM_STEPS + [later] * 2


@pytest.mark.parametrize(
    ("device", "stages", "is_asynchronous", "depth"),
    [("cpu", 1, False, 1), ("cuda", 1, True, 2), ("cpu", 3, False, 3), ("cuda", 3, False, 4)],
)
def test_steps_in_flight(device: str, stages: int, is_asynchronous: bool, depth: int) -> None:
    """On GPUs, a stage has the next step before the host has the ids of the last one."""
    config = replace(CONFIG, device=device, pipeline_parallel_size=stages, async_scheduling=is_asynchronous)
    assert build(config)[0].depth == depth
