"""Metrics that only exist with --metrics-prefix vllm:, in the form that vLLM's Grafana dashboards query."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from serve_llm.common.options.schema import Options
from serve_llm.common.types import OffloadStats, SchedulerStats
from serve_llm.server.metrics.histogram import Histogram
from serve_llm.server.metrics.http_meter import HttpMeter
from serve_llm.server.metrics.meter import Meter
from serve_llm.server.metrics.prometheus import LABELS, EngineCollector

VLLM_PREFIX = "vllm:"
# Engines never sleep here.
_SLEEP_STATES = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
_GAUGES: tuple[tuple[str, str, Callable[[SchedulerStats, Meter], float]], ...] = (
    ("gpu_cache_usage_perc", "Old name of kv_cache_usage_perc.", lambda stats, _: stats.kv_cache_usage),
)
_COUNTERS: tuple[tuple[str, str, Callable[[SchedulerStats, Meter], float]], ...] = (
    ("prompt_tokens_cached", "Prompt tokens found.", lambda _, meter: meter.prompt_sources["local_cache_hit"]),
    ("kv_offload_load_bytes", "Bytes read back to the device.", lambda stats, _: _host_memory(stats).hit_bytes),
    ("kv_offload_store_bytes", "Bytes moved to host memory.", lambda stats, _: _host_memory(stats).stored_bytes),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[Meter], Histogram]], ...] = (
    (
        "time_per_output_token_seconds",
        "Old name of inter_token_latency_seconds.",
        lambda meter: meter.inter_token_latency,
    ),
)


class VllmCollector(EngineCollector):
    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        for name, text, gauge in _GAUGES:
            yield self._family(GaugeMetricFamily, name, text, gauge)
        for name, text, counter in _COUNTERS:
            yield self._family(CounterMetricFamily, name, text, counter)
        for name, text, histogram in _HISTOGRAMS:
            yield self._histogram(name, text, histogram)
        yield self._sleep_state()
        if self._options.enable_lora:
            yield self._adapters_in_use()
        yield from _collect_routes(self._counts.http)

    def _sleep_state(self) -> Metric:
        name = self._prefix + "engine_sleep_state"
        family = GaugeMetricFamily(name, "1 for the state that the engine is in.", labels=[*LABELS, "sleep_state"])
        for labels, _ in self._labelled_engines():
            for state, value in _SLEEP_STATES.items():
                family.add_metric([*labels, state], value)
        return family

    def _adapters_in_use(self) -> Metric:
        """Adapters as labels; the value is the time, by which readers find the newest series."""
        adapters = self._replicas.list_adapters_in_use()
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily(self._prefix + "lora_requests_info", "Adapters of open requests.", labels=labels)
        values = [str(self._options.max_loras), ",".join(adapters.running), ",".join(adapters.waiting)]
        family.add_metric(values, time.time())
        return family


def choose_collector(options: Options) -> type[EngineCollector]:
    """Choose the collector by --metrics-prefix."""
    return VllmCollector if options.metrics_prefix == VLLM_PREFIX else EngineCollector


def _host_memory(stats: SchedulerStats) -> OffloadStats:
    return stats.offload_memory or OffloadStats()


def _collect_routes(meter: HttpMeter) -> Iterator[Metric]:
    """Collect under the names and labels of prometheus-fastapi-instrumentator, which vLLM's server uses."""
    requests = CounterMetricFamily("http_requests", "HTTP requests.", labels=["handler", "method", "status"])
    text = "Time until an HTTP request was answered."
    seconds = HistogramMetricFamily("http_request_duration_seconds", text, labels=["handler", "method"])
    for (route, method), totals in meter.routes.items():
        for status, count in totals.statuses.items():
            requests.add_metric([route, method, status], count)
        seconds.add_metric([route, method], totals.seconds.cumulative_buckets(), totals.seconds.sum)
    yield requests
    yield seconds
