"""What `LLM.get_metrics` returns: the metrics of docs/metrics.md that an engine has, as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.metrics.meter import BatchCounts, FrontEndCounts, ServerCounts, StoreUsage
from serve_llm.server.metrics.prometheus import EngineCollector

_OF_A_SERVER = ("stored_response", "evicted_responses", "batch_requests", "front_end", "http_requests")


@dataclass(frozen=True)
class MetricValue:
    """One value of a metric. name: as in docs/metrics.md, that of a counter without `_total`, as in vLLM."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class GaugeValue(MetricValue):
    value: float


@dataclass(frozen=True)
class CounterValue(MetricValue):
    value: int


@dataclass(frozen=True)
class HistogramValue(MetricValue):
    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)  # upper bound -> values up to it; the last is "+Inf"


def read_metrics(replicas: Replicas, model_name: str, prefix: str, draft_source: str) -> list[MetricValue]:
    """prefix, draft_source: see `EngineCollector`."""
    counts = ServerCounts(
        refused=Counter(),
        ignored_fields=Counter(),
        statuses=Counter(),
        stored=StoreUsage(),
        batches=BatchCounts(),
        front_ends=FrontEndCounts(0),
    )
    collector = EngineCollector(replicas.engines, counts, replicas.usage, model_name, prefix, draft_source)
    return [
        value
        for metric in collector.collect()
        if not metric.name.removeprefix(prefix).startswith(_OF_A_SERVER)
        for value in _read_values(metric)
    ]


def _read_values(metric: Metric) -> Iterable[MetricValue]:
    if metric.type != "histogram":
        for sample in metric.samples:
            if metric.type == "counter":
                yield CounterValue(metric.name, sample.labels, int(sample.value))
            else:
                yield GaugeValue(metric.name, sample.labels, sample.value)
        return
    buckets: dict[str, int] = {}
    for sample in metric.samples:
        if sample.name.endswith("_bucket"):
            buckets[sample.labels["le"]] = int(sample.value)
            continue
        if sample.name.endswith("_count"):
            count = int(sample.value)
            continue
        yield HistogramValue(metric.name, sample.labels, count, sample.value, buckets)
        buckets = {}
