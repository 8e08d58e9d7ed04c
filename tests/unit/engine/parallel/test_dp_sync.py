"""Engines that run their steps together: none waits forever, none runs an unneeded step, and all end."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Queue

import pytest

from serve_llm.common.errors import EngineError
from serve_llm.common.messages import Abort, EngineCoreOutputs, Shutdown, Submit, ToEngine
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine import loop
from serve_llm.engine.distributed.executor import DPSyncExecutor, Executor
from serve_llm.engine.parallel.dp_sync import DPStepSync
from serve_llm.engine.scheduler.output import RunnerOutput, SchedulerOutput
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.worker.kv_cache import KVCacheConfig
from support.config import CONFIG

LIMIT = 60.0  # seconds; nothing takes nearly as long unless something hangs


class MeetingExecutor(Executor):
    """An executor whose steps are meetings of all engines, as with experts; records what each engine computed in
    them."""

    kv_cache_config = KVCacheConfig((KVCacheSpec(8, None),), block_bytes=64, num_blocks=64)

    def __init__(self, barrier: threading.Barrier, depth: int) -> None:
        self.depth = depth
        self.num_tokens: list[int] = []
        self._barrier = barrier

    def execute(self, scheduler_output: SchedulerOutput, masks: object = None) -> Future:
        self._barrier.wait(LIMIT)
        self.num_tokens.append(scheduler_output.num_tokens)
        future: Future = Future()
        future.set_result([RunnerOutput(token_id=1 if chunk.sample else None) for chunk in scheduler_output.scheduled])
        return future

    def check(self) -> None: ...

    def close(self) -> None: ...


class QueueChannel:
    """Passes on messages from a test's thread. Like a poll, `receive` also returns when another engine has sent
    something."""

    def __init__(self, lockstep: DPStepSync) -> None:
        self._lockstep = lockstep
        self._inbox: Queue[ToEngine] = Queue()
        self.num_looks = 0
        self.finished = threading.Semaphore(0)

    def put(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def receive(self, seconds: float | None) -> list[ToEngine]:
        self.num_looks += 1
        found: list[ToEngine] = []
        while True:
            try:
                found.append(self._inbox.get_nowait())
            except Empty:
                if found or seconds == 0 or self._lockstep.socket.poll(1):
                    return found

    def send(self, step: EngineCoreOutputs) -> None:
        for output in step.outputs:
            if output.finish_reason is not None:
                self.finished.release()


class Group:
    """Runs engines in threads."""

    def __init__(self, directory: Path, count: int, depth: int = 1) -> None:
        barrier = threading.Barrier(count)
        self.steps = [DPStepSync(directory, index, count) for index in range(count)]
        self.executors = [MeetingExecutor(barrier, depth) for _ in range(count)]
        self.channels = [QueueChannel(steps) for steps in self.steps]
        self._pool = ThreadPoolExecutor(count)
        self._running = [self._pool.submit(self._run, index) for index in range(count)]

    def _run(self, index: int) -> None:
        try:
            engine = loop.EngineCore(CONFIG, DPSyncExecutor(self.executors[index], self.steps[index]))
            loop.run(engine, self.channels[index])
        finally:
            self.steps[index].close()

    def submit(self, index: int, number: int, max_tokens: int) -> None:
        sampling = Sampling(max_tokens=max_tokens, seed=0)
        self.channels[index].put(Submit([EngineCoreRequest(id=number, prompt_ids=[1] * 5, sampling=sampling)]))

    def wait_for(self, index: int) -> None:
        """Wait until another request of this engine has ended."""
        assert self.channels[index].finished.acquire(timeout=LIMIT), "a request does not end"

    def stop(self) -> None:
        for channel in self.channels:
            channel.put(Shutdown())
        for running in self._running:
            running.result(LIMIT)
        self._pool.shutdown()

    def check(self) -> None:
        """Check that all engines have run the same steps, and that each step was needed."""
        computed = [executor.num_tokens for executor in self.executors]
        assert len({len(steps) for steps in computed}) == 1
        assert all(any(step) for step in zip(*computed, strict=True))


def test_idle_engines_take_part_and_then_all_wait(tmp_path: Path) -> None:
    three = Group(tmp_path, 3)
    three.submit(1, 1, max_tokens=9)
    three.wait_for(1)
    three.submit(0, 2, max_tokens=4)
    three.wait_for(0)
    three.stop()
    three.check()
    assert [sum(map(bool, executor.num_tokens)) for executor in three.executors] == [4, 9, 0]
    assert len(three.executors[2].num_tokens) == 13


@pytest.mark.parametrize("seed", range(12))
def test_random_arrivals(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    made = Group(tmp_path, rng.choice([2, 2, 3, 4]), rng.choice([1, 1, 2, 3]))
    count = len(made.channels)
    waiting = [0] * count
    for number in range(25):
        index = rng.randrange(count)
        made.submit(index, number, max_tokens=rng.randrange(1, 12))
        waiting[index] += 1
        if rng.random() < 0.2:
            made.channels[index].put(Abort([1000 + number]))  # one that has ended
        while rng.random() < 0.4 and any(waiting):
            index = rng.choice([index for index in range(count) if waiting[index]])
            made.wait_for(index)
            waiting[index] -= 1
    for index in range(count):
        for _ in range(waiting[index]):
            made.wait_for(index)
    made.stop()
    made.check()


def test_who_is_told_to_end_stays_as_long_as_others_need_it(tmp_path: Path) -> None:
    two = Group(tmp_path, 2)
    two.channels[0].put(Shutdown())
    two.submit(1, 1, max_tokens=20)
    two.wait_for(1)
    assert not two._running[0].done()
    two.stop()
    two.check()
    assert sum(map(bool, two.executors[1].num_tokens)) == 20


def test_an_idle_engine_looks_only_when_something_was_said(tmp_path: Path) -> None:
    one, other = (DPStepSync(tmp_path, index, 2) for index in range(2))
    try:
        assert not one.is_behind() and not one.socket.poll(0)
        other.enter()
        assert one.socket.poll(LIMIT * 1000) and one.is_behind() and not one.socket.poll(0)
        one.enter()
        assert not one.is_behind() and not other.is_behind() and not other.socket.poll(20), "it knew of that step"
    finally:
        one.close()
        other.close()


def test_all_get_all_values_in_order(tmp_path: Path) -> None:
    three = [DPStepSync(tmp_path, index, 3) for index in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda steps: steps.gather(bytes([steps.engine]), LIMIT), three))
    for steps in three:
        steps.close()
    assert found == [[b"\0", b"\1", b"\2"]] * 3


def test_a_failure_ends_the_wait_for_the_others(tmp_path: Path) -> None:
    def fail() -> None:
        raise EngineError("rank 1 died")

    steps = DPStepSync(tmp_path, 0, 2)
    with pytest.raises(EngineError, match=r"^rank 1 died$"):
        steps.gather(b"", LIMIT, fail)
    steps.close()


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    steps = DPStepSync(tmp_path, 1, 3)
    with pytest.raises(EngineError, match=r"after 0 s still waiting for engine 0 and 2$"):
        steps.gather(b"", 0.05)
    steps.close()
