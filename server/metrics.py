"""What the server counts, and how Prometheus reads it. Names and meanings: docs/metrics.md.

Tokens are counted here, at delivery, so that usage, metrics and logs agree. `Meter` is plain numbers, because it is
touched for every token: the clock is read once per engine step, and a histogram costs one bisection. `Exposition` makes
Prometheus' families of them when it is asked. Knows neither HTTP nor text.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_llm.engine.types import FinishReason, ModelFacts, Stats
from serve_llm.engine.wire import Step

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_DURATION = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# How an engine process ended: by a signal, by itself without a word, with an error, by a rank's failure; killed because
# it gave no sign of life, or no result of a step; or it could not be started.
RESTART_REASONS = ("killed", "exited", "failed", "rank", "hung", "step_timeout", "start", "peer")


class Histogram:
    """Counts per bucket; `bounds` are upper ends, included."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        total, found = 0, []
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found

    @property
    def sum(self) -> float:
        return self._sum


class Meter:
    """Counts of one engine's requests. A request is one choice here, except that its prompt's tokens count once."""

    clock = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.now = self.clock()  # of the newest step
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.time_to_first_token = Histogram((*_LATENCY, 160, 640, 2560))
        self.inter_token_latency = Histogram(_LATENCY)
        self.request_latency = Histogram(_DURATION)
        self.queue_time = Histogram(_DURATION)
        self.request_prompt_tokens = Histogram(_TOKENS)
        self.request_generation_tokens = Histogram(_TOKENS)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.restarts = dict.fromkeys(RESTART_REASONS, 0)
        self.replayed_requests = self.replayed_tokens = 0
        self.recovery = Histogram(_DURATION)

    def count_step(self, step: Step) -> None:
        """The engine client's hook, called before a step's outputs are handed out."""
        self.now = self.clock()
        if step.stats.step_tokens:
            self.step_tokens.observe(step.stats.step_tokens)

    def count_prompt(self, num_tokens: int) -> None:
        self.prompt_tokens += num_tokens
        self.request_prompt_tokens.observe(num_tokens)

    def count_first(self, arrival: float, queued_seconds: float | None) -> None:
        """The first output of a choice. `arrival` in the clock's time."""
        self.time_to_first_token.observe(self.now - arrival)
        if queued_seconds is not None:
            self.queue_time.observe(queued_seconds)

    def count_tokens(self, num_tokens: int, last: float | None) -> float:
        """Generated tokens of one choice; `last`: when its tokens before these came, None for the first. Returns when
        these came."""
        self.generation_tokens += num_tokens
        if last is not None and num_tokens:
            self.inter_token_latency.observe((self.now - last) / num_tokens, num_tokens)
        return self.now

    def count_replayed(self, num_tokens: int) -> None:
        """A choice that goes on with another engine process, which computes its prompt and output so far again."""
        self.replayed_requests += 1
        self.replayed_tokens += num_tokens

    def count_finished(self, reason: FinishReason, num_tokens: int, arrival: float) -> None:
        self.finished[reason] += 1
        self.request_generation_tokens.observe(num_tokens)
        self.request_latency.observe(self.clock() - arrival)


class Measured(Protocol):
    """What of an engine's client is shown."""

    meter: Meter

    @property
    def stats(self) -> Stats: ...

    @property
    def ready(self) -> bool: ...

    @property
    def facts(self) -> ModelFacts: ...


class Refusing(Protocol):
    """Who refuses requests before they reach an engine."""

    refused: dict[str, int]  # by reason


