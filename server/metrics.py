"""What the server counts, and how Prometheus reads it. Names and meanings: docs/metrics.md.

Tokens are counted here, at delivery, so that usage, metrics and logs agree. `Meter` is plain numbers, because it is
touched for every token: the clock is read once per engine step, and a histogram costs one bisection. `Exposition` makes
Prometheus' families of them when it is asked. Knows neither HTTP nor text.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_llm.engine.types import FinishReason, ModelFacts, Stats
from serve_llm.engine.wire import Step

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_DURATION = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


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

    def count_finished(self, reason: FinishReason, num_tokens: int, arrival: float) -> None:
        self.finished[reason] += 1
        self.request_generation_tokens.observe(num_tokens)
        self.request_latency.observe(self.clock() - arrival)


class Measured(Protocol):
    """What of the engine's client is shown."""

    stats: Stats

    @property
    def ready(self) -> bool: ...

    @property
    def facts(self) -> ModelFacts: ...


class Exposition:
    """Prometheus' text form of a meter and of the engine's newest state."""

    def __init__(self, meter: Meter, engine: Measured, model_name: str, prefix: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Families(meter, engine, model_name, prefix))
        ProcessCollector(registry=self._registry)  # resident memory, descriptors, CPU time of this process

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Families(Collector):
    def __init__(self, meter: Meter, engine: Measured, model_name: str, prefix: str) -> None:
        self._meter = meter
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": "0"}
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        meter, stats = self._meter, self._engine.stats
        yield self._gauge("num_requests_running", "Requests being computed.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests waiting in the engine.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", stats.kv_cache_usage)
        yield self._counter("prompt_tokens", "Prompt tokens computed or found.", meter.prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens delivered.", meter.generation_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits)
        yield self._counter("num_preemptions", "Requests put back to waiting.", stats.num_preemptions)
        yield self._finished()
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", meter.time_to_first_token),
            ("inter_token_latency_seconds", "From one token to the next.", meter.inter_token_latency),
            ("e2e_request_latency_seconds", "From arrival to the end.", meter.request_latency),
            ("request_queue_time_seconds", "From the engine's receipt to first scheduling.", meter.queue_time),
            ("request_prompt_tokens", "Prompt tokens of a request.", meter.request_prompt_tokens),
            ("request_generation_tokens", "Generated tokens of a choice.", meter.request_generation_tokens),
            ("iteration_tokens_total", "Tokens computed in a step.", meter.step_tokens),
        ):
            yield self._histogram(name, text, histogram)
        if self._engine.ready:
            yield self._cache_config(self._engine.facts)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), histogram.buckets(), histogram.sum)
        return family

    def _finished(self) -> Metric:
        name, labels = self._prefix + "request_success", [*self._labels, "finished_reason"]
        family = CounterMetricFamily(name, "Ended choices by reason.", labels=labels)
        for reason, count in self._meter.finished.items():
            family.add_metric([*self._labels.values(), reason.value], count)
        return family

    def _cache_config(self, facts: ModelFacts) -> Metric:
        shown = {
            "block_size": facts.block_size,
            "num_gpu_blocks": facts.num_kv_blocks,  # under vLLM's name, on any device
            "kv_cache_tokens": facts.kv_cache_tokens,
        }
        name = self._prefix + "cache_config_info"
        family = GaugeMetricFamily(name, "The KV cache, as labels.", labels=[*self._labels, *shown])
        family.add_metric([*self._labels.values(), *map(str, shown.values())], 1)
        return family
