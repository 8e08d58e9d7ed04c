"""Prometheus' text form of the engines' meters and latest stats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from serve_llm.common.options.schema import Options
from serve_llm.common.options.speculative import NO_DRAFTS, PROMPT_LOOKUP
from serve_llm.common.types import EPLBStats, ModelInfo, OffloadStats, SchedulerStats
from serve_llm.server.metrics.histogram import Histogram
from serve_llm.server.metrics.meter import MeasuredEngine, MeasuredEngines, Meter, ServerCounts
from serve_llm.server.metrics.usage import UsageMeter, UsageTotals


class PrometheusExporter:
    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)  # resident memory, descriptors and CPU time of this process

    def text(self) -> bytes:
        return generate_latest(self._registry)


class EngineCollector(Collector):
    """Yield every metric family with one sample, or one set of samples, per engine."""

    def __init__(self, replicas: MeasuredEngines, counts: ServerCounts, model_name: str, options: Options) -> None:
        self._replicas = replicas
        self._engines = replicas.engines
        self._draft_source: str | None = None  # None until an engine is ready
        self._counts = counts
        self._model_name = model_name
        self._options = options
        self._prefix = options.metrics_prefix

    def collect(self) -> Iterator[Metric]:
        for name, text, gauge in _GAUGES:
            yield self._family(GaugeMetricFamily, name, text, gauge)
        yield self._waiting_by_reason()
        for name, text, counter in _COUNTERS:
            yield self._family(CounterMetricFamily, name, text, counter)
        for name, text, count, count_lookups in _DRAFTS:
            yield self._by_source(name, text, count, count_lookups)
        yield self._accepted_by_position()
        yield self._by_label(
            "request_success", "Ended choices by reason.", "finished_reason", lambda meter: meter.finished
        )
        yield self._by_label(
            "prompt_tokens_by_source", "Where prompt tokens came from.", "source", lambda meter: meter.prompt_sources
        )
        yield self._by_label(
            "restarts", "Engine processes replaced, by reason.", "reason", lambda meter: meter.restarts
        )
        for name, text, kind, value in _OFFLOAD:
            yield self._by_tier(kind, name, text, value)
        yield self._balancedness()
        yield from self._collect_server_counts(self._counts)
        yield from self._collect_usage(self._replicas.usage)
        for name, text, histogram in _HISTOGRAMS:
            yield self._histogram(name, text, histogram)
        if any(engine.ready for engine in self._engines):
            yield self._cache_config()

    def _collect_server_counts(self, counts: ServerCounts) -> Iterator[Metric]:
        yield self._by_reason("requests_refused", "Requests refused by reason.", "reason", counts.refused)
        yield self._by_reason("ignored_fields", "Request fields without effect.", "route", counts.ignored_fields)
        yield self._by_reason(
            "http_requests", "HTTP requests by the status of the answer.", "status", counts.http.statuses
        )
        stored = counts.stored
        yield self._build_server_metric(
            GaugeMetricFamily, "stored_responses", "Stored responses.", stored.num_responses
        )
        yield self._build_server_metric(GaugeMetricFamily, "stored_response_bytes", "Their bytes.", stored.num_bytes)
        yield self._build_server_metric(
            CounterMetricFamily, "evicted_responses", "Responses dropped.", stored.num_evicted
        )
        batches = counts.batches
        yield self._build_server_metric(
            GaugeMetricFamily, "batch_requests_running", "Requests of batches under way.", batches.num_running
        )
        yield self._by_reason("batch_requests", "Requests of batches answered.", "outcome", batches.answered)

        num_ready = sum(engine.ready for engine in self._engines)
        yield self._build_server_metric(GaugeMetricFamily, "engines_ready", "Engines that take requests.", num_ready)
        front_ends = counts.front_ends
        yield self._build_server_metric(
            GaugeMetricFamily, "front_ends", "Processes that answer clients.", front_ends.num_serving
        )
        yield self._build_server_metric(
            CounterMetricFamily, "front_end_restarts", "Front ends replaced after they ended.", front_ends.num_restarts
        )

    def _collect_usage(self, usage: UsageMeter) -> Iterator[Metric]:
        for name, text, read in _KEY_USAGES:
            yield self._by_reason(name, text, "key", {key: read(used) for key, used in usage.by_key.items()})
        for name, text, read in _ADAPTER_USAGES:
            by_adapter = {adapter: read(used) for adapter, used in usage.by_adapter.items()}
            yield self._by_reason(name, text, "adapter", by_adapter)

    def _labelled_engines(self) -> Iterator[tuple[list[str], MeasuredEngine]]:
        for index, engine in enumerate(self._engines):
            if engine.has_served:
                yield [self._model_name, str(index)], engine

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: Callable[[SchedulerStats, Meter], float],
    ) -> Metric:
        family = kind(self._prefix + name, text, labels=LABELS)
        for labels, engine in self._labelled_engines():
            family.add_metric(labels, value(engine.stats, engine.meter))
        return family

    def _histogram(self, name: str, text: str, histogram: Callable[[Meter], Histogram]) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, text, labels=LABELS)
        for labels, engine in self._labelled_engines():
            values = histogram(engine.meter)
            family.add_metric(labels, values.cumulative_buckets(), values.sum)
        return family

    def _by_label(self, name: str, text: str, label: str, counts: Callable[[Meter], Mapping[Any, int]]) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=[*LABELS, label])
        for labels, engine in self._labelled_engines():
            for value, count in counts(engine.meter).items():
                family.add_metric([*labels, str(value)], count)
        return family

    def _waiting_by_reason(self) -> Metric:
        name = self._prefix + "num_requests_waiting_by_reason"
        family = GaugeMetricFamily(name, "Requests waiting in the engine by reason.", labels=[*LABELS, "reason"])
        for labels, engine in self._labelled_engines():
            stats = engine.stats
            family.add_metric([*labels, "capacity"], stats.num_waiting - stats.num_deferred)
            family.add_metric([*labels, "deferred"], stats.num_deferred)
        return family

    def _by_source(
        self,
        name: str,
        text: str,
        count: Callable[[SchedulerStats], int],
        count_lookups: Callable[[SchedulerStats], int],
    ) -> Metric:
        """Counts of drafts. All engines have the same draft source; without it, there are no samples. count_lookups:
        those that are looked up beside a draft model."""
        if self._draft_source is None:
            self._draft_source = next(
                (engine.model_info.draft_source for engine in self._engines if engine.ready), None
            )
        family = CounterMetricFamily(self._prefix + name, text, labels=[*LABELS, "source"])
        if self._draft_source is not None:
            for labels, engine in self._labelled_engines():
                num_lookups = count_lookups(engine.stats)
                family.add_metric([*labels, self._draft_source], count(engine.stats) - num_lookups)
                if self._draft_source not in (NO_DRAFTS, PROMPT_LOOKUP):
                    family.add_metric([*labels, PROMPT_LOOKUP], num_lookups)
        return family

    def _accepted_by_position(self) -> Metric:
        name = self._prefix + "spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, "Draft tokens accepted by position.", labels=[*LABELS, "position"])
        for labels, engine in self._labelled_engines():
            for position, count in enumerate(engine.stats.accepted_by_position or [0]):
                family.add_metric([*labels, str(position)], count)
        return family

    def _by_tier(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: Callable[[OffloadStats], int],
    ) -> Metric:
        family = kind(self._prefix + name, text, labels=[*LABELS, "tier"])
        for labels, engine in self._labelled_engines():
            for tier, stats in (("memory", engine.stats.offload_memory), ("disk", engine.stats.offload_disk)):
                family.add_metric([*labels, tier], value(stats or OffloadStats()))
        return family

    def _balancedness(self) -> Metric:
        """Mean rows of a rank divided by those of the busiest one."""
        name = self._prefix + "eplb_balancedness"
        family = GaugeMetricFamily(name, "Evenness of the ranks' tokens.", labels=[*LABELS, "placement"])
        for labels, engine in self._labelled_engines():
            eplb = engine.stats.eplb or NO_EPLB
            for placement, busiest in (("before", eplb.busiest_rows), ("after", eplb.busiest_rows_after)):
                family.add_metric([*labels, placement], eplb.mean_rows / busiest if busiest else 0.0)
        return family

    def _build_server_metric(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, value: int
    ) -> Metric:
        family = kind(self._prefix + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _by_reason(self, name: str, text: str, label: str, counts: Mapping[Any, int]) -> Metric:
        """Counts of the server by reason, not by engine."""
        family = CounterMetricFamily(self._prefix + name, text, labels=["model_name", label])
        for value, count in counts.items():
            family.add_metric([self._model_name, str(value)], count)
        return family

    def _cache_config(self) -> Metric:
        name = self._prefix + "cache_config_info"
        descriptions = [
            (labels, self._describe_cache(engine.model_info))
            for labels, engine in self._labelled_engines()
            if engine.ready
        ]
        family = GaugeMetricFamily(name, "The KV cache, as labels.", labels=[*LABELS, *descriptions[0][1]])
        for labels, description in descriptions:
            family.add_metric([*labels, *map(str, description.values())], 1)
        return family

    def _describe_cache(self, model_info: ModelInfo) -> dict[str, object]:
        """All names but the third are vLLM's. num_gpu_blocks counts blocks on any device."""
        options = self._options
        tokens = model_info.kv_cache_tokens
        offload_bytes = options.kv_offload_memory
        return {
            "block_size": model_info.block_size,
            "num_gpu_blocks": model_info.num_kv_blocks,
            "kv_cache_tokens": tokens,
            "kv_cache_size_tokens": tokens,
            "kv_cache_max_concurrency": f"{tokens / model_info.max_model_len:.2f}",
            "cache_dtype": options.kv_cache_dtype,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "enable_prefix_caching": model_info.prefix_caching and options.enable_prefix_caching is not False,
            "prefix_caching_hash_algo": "sha256",
            "num_cpu_blocks": model_info.num_offload_blocks,
            "kv_offloading_backend": "None" if offload_bytes is None else "native",
            "kv_offloading_size": "None" if offload_bytes is None else f"{offload_bytes / 2**30:g}",  # GiB
        }


