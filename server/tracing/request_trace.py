"""The trace of one HTTP request: its span, and a child for each phase and each replay. docs/tracing.md lists them.

Names are those of OpenTelemetry's conventions for generative AI, and vLLM's. Spans hold numbers and names, never
prompts, generated text or keys.
"""

from __future__ import annotations

import math

from opentelemetry.trace import Span, StatusCode, Tracer, set_span_in_context
from starlette.requests import ClientDisconnect

from serve_llm.common.errors import ServeError
from serve_llm.common.types import FinishReason
from serve_llm.server.engines.tracked_request import Replay
from serve_llm.server.generate.delta import RequestTimes
from serve_llm.server.generate.generation import Generation
from serve_llm.server.http.errors import answer_for
from serve_llm.server.metrics.meter import Clock
from serve_llm.server.response.builder import ResponseMeta

# Operations named by the semantic conventions; others are named after their job.
_OPERATIONS = {
    "completion": "text_completion",
    "infill": "text_completion",
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "compact": "chat",
    "embed": "embeddings",
    "embed_cohere": "embeddings",
}

Attributes = dict[str, str | int | float | list[str] | list[int]]


def name_operation(job: str) -> str:
    return _OPERATIONS.get(job, job)


class RequestTrace:
    """Ends once: with its generation, or with an error before it."""

    def __init__(
        self, tracer: Tracer, span: Span, operation: str, arrival: float, clock: Clock, epoch_offset: int
    ) -> None:
        """arrival: clock time. epoch_offset: nanoseconds from the clock's time to that of the epoch."""
        self._tracer = tracer
        self._span = span
        self._operation = operation
        self._is_stream = False
        self._arrival = arrival
        self._clock = clock
        self._epoch_offset = epoch_offset

    def format_traceparent(self) -> str:
        """Format the request's span in W3C Trace Context."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def follow(self, generation: Generation, meta: ResponseMeta, *, is_stream: bool = False) -> None:
        """End with this generation."""
        self._is_stream = is_stream
        self._span.update_name(f"{self._operation} {meta.model}")
        self._span.set_attributes(
            {
                "gen_ai.request.model": meta.model,
                "gen_ai.response.model": meta.model,
                "gen_ai.response.id": meta.id,
            }
        )
        generation.on_end = self._end_with

    def _end_with(self, generation: Generation) -> None:
        """Record that the generation has ended, whether or not it is complete."""
        if not self._span.is_recording():
            return
        times = generation.counts(with_times=True).times
        self._span.set_attributes(_describe_request(generation) | _describe_result(generation))
        if self._is_stream:
            self._span.set_attribute("gen_ai.request.stream", True)
        if engines := _find_engines(generation, -math.inf, math.inf):
            self._span.set_attribute("serve_llm.engines", engines)
        if times is not None:
            self._span.set_attributes(_describe_latency(times, self._arrival))
            if self._is_stream:
                self._span.set_attribute("gen_ai.response.time_to_first_chunk", times.first_token - self._arrival)
            self._add_phase("queue", generation, times.submitted, times.scheduled)
            self._add_phase("prefill", generation, times.scheduled, times.first_token)
            if not generation.request.pooling:
                self._add_phase("decode", generation, times.first_token, times.last_token)
        self._add_replays(generation)
        self._end(generation.error)

    def fail(self, error: BaseException) -> None:
        """End the trace with an error. Does nothing if the generation has ended before."""
        if self._span.is_recording():
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self._span.set_attribute("error.type", type(error).__name__)
            if _is_servers_fault(error):
                self._span.set_status(StatusCode.ERROR)
        self._span.end(self._to_epoch(self._clock.read()))

    def _add_replays(self, generation: Generation) -> None:
        """Add one child span per crash, for all choices that it interrupted."""
        by_crash: dict[float, list[Replay]] = {}
        for choice in generation.choices:
            for replay in choice.submitted.replays:
                by_crash.setdefault(replay.lost_at, []).append(replay)
        if not by_crash:
            return
        self._span.set_attribute("serve_llm.num_replays", len(by_crash))
        now = self._clock.read()
        for lost_at, replays in sorted(by_crash.items()):
            attributes: Attributes = {
                "serve_llm.replay.cause": replays[0].cause,
                "serve_llm.replay.num_sequences": len(replays),
                "serve_llm.replay.num_tokens": sum(replay.num_tokens for replay in replays),
                "serve_llm.replay.from_engines": sorted({replay.engine for replay in replays}),
            }
            to_engines = {replay.next_engine for replay in replays if replay.next_engine is not None}
            attributes["serve_llm.engines"] = sorted(to_engines)
            ended_at = max(now if replay.ended_at is None else replay.ended_at for replay in replays)
            self._add_child("replay", lost_at, ended_at, attributes)

    def _add_phase(self, name: str, generation: Generation, start: float, end: float) -> None:
        """start, end: clock times."""
        self._add_child(name, start, end, {"serve_llm.engines": _find_engines(generation, start, end)})

    def _add_child(self, name: str, start: float, end: float, attributes: Attributes) -> None:
        """start, end: clock times."""
        parent = set_span_in_context(self._span)
        child = self._tracer.start_span(name, parent, attributes=attributes, start_time=self._to_epoch(start))
        child.end(self._to_epoch(end))

    def _to_epoch(self, clock_time: float) -> int:
        return self._epoch_offset + to_nanoseconds(clock_time)


def to_nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _find_engines(generation: Generation, start: float, end: float) -> list[int]:
    """Return the indices of the engines that had the choices between these clock times, judging by their outputs and
    losses."""
    found: set[int] = set()
    for choice in generation.choices:
        replays = choice.submitted.replays
        begin = -math.inf
        for replay in replays:
            if begin <= end and replay.lost_at >= start:
                found.add(replay.engine)
            begin = replay.lost_at
        has_output = choice.times.first_token is not None if not replays else replays[-1].next_engine is not None
        if has_output and begin <= end:
            found.add(choice.submitted.engine)
    return sorted(found)


def _describe_request(generation: Generation) -> Attributes:
    request = generation.request
    attributes: Attributes = {"gen_ai.usage.num_sequences": len(generation.choices)}
    if request.pooling:
        return attributes
    sampling = request.samplings[0]
    attributes |= {
        "gen_ai.request.n": request.params.n,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
    }
    if request.params.n != 1:
        attributes["gen_ai.request.choice.count"] = request.params.n
    if request.params.seed is not None and request.params.seed < 2**63:  # attributes have 64 bits with a sign
        attributes["gen_ai.request.seed"] = request.params.seed
    for name in ("top_k", "frequency_penalty", "presence_penalty"):
        if value := getattr(sampling, name):
            attributes[f"gen_ai.request.{name}"] = float(value)
    return attributes


def _describe_result(generation: Generation) -> Attributes:
    """Describe the token counts under vLLM's names and under those of the semantic conventions."""
    counts = generation.counts()
    unfinished = FinishReason.ABORT if generation.error is None else FinishReason.ERROR
    reasons = {choice.output.finish_reason or unfinished for choice in generation.choices}
    attributes: Attributes = {
        "gen_ai.response.finish_reasons": sorted(reason.value for reason in reasons),
        "gen_ai.usage.prompt_tokens": counts.prompt,
        "gen_ai.usage.input_tokens": counts.prompt,
        "gen_ai.usage.completion_tokens": counts.completion,
        "gen_ai.usage.output_tokens": counts.completion,
        "gen_ai.usage.cache_read.input_tokens": counts.cached,
    }
    if counts.reasoning is not None:
        attributes["gen_ai.usage.reasoning.output_tokens"] = counts.reasoning
    return attributes


def _describe_latency(times: RequestTimes, arrival: float) -> Attributes:
    """Describe the latencies in seconds."""
    return {
        "gen_ai.latency.time_to_first_token": times.first_token - arrival,
        "gen_ai.latency.e2e": times.last_token - arrival,
        "gen_ai.latency.time_in_queue": times.scheduled - times.submitted,
        "gen_ai.latency.time_in_model_prefill": times.first_token - times.scheduled,
        "gen_ai.latency.time_in_model_decode": times.last_token - times.first_token,
        "gen_ai.latency.time_in_model_inference": times.last_token - times.scheduled,
    }


def _is_servers_fault(error: BaseException) -> bool:
    if isinstance(error, ServeError):
        return answer_for(error).status >= 500
    return not isinstance(error, ClientDisconnect)
