"""What `LLM.get_metrics` returns: the metrics of docs/metrics.md that an engine has, as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from serve_llm.common.options.schema import Options
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.metrics.http_meter import HttpMeter
from serve_llm.server.metrics.meter import BatchCounts, FrontEndCounts, ServerCounts, StoreUsage
from serve_llm.server.metrics.vllm_names import choose_collector

_OF_A_SERVER = ("stored_response", "evicted_responses", "batch_requests", "front_end", "http_request")


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


def read_metrics(replicas: Replicas, model_name: str, options: Options) -> list[MetricValue]:
    counts = ServerCounts(
        refused=Counter(),
        ignored_fields=Counter(),
        http=HttpMeter(),
        stored=StoreUsage(),
        batches=BatchCounts(),
        front_ends=FrontEndCounts(0),
    )
    collector = choose_collector(options)(replicas, counts, model_name, options)
    return [
        value
        for metric in collector.collect()
        if not metric.name.removeprefix(options.metrics_prefix).startswith(_OF_A_SERVER)
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
