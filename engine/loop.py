"""The engine's loop: receive, schedule, execute, update, send."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from serve_llm.common.messages import Abort, EngineCoreOutputs, MalformedRequest, Shutdown, Submit, ToEngine
from serve_llm.common.options.speculative import SpeculativeConfig
from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, EPLBStats, FinishReason, SchedulerStats
from serve_llm.engine.config import Config
from serve_llm.engine.distributed.executor import Executor, StepResult
from serve_llm.engine.kv_events import KVEventPublisher
from serve_llm.engine.kv_offload.start import open_store
from serve_llm.engine.lora.adapter_checker import AdapterChecker
from serve_llm.engine.pending_requests import WAIT_SECONDS, PendingRequests
from serve_llm.engine.scheduler.drafters import TextDrafters
from serve_llm.engine.scheduler.kv_events import KVEventRecorder
from serve_llm.engine.scheduler.offload import OffloadManager
from serve_llm.engine.scheduler.output import SchedulerOutput
from serve_llm.engine.scheduler.policy import CPU_STEP_SECONDS, TokenBudget
from serve_llm.engine.scheduler.prompt_lookup import PromptLookup
from serve_llm.engine.scheduler.recent_texts import RecentTextGroups
from serve_llm.engine.scheduler.scheduler import Scheduler
from serve_llm.engine.scheduler.speculation import BatchDraftProposer, ModelSpeculator, Speculator, TextSpeculator
from serve_llm.engine.scheduler.state_snapshots import StateSnapshots
from serve_llm.engine.structured_output.builder import MatcherBuilder
from serve_llm.engine.structured_output.manager import StructuredOutputManager
from serve_llm.engine.worker.freed_memory import return_freed_memory
from serve_llm.engine.worker.graph_sizes import list_decode_sizes
from serve_llm.engine.worker.kv_cache import KVCacheConfig

logger = logging.getLogger(__name__)

BRANCHES_PER_STATE = 8  # a snapshot is worth its memory if it saves an 8th of the tokens whose KV takes as much
PAUSE_SECONDS = 10.0  # another interactive request is expected within this time after the last one
IDLE_SECONDS = 0.25  # after this long without work, check block accounting and the workers
# Idle waits before freed memory is returned, and a GPU captures further steps, one after each wait. A request that
# arrives meanwhile waits.
WAITS_BEFORE_IDLE_WORK = 20


class ServerChannel(Protocol):
    """The engine's end of the channel to the server."""

    def receive(self, seconds: float | None) -> list[ToEngine | MalformedRequest]:
        """Return all messages that have arrived. If there are none, wait up to `seconds` for one (None: forever)."""

    def send(self, outputs: EngineCoreOutputs) -> None: ...


class _StepInFlight(NamedTuple):
    scheduler_output: SchedulerOutput
    started_at: float
    has_others: bool  # whether there were requests other than batches
    in_pause: bool  # whether such requests were expected
    result: Future[StepResult]


