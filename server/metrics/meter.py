"""The server's clock and counters. docs/metrics.md lists names and meanings; `prometheus` exposes them.

Tokens are counted when they are delivered, so that usage, metrics and logs agree. Counting runs for every token: a
`Meter` holds plain numbers, and the clock is read once per engine step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from serve_llm.common.types import FinishReason, ModelInfo, SchedulerStats
from serve_llm.server.metrics.histogram import Histogram, HistogramCounts
from serve_llm.server.metrics.http_meter import HttpMeter
from serve_llm.server.metrics.usage import UsageMeter

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_DURATION = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
# vLLM's bounds, some of which its dashboards offer as targets, and shorter ones.
_MEAN_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 3, 4, 5, 10, 20)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# vLLM's names for the sources of prompt tokens. Here, none come from other servers, so the last one stays 0.
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
# Why an engine process was replaced; docs/metrics.md explains each.
RESTART_REASONS = ("killed", "exited", "failed", "rank", "hung", "step_timeout", "start", "peer")


class Clock:
    """Monotonic seconds: the time base of arrivals, deadlines and latencies. All engines of a server share one."""

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        self.read = read  # the current time
        self.step_time = read()  # when the newest engine step arrived

    @classmethod
    def running_from(cls, now: float) -> Clock:
        """Create a clock that reads `now` at this moment, like the one on another host."""
        offset = now - time.perf_counter()
        return cls(lambda: time.perf_counter() + offset)

    def advance(self) -> None:
        """Call once per engine step, before its outputs are delivered."""
        self.step_time = self.read()


class MeterCounts(msgspec.Struct, frozen=True, array_like=True):
    """The counts of a `Meter` by attribute, without zeros."""

    numbers: dict[str, int]
    labelled: dict[str, dict[str, int]]
    histograms: dict[str, HistogramCounts]


@dataclass
class StoreUsage:
    """What the store of responses holds."""

    num_responses: int = 0
    num_bytes: int = 0
    num_evicted: int = 0  # responses dropped because of a limit


@dataclass
class BatchCounts:
    """Requests of stored batches."""

    num_running: int = 0
    answered: dict[str, int] = field(default_factory=lambda: {"completed": 0, "failed": 0})  # by outcome

    def count_answer(self, status: int) -> None:
        self.answered["completed" if status < 400 else "failed"] += 1


@dataclass
class FrontEndCounts:
    """Processes that answer clients."""

    num_serving: int
    num_restarts: int = 0  # processes that ended by themselves and were replaced


@dataclass(frozen=True, kw_only=True)
class ServerCounts:
    """Counts of the server rather than of an engine, updated by their owners."""

    refused: Counter[str]  # requests that reached no engine, by reason
    ignored_fields: Counter[str]  # fields of requests that had no effect, by route
    http: HttpMeter
    stored: StoreUsage
    batches: BatchCounts
    front_ends: FrontEndCounts


@dataclass(slots=True)
class ChoiceTimes:
    """Clock times of one choice; None until they come."""

    arrival: float  # its request's
    submitted: float = 0.0
    scheduled: float | None = None  # for the first time
    first_token: float | None = None
    last_token: float | None = None


class Meter:
    """Counters of one engine. Each choice counts as a request, but the tokens of a prompt count once."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.prompt_tokens = 0
        self.prompt_sources = dict.fromkeys(PROMPT_SOURCES, 0)
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.time_to_first_token = Histogram((*_LATENCY, 160, 640, 2560))
        self.inter_token_latency = Histogram(_LATENCY)
        self.request_latency = Histogram(_DURATION)
        self.queue_time = Histogram(_DURATION)
        self.prefill_time = Histogram(_DURATION)
        self.decode_time = Histogram(_DURATION)
        self.inference_time = Histogram(_DURATION)
        self.time_per_output_token = Histogram(_MEAN_LATENCY)
        self.params_n = Histogram(_CHOICES)
        self.params_max_tokens = Histogram(_TOKENS)
        self.max_generation_tokens = Histogram(_TOKENS)
        self.request_prompt_tokens = Histogram(_TOKENS)
        self.computed_prompt_tokens = Histogram(_TOKENS)
        self.request_generation_tokens = Histogram(_TOKENS)
        self.request_preemptions = Histogram(_PREEMPTIONS)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.restarts = dict.fromkeys(RESTART_REASONS, 0)
        self.replayed_requests = 0
        self.replayed_tokens = 0
        self.recovery = Histogram(_DURATION)

    def count_step(self, stats: SchedulerStats) -> None:
        """Count an engine step and advance the clock. Call before the step's outputs are delivered."""
        self.clock.advance()
        if stats.step_tokens:
            self.step_tokens.observe(stats.step_tokens)

    def count_prompt(self, num_tokens: int, num_cached: int, num_choices: int) -> None:
        """Count a prompt. num_cached: tokens found in the prefix cache."""
        num_computed = num_tokens - num_cached
        self.prompt_tokens += num_tokens
        self.prompt_sources["local_cache_hit"] += num_cached
        self.prompt_sources["local_compute"] += num_computed
        self.request_prompt_tokens.observe(num_tokens)
        self.computed_prompt_tokens.observe(num_computed)
        self.params_n.observe(num_choices)

    def count_first_output(self, times: ChoiceTimes, queued_seconds: float | None) -> None:
        """Count the first output of a choice and record its times."""
        times.first_token = self.clock.step_time
        times.scheduled = min(times.submitted + (queued_seconds or 0.0), times.first_token)
        self.time_to_first_token.observe(times.first_token - times.arrival)
        self.prefill_time.observe(times.first_token - times.scheduled)
        if queued_seconds is not None:
            self.queue_time.observe(queued_seconds)

    def count_tokens(self, num_tokens: int, previous: float | None) -> float:
        """Count generated tokens of one choice. Returns the clock time of their arrival.

        previous: the return value for the choice's preceding tokens; None for its first ones.
        """
        now = self.clock.step_time
        self.generation_tokens += num_tokens
        if previous is not None and num_tokens:
            self.inter_token_latency.observe((now - previous) / num_tokens, num_tokens)
        return now

    def count_replayed(self, num_tokens: int) -> None:
        """Count a choice whose `num_tokens` prompt and output tokens are recomputed by another process."""
        self.replayed_requests += 1
        self.replayed_tokens += num_tokens

    def count_finished(
        self, reason: FinishReason, num_tokens: int, max_tokens: int, times: ChoiceTimes, num_preemptions: int
    ) -> None:
        """Count a finished choice with `num_tokens` generated tokens out of at most `max_tokens`."""
        self.finished[reason] += 1
        self.request_preemptions.observe(num_preemptions)
        self.request_generation_tokens.observe(num_tokens)
        self.params_max_tokens.observe(max_tokens)
        self.request_latency.observe(self.clock.read() - times.arrival)
        if times.scheduled is not None and times.first_token is not None and times.last_token is not None:
            decode_time = times.last_token - times.first_token
            self.decode_time.observe(decode_time)
            self.time_per_output_token.observe(decode_time / (num_tokens - 1) if num_tokens > 1 else 0.0)
            self.inference_time.observe(times.last_token - times.scheduled)

    def take(self) -> MeterCounts:
        """Return all counts and reset them."""
        taken = MeterCounts({}, {}, {})
        for name, value in vars(self).items():
            if isinstance(value, Histogram):
                counts = value.take()
                if any(counts.counts):
                    taken.histograms[name] = counts
            elif isinstance(value, dict):
                if any(value.values()):
                    taken.labelled[name] = {str(label): count for label, count in value.items() if count}
                    value.update(dict.fromkeys(value, 0))
            elif isinstance(value, int) and value:
                taken.numbers[name] = value
                setattr(self, name, 0)
        return taken

    def add(self, counts: MeterCounts) -> None:
        """Add the counts of another meter."""
        for name, number in counts.numbers.items():
            setattr(self, name, getattr(self, name) + number)
        for name, labelled in counts.labelled.items():
            own = getattr(self, name)
            for label, count in labelled.items():
                own[label] += count
        for name, histogram in counts.histograms.items():
            getattr(self, name).add(histogram)


class AdaptersInUse(NamedTuple):
    """Names of the adapters of open requests, sorted."""

    running: list[str]  # their requests have a token
    waiting: list[str]  # their requests have none yet


class MeasuredEngine(Protocol):
    """The part of an engine replica that is exported and logged."""

    meter: Meter
    has_served: bool  # it counts as an engine; otherwise it may be added later

    @property
    def stats(self) -> SchedulerStats: ...

    @property
    def ready(self) -> bool: ...

    @property
    def model_info(self) -> ModelInfo: ...


class MeasuredEngines(Protocol):
    """The part of `server.engines.replicas.Replicas` that is exported."""

    @property
    def engines(self) -> Sequence[MeasuredEngine]: ...

    @property
    def usage(self) -> UsageMeter: ...

    def list_adapters_in_use(self) -> AdaptersInUse: ...
