"""Many simulated engines behind the server's own router, replays and admission control, with simulated clients."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from bench.simulation.costs import StepCosts
from bench.simulation.engine import REPLY_ID, EngineShape, SimulatedEngine
from bench.simulation.events import EventQueue
from bench.simulation.report import FleetReport, GapHistogram, Latencies, LossCosts
from bench.simulation.traces import PromptBuilder, TraceRequest, check_lengths
from bench.workloads import percentile
from serve_llm.common.errors import HostLost
from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, FinishReason, Sampling
from serve_llm.server.admission.controller import AdmissionController, AdmissionRequest
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.engines.tracked_request import Replay, TrackedRequest
from serve_llm.server.generate.dispatcher import LocalDispatcher
from serve_llm.server.http.errors import RequestError
from serve_llm.server.metrics.meter import Clock, Meter

IDS = range(300, 4000)


@dataclass(frozen=True)
class NodeLoss:
    """A node is lost with its replicas, and returns empty."""

    at: float  # seconds
    node: int
    down_seconds: float  # from the loss until its replicas serve again


@dataclass(frozen=True)
class FleetShape:
    num_replicas: int
    engine: EngineShape
    replicas_per_node: int = 8
    max_queue: tuple[int, int] = (2048, 4_000_000)  # --max-queue
    detection_seconds: float = 5.0  # delay until the server notices that a node is gone

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.replicas_per_node < 1:
            raise ValueError("a fleet needs replicas, and a node at least one of them")
        if self.engine.num_blocks * self.engine.block_size < self.engine.max_model_len:
            raise ValueError("the KV cache of an engine must hold a sequence of max_model_len tokens")

    @property
    def num_nodes(self) -> int:
        return -(-self.num_replicas // self.replicas_per_node)

    def list_replicas(self, node: int) -> range:
        """Return the indexes of the replicas on a node."""
        start = node * self.replicas_per_node
        return range(start, min(start + self.replicas_per_node, self.num_replicas))


class SimulatedStream:
    """A client's request, from the time it is sent to its end, which happens exactly once."""

    __slots__ = ("admission", "began", "ended", "first_token", "last_token", "num_tokens", "number", "refused")

    def __init__(self, number: int, began: float) -> None:
        self.number = number  # index in the trace
        self.began = began
        self.admission: AdmissionRequest | None = None
        self.first_token: float | None = None
        self.last_token = 0.0
        self.num_tokens = 0
        self.ended = False
        self.refused = False


