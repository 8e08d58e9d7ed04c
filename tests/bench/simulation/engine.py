"""An engine in virtual time: the real scheduler with its blocks, prefix cache and preemption, without a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.simulation.costs import StepCosts, measure_work
from bench.simulation.events import EventQueue
from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, ModelInfo, SchedulerStats
from serve_llm.engine.scheduler.output import RunnerOutput, SchedulerOutput
from serve_llm.engine.scheduler.policy import TokenBudget
from serve_llm.engine.scheduler.scheduler import Scheduler
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.server.engines.replicas import Sink
from serve_llm.server.metrics.meter import Meter

REPLY_ID = 300  # the id sampled everywhere
_SAMPLED = RunnerOutput(token_id=REPLY_ID)
_NOT_SAMPLED = RunnerOutput()


@dataclass(frozen=True)
class EngineShape:
    """What options and memory determine about an engine."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_model_len: int = 8192
    max_num_batched_tokens: int = 2048
    async_scheduling: bool = True  # as on a GPU: a step is scheduled while the previous one runs
    target_step_seconds: float | None = None  # as on a CPU; see `TokenBudget`
    prefix_caching: bool = True


class SimulatedEngine:
    """An engine process as `server.engines.replicas.Replicas` sees it (EngineHandle), and its loop."""

    def __init__(
        self,
        shape: EngineShape,
        costs: StepCosts,
        events: EventQueue,
        meter: Meter,
        on_admission: Callable[[EngineCoreRequest, int], None],
    ) -> None:
        """on_admission: called with a request and its number of cached tokens before its first output is delivered."""
        self.meter = meter
        self.stats = SchedulerStats()
        self.model_info = _describe(shape)
        self.scheduler = Scheduler(
            [KVCacheSpec(shape.block_size, None)],
            shape.num_blocks,
            max_num_seqs=shape.max_num_seqs,
            max_model_len=shape.max_model_len,
            max_chunk=shape.max_num_batched_tokens,
            prefix_caching=shape.prefix_caching,
            async_scheduling=shape.async_scheduling,
        )
        self.is_dead = False
        self.responds = True
        self.num_steps = 0
        self.prompt_tokens_computed = 0
        self.output_tokens = 0
        self._depth = 2 if shape.async_scheduling else 1
        self._budget = TokenBudget(shape.max_num_batched_tokens, shape.target_step_seconds)
        self._costs = costs
        self._events = events
        self._on_admission = on_admission
        self._open: dict[int, tuple[EngineCoreRequest, Sink]] = {}
        self._finished_on_arrival: list[EngineCoreOutput] = []
        self._in_flight: deque[tuple[SchedulerOutput, float]] = deque()  # steps and the times when they were scheduled
        self._busy_until = 0.0

    @property
    def ready(self) -> bool:
        return self.responds

    def submit_many(self, pairs: Iterable[tuple[EngineCoreRequest, Sink]]) -> None:
        for request, sink in pairs:
            if self.is_dead:
                continue  # messages to a dead process are lost
            self._open[request.id] = (request, sink)
            output = self.scheduler.add(request, self._events.now)
            if output is not None:
                self._finished_on_arrival.append(output)
        if self._finished_on_arrival:
            self._events.add(self._events.now, self._deliver_finished)
        self._start_steps()

    def abort(self, ids: Sequence[int]) -> None:
        for request_id in ids:
            if self._open.pop(request_id, None) is not None and not self.is_dead:
                self.scheduler.abort(request_id)

    def die(self) -> None:
        """Lose the work in flight and deliver nothing more."""
        self.is_dead = True

    def notice_loss(self) -> None:
        """Act on the loss: the server has noticed that the engine is gone."""
        self.responds = False
        self._open = {}

    def _start_steps(self) -> None:
        scheduler = self.scheduler
        events = self._events
        while not self.is_dead and len(self._in_flight) < self._depth:
            budget = self._budget.next(scheduler.num_running, scheduler.num_waiting)
            output = scheduler.schedule(budget, events.now)
            if not output.scheduled:
                return
            work = measure_work(output)
            self.prompt_tokens_computed += work.prompt_tokens
            self._busy_until = max(events.now, self._busy_until) + self._costs.seconds(work)
            self._in_flight.append((output, events.now))
            events.add(self._busy_until, self._end_step)

    def _end_step(self) -> None:
        if self.is_dead:
            return
        step, started_at = self._in_flight.popleft()
        self._budget.observe(step.num_tokens, self._events.now - started_at)
        results = [_SAMPLED if chunk.sample else _NOT_SAMPLED for chunk in step.scheduled]
        outputs = self.scheduler.update_from_output(step, results)
        self.stats = self.scheduler.stats()
        self.num_steps += 1
        self.meter.clock.advance()
        self._start_steps()
        self._deliver(outputs)

    def _deliver_finished(self) -> None:
        outputs = self._finished_on_arrival
        self._finished_on_arrival = []
        self._deliver(outputs)

    def _deliver(self, outputs: Iterable[EngineCoreOutput]) -> None:
        for output in outputs:
            found = self._open.get(output.id)
            if found is None:
                continue
            request, sink = found
            self.output_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                del self._open[output.id]
            if output.cached_tokens is not None:
                self._on_admission(request, output.cached_tokens)
            sink(output)


def _describe(shape: EngineShape) -> ModelInfo:
    return ModelInfo(
        architecture="simulated",
        max_model_len=shape.max_model_len,
        vocab_size=2**17,
        block_size=shape.block_size,
        num_kv_blocks=shape.num_blocks,
        kv_cache_tokens=shape.num_blocks * shape.block_size,
        max_num_seqs=shape.max_num_seqs,
        dtype="bfloat16",
        device="cpu" if shape.target_step_seconds is not None else "cuda",
    )