LABELS = ("model_name", "engine")
NO_EPLB = EPLBStats()
_GAUGES: tuple[tuple[str, str, Callable[[SchedulerStats, Meter], float]], ...] = (
    ("num_requests_running", "Requests being computed.", lambda stats, _: stats.num_running),
    ("num_requests_waiting", "Requests waiting in the engine.", lambda stats, _: stats.num_waiting),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda stats, _: stats.kv_cache_usage),
)
_COUNTERS: tuple[tuple[str, str, Callable[[SchedulerStats, Meter], float]], ...] = (
    ("prompt_tokens", "Prompt tokens computed or found.", lambda _, meter: meter.prompt_tokens),
    ("generation_tokens", "Generated tokens delivered.", lambda _, meter: meter.generation_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up.", lambda stats, _: stats.prefix_cache_queries),
    ("prefix_cache_hits", "Prompt tokens found.", lambda stats, _: stats.prefix_cache_hits),
    ("num_preemptions", "Requests put back to waiting.", lambda stats, _: stats.num_preemptions),
    ("forced_tokens", "Tokens that grammars forced.", lambda stats, _: stats.num_forced_tokens),
    ("eplb_placements", "Times that a layer's experts moved.", lambda stats, _: (stats.eplb or NO_EPLB).num_placements),
    ("eplb_moved_experts", "Experts received.", lambda stats, _: (stats.eplb or NO_EPLB).num_moved),
    ("eplb_moved_bytes", "Bytes of their weights.", lambda stats, _: (stats.eplb or NO_EPLB).moved_bytes),
    ("replayed_requests", "Choices continued by another process.", lambda _, meter: meter.replayed_requests),
    ("replayed_tokens", "Tokens computed again for them.", lambda _, meter: meter.replayed_tokens),
)
_DRAFTS: tuple[tuple[str, str, Callable[[SchedulerStats], int], Callable[[SchedulerStats], int]], ...] = (
    (
        "spec_decode_num_drafts",
        "Times a step verified drafts.",
        lambda stats: stats.num_drafts,
        lambda stats: stats.num_lookup_drafts,
    ),
    (
        "spec_decode_num_draft_tokens",
        "Draft tokens verified.",
        lambda stats: stats.num_draft_tokens,
        lambda stats: stats.num_lookup_draft_tokens,
    ),
    (
        "spec_decode_num_accepted_tokens",
        "Draft tokens accepted.",
        lambda stats: stats.num_accepted_tokens,
        lambda stats: stats.num_lookup_accepted_tokens,
    ),
)
_OFFLOAD: tuple[
    tuple[str, str, type[GaugeMetricFamily] | type[CounterMetricFamily], Callable[[OffloadStats], int]], ...
] = (
    ("kv_offload_blocks", "Blocks there.", GaugeMetricFamily, lambda tier: tier.num_blocks),
    ("kv_offload_bytes", "Their bytes.", GaugeMetricFamily, lambda tier: tier.num_bytes),
    ("kv_offload_hits", "Blocks read back.", CounterMetricFamily, lambda tier: tier.num_hits),
    ("kv_offload_hit_bytes", "Their bytes.", CounterMetricFamily, lambda tier: tier.hit_bytes),
    ("kv_offload_stored", "Blocks stored.", CounterMetricFamily, lambda tier: tier.num_stored),
    ("kv_offload_stored_bytes", "Their bytes.", CounterMetricFamily, lambda tier: tier.stored_bytes),
    ("kv_offload_evicted", "Blocks dropped for lack of space.", CounterMetricFamily, lambda tier: tier.num_evicted),
    ("kv_offload_corrupt", "Blocks that were damaged.", CounterMetricFamily, lambda tier: tier.num_corrupt),
    ("kv_offload_errors", "Reads and writes that failed.", CounterMetricFamily, lambda tier: tier.num_errors),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[Meter], Histogram]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", lambda meter: meter.time_to_first_token),
    ("inter_token_latency_seconds", "From one token to the next.", lambda meter: meter.inter_token_latency),
    ("e2e_request_latency_seconds", "From arrival to the end.", lambda meter: meter.request_latency),
    ("request_queue_time_seconds", "From the engine's receipt to first scheduling.", lambda meter: meter.queue_time),
    ("request_prefill_time_seconds", "From first scheduling to the first token.", lambda meter: meter.prefill_time),
    ("request_decode_time_seconds", "From the first token to the last.", lambda meter: meter.decode_time),
    ("request_inference_time_seconds", "From first scheduling to the last token.", lambda meter: meter.inference_time),
    (
        "request_time_per_output_token_seconds",
        "Mean time per token of a choice, after the first.",
        lambda meter: meter.time_per_output_token,
    ),
    ("request_params_n", "Choices that a prompt asks for.", lambda meter: meter.params_n),
    ("request_params_max_tokens", "Tokens that a choice may have.", lambda meter: meter.params_max_tokens),
    ("request_max_num_generation_tokens", "Tokens of a longest choice.", lambda meter: meter.max_generation_tokens),
    ("request_prompt_tokens", "Prompt tokens of a request.", lambda meter: meter.request_prompt_tokens),
    ("request_prefill_kv_computed_tokens", "Of these, computed.", lambda meter: meter.computed_prompt_tokens),
    ("request_generation_tokens", "Generated tokens of a choice.", lambda meter: meter.request_generation_tokens),
    ("request_num_preemptions", "Preemptions of a choice.", lambda meter: meter.request_preemptions),
    ("iteration_tokens_total", "Tokens computed in a step.", lambda meter: meter.step_tokens),
    ("recovery_seconds", "From an engine's end until another is ready.", lambda meter: meter.recovery),
)
_KEY_USAGES: tuple[tuple[str, str, Callable[[UsageTotals], int]], ...] = (
    ("key_requests", "Requests by API key.", lambda used: used.num_requests),
    ("key_prompt_tokens", "Prompt tokens by API key.", lambda used: used.prompt_tokens),
    ("key_generation_tokens", "Generated tokens by API key.", lambda used: used.generation_tokens),
)
_ADAPTER_USAGES: tuple[tuple[str, str, Callable[[UsageTotals], int]], ...] = (
    ("adapter_requests", "Requests by LoRA adapter.", lambda used: used.num_requests),
    ("adapter_prompt_tokens", "Prompt tokens by LoRA adapter.", lambda used: used.prompt_tokens),
    ("adapter_generation_tokens", "Generated tokens by LoRA adapter.", lambda used: used.generation_tokens),
)