class FleetSimulator:
    """One run of a trace. Deterministic: independent of wall-clock time, object hashes and unseeded randomness."""

    def __init__(
        self, shape: FleetShape, costs: StepCosts, trace: Sequence[TraceRequest], losses: Sequence[NodeLoss] = ()
    ) -> None:
        """trace: in order of arrival. Raises ValueError for a request that no engine can compute, or for a node that
        does not exist or is lost while it is gone."""
        check_lengths(trace, shape.engine.max_model_len)
        _check_losses(shape, losses)
        self.shape = shape
        self.events = EventQueue()
        self.streams: list[SimulatedStream | None] = [None] * len(trace)  # by index in the trace, once sent
        self.placed: Counter[int] = Counter()  # requests by replica, first placement
        self.replicas_of: dict[int, int] = {}  # index in the trace -> replica of its first placement
        self._costs = costs
        self._trace = trace
        self._losses = losses
        self._prompts = PromptBuilder(IDS)
        self._clock = Clock(self.events.read)
        self._meters = [Meter(self._clock) for _ in range(shape.num_replicas)]
        self.engines = [self._create_engine(index) for index in range(shape.num_replicas)]
        self._past_engines: list[SimulatedEngine] = []
        self.replicas = Replicas(self.engines, prefix_caching=shape.engine.prefix_caching)
        self.admission = AdmissionController(self.replicas, shape.max_queue, jitter=lambda: 0.0)
        self._dispatcher = LocalDispatcher(self.replicas, self.admission)
        self._first_ids: set[int] = set()  # ids of open requests when first submitted
        self._turns: dict[int, deque[int]] = defaultdict(deque)  # conversation -> indexes of the turns not sent yet
        self._history: dict[int, list[int]] = {}  # conversation -> prompt and reply of its latest finished turn
        self._replays: list[Replay] = []
        self._recomputed_tokens = 0
        self._gaps = GapHistogram()
        self._num_open = 0
        self._most_open = 0

    def run(self) -> FleetReport:
        began = time.perf_counter()
        for number, one in enumerate(self._trace):
            if one.conversation is None:
                self.events.add(one.at, lambda number=number: self._send(number))  # type: ignore[misc]
            else:
                self._turns[one.conversation].append(number)
        for conversation in self._turns:
            self._schedule_turn(conversation)
        for loss in self._losses:
            self.events.add(loss.at, lambda loss=loss: self._lose(loss))  # type: ignore[misc]
        self.events.run()
        return self._report(time.perf_counter() - began)

    def _create_engine(self, index: int) -> SimulatedEngine:
        return SimulatedEngine(
            self.shape.engine, self._costs, self.events, self._meters[index], on_admission=self._on_admission
        )

    # Clients

    def _schedule_turn(self, conversation: int) -> None:
        """Schedule the conversation's next turn at its time, or now if that is past."""
        turns = self._turns[conversation]
        if turns:
            number = turns.popleft()
            self.events.add(max(self._trace[number].at, self.events.now), lambda: self._send(number))
        else:
            self._history.pop(conversation, None)

    def _send(self, number: int) -> None:
        stream = SimulatedStream(number, self.events.now)
        assert self.streams[number] is None, "a request was sent twice"
        self.streams[number] = stream
        self._num_open += 1
        self._most_open = max(self._most_open, self._num_open)
        self.events.add(self.events.now + self._costs.request_seconds, lambda: self._submit(stream))

    def _submit(self, stream: SimulatedStream) -> None:
        one = self._trace[stream.number]
        history = [] if one.conversation is None else self._history.get(one.conversation, [])
        prompt_ids = self._prompts.build(stream.number, one, history)
        sampling = Sampling(max_tokens=one.output_tokens, seed=0, temperature=0.0)
        request = EngineCoreRequest(id=self._dispatcher.next_id(), prompt_ids=prompt_ids, sampling=sampling)

        def refuse(error: RequestError) -> None:
            self._end(stream, prompt_ids, refused=True)

        stream.admission = AdmissionRequest(
            tenant=0,
            priority=0,
            max_tokens=one.output_tokens,
            deadline=None,
            fail=refuse,
            num_waiting=1,
            num_waiting_tokens=len(prompt_ids),
        )
        self._first_ids.add(request.id)
        try:
            (tracked,) = self._dispatcher.submit(
                stream.admission, [(request, lambda output: self._receive(stream, tracked, prompt_ids, output))], refuse
            )
        except RequestError as error:
            self._first_ids.discard(request.id)
            refuse(error)
            return
        self.placed[tracked.engine] += 1
        self.replicas_of[stream.number] = tracked.engine

    def _receive(
        self, stream: SimulatedStream, tracked: TrackedRequest, prompt_ids: list[int], output: EngineCoreOutput
    ) -> None:
        assert not stream.ended, "an output after the end"
        if output.finish_reason is FinishReason.ERROR:
            raise AssertionError(f"request {stream.number} failed: {output.error}")
        num_new = len(output.token_ids)
        now = self.events.now
        if stream.first_token is None:
            assert stream.admission is not None
            stream.first_token = now
            self._dispatcher.begin(stream.admission, len(prompt_ids))
        elif num_new:
            self._gaps.add((now - stream.last_token) / num_new, num_new)
        stream.last_token = now
        stream.num_tokens += num_new
        if output.finish_reason is not None:
            self._replays += tracked.replays
            self._first_ids.discard(tracked.id)
            self._end(stream, prompt_ids, refused=False)

    def _end(self, stream: SimulatedStream, prompt_ids: list[int], *, refused: bool) -> None:
        assert not stream.ended, "a request ended twice"
        stream.ended = True
        stream.refused = refused
        self._num_open -= 1
        if stream.admission is not None:
            self._dispatcher.release(stream.admission, stream.num_tokens, is_whole=not refused)
            stream.admission = None
        one = self._trace[stream.number]
        if one.conversation is not None:
            self._history[one.conversation] = prompt_ids + [REPLY_ID] * stream.num_tokens
            self._schedule_turn(one.conversation)

    def _on_admission(self, request: EngineCoreRequest, cached_tokens: int) -> None:
        if request.id not in self._first_ids:  # a replay has another id
            self._recomputed_tokens += len(request.prompt_ids) + len(request.output_ids) - cached_tokens

    # Nodes

    def _lose(self, loss: NodeLoss) -> None:
        indexes = self.shape.list_replicas(loss.node)
        for index in indexes:
            self.engines[index].die()
        events = self.events
        events.add(events.now + self.shape.detection_seconds, lambda: self._notice(indexes))
        down_seconds = max(loss.down_seconds, self.shape.detection_seconds)
        events.add(events.now + down_seconds, lambda: self._bring_back(indexes))

    def _notice(self, indexes: range) -> None:
        """Do as `server.engines.supervisor.Supervisor` does: the loss of a host is no request's fault."""
        for index in indexes:
            self.engines[index].notice_loss()
        self.replicas.num_restarts += len(indexes)
        self.replicas.drop_lost(dict.fromkeys(indexes, ()), HostLost("the node was lost"))

    def _bring_back(self, indexes: range) -> None:
        for index in indexes:
            self._past_engines.append(self.engines[index])
            self.engines[index] = self._create_engine(index)
        self.replicas.join({index: self.engines[index] for index in indexes})

    # Results

    def _report(self, wall_seconds: float) -> FleetReport:
        streams = [stream for stream in self.streams if stream is not None]
        assert len(streams) == len(self._trace), "a request was not sent"
        assert all(stream.ended for stream in streams), "a request did not end"
        assert self.admission.num_open == 0 and self.admission.num_waiting == 0, "admission control keeps a request"
        finished = [stream for stream in streams if not stream.refused]
        output_tokens = sum(stream.num_tokens for stream in finished)
        seconds = max((s.last_token for s in finished), default=0.0) - min(s.began for s in streams)
        stats = [replica.stats for replica in self.replicas.engines]
        queries = sum(one.prefix_cache_queries for one in stats)
        noticing = self.shape.detection_seconds
        delays = [noticing + one.ended_at - one.lost_at for one in self._replays if one.ended_at is not None]
        engines = [*self.engines, *self._past_engines]
        return FleetReport(
            requests=len(streams),
            finished=len(finished),
            refused=len(streams) - len(finished),
            output_tokens=output_tokens,
            seconds=seconds,
            most_open=self._most_open,
            output_tokens_per_second=output_tokens / seconds if seconds > 0 else math.nan,
            latencies=Latencies.summarise(
                [s.first_token - s.began for s in finished if s.first_token is not None],
                self._gaps,
                [s.last_token - s.began for s in finished],
            ),
            hit_rate=sum(one.prefix_cache_hits for one in stats) / queries if queries else math.nan,
            largest_share=max(self.placed.values(), default=0) / max(1, self.placed.total()),
            preemptions=sum(one.num_preemptions for one in stats),
            steps=sum(engine.num_steps for engine in engines),
            losses=LossCosts(
                lost_replicas=sum(len(self.shape.list_replicas(loss.node)) for loss in self._losses),
                delayed_requests=len(self._replays),
                replayed_tokens=sum(replay.num_tokens for replay in self._replays),
                recomputed_tokens=self._recomputed_tokens,
                delay_p50=percentile(delays, 0.5),
                delay_p99=percentile(delays, 0.99),
            ),
            wall_seconds=wall_seconds,
            events=self.events.num_run,
            events_per_second=self.events.num_run / wall_seconds,
        )


def _check_losses(shape: FleetShape, losses: Sequence[NodeLoss]) -> None:
    free_from: dict[int, float] = {}
    for loss in sorted(losses, key=lambda one: one.at):
        if not 0 <= loss.node < shape.num_nodes:
            raise ValueError(f"there is no node {loss.node}; the fleet has {shape.num_nodes}")
        if loss.at < free_from.get(loss.node, 0.0):
            raise ValueError(f"node {loss.node} is lost at {loss.at} s, while it is gone")
        free_from[loss.node] = loss.at + max(loss.down_seconds, shape.detection_seconds)