class Exposition:
    """Prometheus' text form of the engines' meters and newest states."""

    def __init__(self, engines: Sequence[Measured], refusing: Refusing, model_name: str, prefix: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Families(engines, refusing, model_name, prefix))
        ProcessCollector(registry=self._registry)  # resident memory, descriptors, CPU time of this process

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Families(Collector):
    """Every family has one sample, or one set of them, for each engine."""

    def __init__(self, engines: Sequence[Measured], refusing: Refusing, model_name: str, prefix: str) -> None:
        self._refusing = refusing
        self._engines = engines
        self._model_name = model_name
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        for name, text, gauge in _GAUGES:
            yield self._family(GaugeMetricFamily, name, text, gauge)
        for name, text, counter in _COUNTERS:
            yield self._family(CounterMetricFamily, name, text, counter)
        yield self._by_label(
            "request_success", "Ended choices by reason.", "finished_reason", lambda meter: meter.finished
        )
        yield self._by_label(
            "restarts", "Engine processes replaced, by reason.", "reason", lambda meter: meter.restarts
        )
        yield self._refused()
        for name, text, histogram in _HISTOGRAMS:
            yield self._histogram(name, text, histogram)
        if any(engine.ready for engine in self._engines):
            yield self._cache_config()

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: Callable[[Stats, Meter], float],
    ) -> Metric:
        family = kind(self._prefix + name, text, labels=_LABELS)
        for labels, engine in self._samples():
            family.add_metric(labels, value(engine.stats, engine.meter))
        return family

    def _samples(self) -> Iterator[tuple[list[str], Measured]]:
        for index, engine in enumerate(self._engines):
            yield [self._model_name, str(index)], engine

    def _histogram(self, name: str, text: str, histogram: Callable[[Meter], Histogram]) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, text, labels=_LABELS)
        for labels, engine in self._samples():
            family.add_metric(labels, histogram(engine.meter).buckets(), histogram(engine.meter).sum)
        return family

    def _by_label(self, name: str, text: str, label: str, counts: Callable[[Meter], Mapping[Any, int]]) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=[*_LABELS, label])
        for values, engine in self._samples():
            for value, count in counts(engine.meter).items():
                family.add_metric([*values, str(value)], count)
        return family

    def _refused(self) -> Metric:
        name = self._prefix + "requests_refused"
        family = CounterMetricFamily(name, "Requests refused by reason.", labels=["model_name", "reason"])
        for reason, count in self._refusing.refused.items():
            family.add_metric([self._model_name, reason], count)
        return family

    def _cache_config(self) -> Metric:
        shown: dict[str, Callable[[ModelFacts], int]] = {
            "block_size": lambda facts: facts.block_size,
            "num_gpu_blocks": lambda facts: facts.num_kv_blocks,  # under vLLM's name, on any device
            "kv_cache_tokens": lambda facts: facts.kv_cache_tokens,
        }
        name = self._prefix + "cache_config_info"
        family = GaugeMetricFamily(name, "The KV cache, as labels.", labels=[*_LABELS, *shown])
        for labels, engine in self._samples():
            if engine.ready:
                family.add_metric([*labels, *(str(value(engine.facts)) for value in shown.values())], 1)
        return family


_LABELS = ("model_name", "engine")
_GAUGES: tuple[tuple[str, str, Callable[[Stats, Meter], float]], ...] = (
    ("num_requests_running", "Requests being computed.", lambda stats, _: stats.num_running),
    ("num_requests_waiting", "Requests waiting in the engine.", lambda stats, _: stats.num_waiting),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda stats, _: stats.kv_cache_usage),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Stats, Meter], float]], ...] = (
    ("prompt_tokens", "Prompt tokens computed or found.", lambda _, meter: meter.prompt_tokens),
    ("generation_tokens", "Generated tokens delivered.", lambda _, meter: meter.generation_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda stats, _: stats.prefix_cache_queries),
    ("prefix_cache_hits", "Prompt tokens found.", lambda stats, _: stats.prefix_cache_hits),
    ("num_preemptions", "Requests put back to waiting.", lambda stats, _: stats.num_preemptions),
    ("replayed_requests", "Choices continued by another process.", lambda _, meter: meter.replayed_requests),
    ("replayed_tokens", "Tokens computed again for them.", lambda _, meter: meter.replayed_tokens),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[Meter], Histogram]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", lambda meter: meter.time_to_first_token),
    ("inter_token_latency_seconds", "From one token to the next.", lambda meter: meter.inter_token_latency),
    ("e2e_request_latency_seconds", "From arrival to the end.", lambda meter: meter.request_latency),
    ("request_queue_time_seconds", "From the engine's receipt to first scheduling.", lambda meter: meter.queue_time),
    ("request_prompt_tokens", "Prompt tokens of a request.", lambda meter: meter.request_prompt_tokens),
    ("request_generation_tokens", "Generated tokens of a choice.", lambda meter: meter.request_generation_tokens),
    ("iteration_tokens_total", "Tokens computed in a step.", lambda meter: meter.step_tokens),
    ("recovery_seconds", "From an engine's end until another is ready.", lambda meter: meter.recovery),
)
