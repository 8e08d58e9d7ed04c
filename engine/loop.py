"""The engine's loop: receive, schedule, execute, commit, send. One screen; everything it does is a call."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from serve_llm.engine.config import Config
from serve_llm.engine.execute.executor import Executor, StepResult
from serve_llm.engine.parallel.lockstep import Apart, Steps
from serve_llm.engine.schedule.batch import Batch
from serve_llm.engine.schedule.policy import TokenBudget
from serve_llm.engine.schedule.scheduler import Scheduler
from serve_llm.engine.types import Output
from serve_llm.engine.wire import Abort, Shutdown, Step, Submit, ToEngine

logger = logging.getLogger(__name__)

CPU_STEP_SECONDS = 0.15  # aim on a CPU: streams that run do not wait longer for a prompt
IDLE_SECONDS = 0.25  # without work for so long: time to check that nothing was lost and that all workers live


class Channel(Protocol):
    """The engine's end of the wire."""

    def receive(self, seconds: float | None) -> list[ToEngine]:
        """All messages that have arrived; if none has, wait so long for one (None: for ever)."""

    def send(self, step: Step) -> None: ...


class Engine:
    """Scheduler and executor as one thing that takes requests in and gives outputs, step by step."""

    def __init__(
        self,
        config: Config,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        show: Callable[[Sequence[int]], None] = lambda ids: None,
        steps: Steps | None = None,
    ) -> None:
        """`show`: told the ids of the requests that are computed, before each step and after it. steps: of engines that
        need each other for each of theirs."""
        self.layout = executor.layout
        self.scheduler = Scheduler(
            self.layout.groups,
            self.layout.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            max_chunk=config.max_num_batched_tokens,
            prefix_caching=config.enable_prefix_caching,
            ahead=config.async_scheduling,
            rope_turns_at=config.rope_turns_at,
        )
        self._shares = 1 if config.async_scheduling else executor.depth
        self._executor = executor
        self._steps = steps or Apart()
        self._clock = clock
        self._show = show
        self._budget = TokenBudget(config.max_num_batched_tokens, CPU_STEP_SECONDS if config.device == "cpu" else None)
        self._under_way: deque[tuple[Batch, float, Future[StepResult]]] = deque()
        self._num_steps = 0
        self._finished: list[Output] = []

    def check(self) -> None:
        """Between steps: raises what a worker has failed with."""
        self._executor.check()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._finished) or self._steps.is_behind()

    def take(self, messages: list[ToEngine]) -> None:
        """Requests and aborts that arrived."""
        for message in messages:
            if isinstance(message, Submit):
                for request in message.requests:
                    output = self.scheduler.add(request, self._clock())
                    if output is not None:
                        self._finished.append(output)
            elif isinstance(message, Abort):
                for request_id in message.ids:
                    self.scheduler.abort(request_id)

    def step(self) -> Step:
        """Start as many batches as may be under way, then commit the oldest."""
        while len(self._under_way) < self._executor.depth:
            now = self._clock()
            limit = self._budget.next(self.scheduler.num_running, self.scheduler.num_waiting)
            batch = self.scheduler.schedule(limit, now, self._shares)
            if not batch.chunks and not self._steps.is_behind():
                break
            self._show(self.scheduler.in_flight)
            self._steps.enter()
            self._under_way.append((batch, now, self._executor.execute(batch)))
        outputs, self._finished = self._finished, []
        num_tokens = 0
        if self._under_way:
            batch, started, future = self._under_way.popleft()
            results = future.result()
            num_tokens = batch.num_tokens
            if num_tokens:  # else it was for other engines
                self._budget.observe(num_tokens, self._clock() - started)
                outputs += self.scheduler.commit(batch, results)
                self._num_steps += 1
            self._show(self.scheduler.in_flight)
        stats = self.scheduler.stats()
        stats.num_steps, stats.step_tokens = self._num_steps, num_tokens
        return Step(outputs, stats)

    def leave(self) -> None:
        """There will be no more work: make the steps that other engines need, until they have none either."""
        self._steps.leave()
        while self._steps.follow():
            self._steps.enter()
            self._executor.execute(Batch([], [])).result()


def run(engine: Engine, channel: Channel) -> None:
    """Serve until told to shut down. An exception of a worker ends it."""
    checked = True
    while True:
        messages = channel.receive(0 if engine.has_work else IDLE_SECONDS)
        if not messages and not engine.has_work:
            engine.check()
            if not checked:
                engine.scheduler.check_integrity()
            checked = True
            continue
        checked = False
        if any(isinstance(message, Shutdown) for message in messages):
            engine.leave()
            return
        engine.take(messages)
        step = engine.step()
        if messages or step.outputs or step.stats.step_tokens:  # else it was for other engines
            channel.send(step)