class EngineCore:
    """Scheduler and executor: takes requests and produces outputs, step by step."""

    def __init__(
        self,
        config: Config,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        report_in_flight: Callable[[Sequence[int]], None] = lambda request_ids: None,
        draft_model: BatchDraftProposer | None = None,
        matchers: MatcherBuilder | None = None,
    ) -> None:
        """report_in_flight: called with the ids of the requests being computed, before and after each step, and with
        the ids of new requests while they are added. draft_model: the one named in the config. matchers: None to build
        one."""
        self.kv_cache_config = executor.kv_cache_config
        self._speculator = _build_speculator(config.speculation, draft_model, clock)
        self._recorder = None if config.kv_events is None else KVEventRecorder(self.kv_cache_config.groups)
        self._publisher: KVEventPublisher | None = None
        if config.kv_events is not None:
            self._publisher = KVEventPublisher(config.kv_events, config.data_parallel_rank)
        self._offload = _build_offload(config, executor, self._recorder)
        self.scheduler = Scheduler(
            self.kv_cache_config.groups,
            self.kv_cache_config.num_blocks,
            max_num_seqs=self.kv_cache_config.count_sequences(config.max_num_seqs),
            max_model_len=config.max_model_len,
            max_chunk=config.max_num_batched_tokens,
            prefix_caching=config.enable_prefix_caching,
            async_scheduling=config.async_scheduling,
            long_rope_threshold=config.long_rope_threshold,
            whole_prompts=not self.kv_cache_config.groups,
            speculator=self._speculator,
            max_loras=config.max_loras,
            offload=self._offload,
            recorder=self._recorder,
            snapshots=_build_snapshots(self.kv_cache_config),
        )
        self._executor = executor
        self._clock = clock
        self._report_in_flight = report_in_flight
        self._budget = TokenBudget(config.max_num_batched_tokens, CPU_STEP_SECONDS if config.device == "cpu" else None)
        self._num_batches = 1 if config.async_scheduling else executor.depth
        self._others_until = 0.0  # clock time until which steps of batches are short
        self._in_flight: deque[_StepInFlight] = deque()
        self._num_steps = 0
        self._finished_on_arrival: list[EngineCoreOutput] = []
        self._to_capture = _find_sizes_to_capture(config)
        self._adapters = AdapterChecker()
        self._checking: PendingRequests[str] = PendingRequests(lambda future: future.result())
        self.grammars = StructuredOutputManager(
            MatcherBuilder(config) if matchers is None else matchers,
            config.vocab_size,
            config.jump_forward,
            fill_cheap_masks_at_once=config.device == "cpu",
        )

    def check_workers(self) -> None:
        """Raise the error of any worker that has failed. For use between steps."""
        self._executor.check()

    def write_blocks(self) -> None:
        """Write blocks in host memory to disk. For use between steps."""
        if self._offload is not None:
            self._offload.exchange()

    def run_idle_work(self) -> None:
        """Capture one more decode step, so that no request has to wait for it later. Call while there is no work."""
        if self._to_capture:
            self._executor.execute(SchedulerOutput([], [], capture_size=self._to_capture.popleft())).result()

    @property
    def has_work(self) -> bool:
        return (
            self.scheduler.has_work
            or bool(self.grammars.compiling)
            or bool(self._checking)
            or bool(self._finished_on_arrival)
            or self._executor.must_step()
        )

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        # If a request crashes this process, the server must know the suspects.
        self._report_in_flight([*self.scheduler.in_flight, *(request.id for request in requests)])
        for request in requests:
            if request.adapter is not None:
                self._checking.add(request, self._adapters.check(request.adapter))
            else:
                self._add_request(request)
        self._report_in_flight(self.scheduler.in_flight)

    def refuse_request(self, request: MalformedRequest) -> None:
        logger.error("request %d is malformed: %s", request.id, request.error)
        error = f"the engine cannot read this request: {request.error}"
        self._finished_on_arrival.append(EngineCoreOutput(request.id, [], FinishReason.ERROR, error=error))

    def _add_request(self, request: EngineCoreRequest) -> None:
        if request.sampling.is_constrained:
            self.grammars.begin(request)
        else:
            self._schedule_request(request)

    def _schedule_request(self, request: EngineCoreRequest) -> None:
        output = self.scheduler.add(request, self._clock())
        if output is not None:
            self._finished_on_arrival.append(output)

    @property
    def _is_idle(self) -> bool:
        """Whether no request can be computed."""
        return not self.scheduler.has_work and not self._in_flight and not self._executor.must_step()

    def _take_ready(self, pending: PendingRequests[Any], go_on: Callable[[EngineCoreRequest], None]) -> None:
        """Continue with the requests that have become ready since the last step."""
        if not pending:
            return
        ready, failed = pending.take_ready(self._is_idle)
        self._finished_on_arrival += failed
        for request in ready:
            go_on(request)

    def abort_requests(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._checking.abort(request_id)
            self.grammars.end(request_id)
            self.scheduler.abort(request_id)

    def step(self) -> EngineCoreOutputs:
        """Start steps until `executor.depth` are in flight, then finish the oldest one."""
        self._take_ready(self._checking, self._add_request)
        self._take_ready(self.grammars.compiling, self._schedule_request)
        while len(self._in_flight) < self._executor.depth and self._start_step():
            pass
        outputs = self._finished_on_arrival
        self._finished_on_arrival = []
        num_tokens = 0
        if self._in_flight:
            step = self._in_flight.popleft()
            num_tokens = step.scheduler_output.num_tokens
            outputs += self._finish_step(step)
            self._report_in_flight(self.scheduler.in_flight)
        if self._recorder is not None and self._publisher is not None:
            self._publisher.publish(self._recorder.take())
        for output in outputs:
            if output.finish_reason is not None:
                self.grammars.end(output.id)
        return EngineCoreOutputs(outputs, self._read_stats(num_tokens))

    def _start_step(self) -> bool:
        """Schedule a step and start it. Returns False if there is nothing to compute now."""
        held = self.grammars.held_indices
        if self._speculator is not None:
            self._speculator.paused_indices = self.grammars.costly_indices
            self.scheduler.prepare_drafts(held)
        now = self._clock()
        has_others = not self.scheduler.has_only_batches
        if has_others:
            self._others_until = now + PAUSE_SECONDS
        in_pause = not has_others and now < self._others_until
        budget = self._budget.next(self.scheduler.num_running, self.scheduler.num_waiting, in_pause)
        if self._offload is not None:
            self._offload.seconds_per_token = self._budget.seconds_per_token
            self._offload.exchange()
        scheduler_output = self.scheduler.schedule(budget, now, self._num_batches, held)
        if not scheduler_output.scheduled and not self._executor.must_step():
            if not self._in_flight:
                self._wait_for_sequences(held)
            return False
        scheduler_output, masks = self.grammars.prepare(scheduler_output)
        self._report_in_flight(self.scheduler.in_flight)
        result = self._executor.execute(scheduler_output, masks)
        self._in_flight.append(_StepInFlight(scheduler_output, now, has_others, in_pause, result))
        return True

    def _wait_for_sequences(self, held: Collection[int]) -> None:
        """Wait briefly until a sequence can be scheduled: for a grammar mask, or for a block read from disk."""
        if held:
            self.grammars.wait_for_held()
        elif self._offload is not None:
            self._offload.wait_for_reads(WAIT_SECONDS)

    def _finish_step(self, step: _StepInFlight) -> list[EngineCoreOutput]:
        """Wait for the result of a step and update the scheduler."""
        scheduler_output = step.scheduler_output
        results = step.result.result()
        num_tokens = scheduler_output.num_tokens
        if not num_tokens:
            return []
        seconds = self._clock() - step.started_at
        self._budget.observe(num_tokens, seconds)
        if step.has_others and scheduler_output.is_decode:
            self._budget.observe_decode(seconds)
        if step.in_pause:
            self._budget.observe_in_pause(num_tokens, seconds)
        if self._speculator is not None and scheduler_output.is_decode:
            num_sequences = len(scheduler_output.scheduled)
            num_accepted = sum(len(result.accepted_ids) for result in results)
            self._speculator.observe_step(num_sequences, num_tokens - num_sequences, num_accepted, seconds)
        self.grammars.advance(scheduler_output, results)
        outputs = self.scheduler.update_from_output(scheduler_output, results)
        self.grammars.retain(self.scheduler.request_indices)
        self._num_steps += 1
        return outputs

    def _read_stats(self, step_tokens: int) -> SchedulerStats:
        stats = self.scheduler.stats()
        stats.num_steps = self._num_steps
        stats.step_tokens = step_tokens
        stats.eplb = self._executor.eplb_stats
        if self._offload is not None:
            stats.offload_memory, stats.offload_disk = self._offload.read_stats()
        return stats

    def close(self) -> None:
        """Send pending events and stop this object's threads."""
        if self._publisher is not None:
            self._publisher.close()

    def drain(self) -> None:
        """Run the steps that other engines still need. Call when there is no more work here."""
        self._executor.drain()


def _find_sizes_to_capture(config: Config) -> deque[int]:
    """Batch sizes of decode steps that a GPU captures while it is idle, ascending."""
    if config.device != "cuda" or config.enforce_eager or not config.generates:
        return deque()
    if config.pipeline_parallel_size > 1 or config.expert_engines > 1:  # all stages and engines would have to take part
        return deque()
    return deque(list_decode_sizes(config.max_num_seqs))


def _build_speculator(
    config: SpeculativeConfig | None, draft_model: BatchDraftProposer | None, clock: Callable[[], float]
) -> Speculator | None:
    if config is None:
        return None
    num_tokens = config.num_speculative_tokens
    lengths = (config.prompt_lookup_min, config.prompt_lookup_max)
    recent = RecentTextGroups(*lengths)

    def build_proposer(request: EngineCoreRequest) -> PromptLookup:
        return PromptLookup(*lengths, recent.find(request))

    if not config.has_draft_model:
        return TextSpeculator(num_tokens, build_proposer, clock, config.disable_by_batch_size)
    assert draft_model is not None, "the draft model was not loaded"
    texts = TextDrafters(num_tokens, build_proposer, clock)
    return ModelSpeculator(num_tokens, draft_model, config.disable_by_batch_size, texts)


def _build_snapshots(kv_cache_config: KVCacheConfig) -> StateSnapshots | None:
    """None for a model without states, or without a prefix cache."""
    if not kv_cache_config.max_snapshots:
        return None
    tokens_per_state = kv_cache_config.blocks_per_state * kv_cache_config.groups[0].block_size  # take as much memory
    return StateSnapshots(kv_cache_config.groups, kv_cache_config.num_snapshots, tokens_per_state // BRANCHES_PER_STATE)


def _build_offload(config: Config, executor: Executor, recorder: KVEventRecorder | None) -> OffloadManager | None:
    memory = executor.host_memory
    if not memory:
        return None
    return OffloadManager(
        executor.kv_cache_config.num_slots,
        block_bytes=sum(rank.block_bytes for rank in memory),
        copy_seconds=max(rank.copy_seconds for rank in memory),
        store=open_store(config, executor.kv_cache_config, memory),
        recorder=recorder,
    )


def run(engine: EngineCore, channel: ServerChannel) -> None:
    """Serve until Shutdown arrives. Raises the error of a worker that fails."""
    is_checked = True  # whether block accounting was checked since the last step
    num_waits = 0
    eplb: EPLBStats | None = None
    while True:
        messages = channel.receive(0 if engine.has_work else IDLE_SECONDS)
        if not messages and not engine.has_work:
            engine.check_workers()
            num_waits += 1
            if num_waits == WAITS_BEFORE_IDLE_WORK:
                return_freed_memory()
            if num_waits > WAITS_BEFORE_IDLE_WORK:
                engine.run_idle_work()
            engine.write_blocks()
            if not is_checked:
                engine.scheduler.check_integrity()
                is_checked = True
            continue
        is_checked = False
        num_waits = 0
        for message in messages:
            if isinstance(message, Submit):
                engine.add_requests(message.requests)
            elif isinstance(message, MalformedRequest):
                engine.refuse_request(message)
            elif isinstance(message, Abort):
                engine.abort_requests(message.ids)
            elif isinstance(message, Shutdown):
                engine.drain()
                return
        outputs = engine.step()
        has_placed = outputs.stats.eplb is not eplb
        eplb = outputs.stats.eplb
        if messages or outputs.outputs or outputs.stats.step_tokens or has_placed:  # else, it ran for other engines
            channel.send(outputs)
