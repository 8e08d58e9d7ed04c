"""`serve-llm top [URL]`: what a running server is doing, from its /metrics and, if it has one, its /status."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from serve_llm.cli.api_client import DEFAULT_URL, ApiClient, ApiError
from serve_llm.common.errors import OptionError
from serve_llm.common.options.sources import OptionParser

DESCRIPTION = (
    "Show what a running server is doing: requests, tokens per second, latencies, KV cache and engines. It reads "
    "/metrics, under any prefix, and /status."
)
CLEAR = "\x1b[H\x1b[2J"
_MARKER = "num_requests_running"  # every supported server has this metric, after its prefix
LATENCIES = {
    "first token": "time_to_first_token_seconds",
    "between tokens": "inter_token_latency_seconds",
    "whole request": "e2e_request_latency_seconds",
}


def create_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="serve-llm top", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"server (default: {DEFAULT_URL})")
    parser.add_argument("--once", action="store_true", help="print one frame and end; rates are since the start")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="time between two frames (default: 2)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="key of the server (default: SERVE_LLM_API_KEY)")
    return parser


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code. Raises ServeError if the server does not answer."""
    options = create_parser().parse_args(list(argv))
    if not 0.1 <= options.interval < math.inf:
        raise OptionError(f"--interval: expected seconds, at least 0.1, not {options.interval}")
    api_key = options.api_key or environ.get("SERVE_LLM_API_KEY", "").split(",")[0] or None
    client = ApiClient(options.url, api_key)
    before: MetricsSample | None = None
    has_answered = False
    try:
        while True:
            try:
                sample = take_sample(client)
                frame = format_frame(client.url, sample, before)
                has_answered = True
                before = sample
            except ApiError as error:  # the server may be restarting
                if not has_answered:
                    raise
                frame = f"{error}\nTrying again every {options.interval:g} s.\n"
                before = None
            if options.once:
                sys.stdout.write(frame)
                return 0
            sys.stdout.write(CLEAR + frame if sys.stdout.isatty() else frame + "\n")
            sys.stdout.flush()
            time.sleep(options.interval)
    except KeyboardInterrupt:
        return 0


class LatencyHistogram(NamedTuple):
    """Cumulative counts by upper bound in seconds."""

    counts: dict[float, float]

    def subtract(self, other: LatencyHistogram) -> LatencyHistogram:
        return LatencyHistogram({bound: count - other.counts.get(bound, 0.0) for bound, count in self.counts.items()})

    def find_quantile(self, share: float) -> float | None:
        """Interpolated within a bucket, as Prometheus does; None if there is no observation."""
        bounds = sorted(self.counts)
        total = self.counts[bounds[-1]] if bounds else 0.0
        if total <= 0:
            return None
        wanted = share * total
        lower = 0.0
        below = 0.0
        for bound in bounds:
            count = self.counts[bound]
            if count >= wanted and count > below:
                return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - below) / (count - below)
            lower = bound
            below = max(below, count)
        return lower


@dataclass
class MetricsSample:
    """The server's metrics at one time. Names are without the prefix; values are summed over engines."""

    time: float
    values: dict[str, float] = field(default_factory=dict)
    labels: dict[str, dict[str, float]] = field(default_factory=dict)  # name -> label values -> value
    latencies: dict[str, LatencyHistogram] = field(default_factory=dict)
    engines: dict[str, dict[str, float]] = field(default_factory=dict)  # engine -> name -> value
    status: dict[str, Any] = field(default_factory=dict)  # empty if the server has no /status
    model: str = ""


def take_sample(client: ApiClient) -> MetricsSample:
    """Raises ApiError."""
    text = client.get_text("/metrics")
    sample = parse_metrics(text, time.monotonic())
    try:
        status = client.get_json("/status")
    except ApiError:  # a server from another vendor
        status = {}
    sample.status = status if isinstance(status, dict) else {}
    return sample


def parse_metrics(text: str, now: float) -> MetricsSample:
    """Raise ApiError if these are not the metrics of a supported server."""
    sample = MetricsSample(now)
    families = list(text_string_to_metric_families(text))
    prefix = next((f.name.removesuffix(_MARKER) for f in families if f.name.endswith(_MARKER)), None)
    if prefix is None:
        raise ApiError(f"/metrics has no {_MARKER}: `serve-llm top` does not know this kind of server")
    for row in itertools.chain.from_iterable(family.samples for family in families):
        if not row.name.startswith(prefix):
            continue
        name = row.name.removeprefix(prefix)
        if name.endswith("_bucket"):
            counts = sample.latencies.setdefault(name.removesuffix("_bucket"), LatencyHistogram({})).counts
            bound = float(row.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + row.value
            continue
        sample.values[name] = sample.values.get(name, 0.0) + row.value
        key = row.labels.get("status") or row.labels.get("finished_reason") or row.labels.get("reason")
        if key:
            by_label = sample.labels.setdefault(name, {})
            by_label[key] = by_label.get(key, 0.0) + row.value
        if "engine" in row.labels:
            sample.engines.setdefault(row.labels["engine"], {})[name] = row.value
        sample.model = sample.model or row.labels.get("model_name", "")
    return sample


def format_frame(url: str, sample: MetricsSample, before: MetricsSample | None) -> str:
    """One frame. before: rates and latencies cover the time since then, otherwise since the server's start."""
    status = sample.status
    values = sample.values
    title = f"{status.get('model') or sample.model} at {url}"
    if status:
        minutes, seconds = divmod(int(status["uptime_seconds"]), 60)
        hours, minutes = divmod(minutes, 60)
        title += f": {status['phase']}, up {hours}:{minutes:02}:{seconds:02}, {status['restarts']} restarts"
    lines = [title]
    if status.get("first_cause"):
        lines.append(f"last restart   {status['first_cause']}")
    running = values.get(_MARKER, 0)
    waiting = values.get("num_requests_waiting", 0)
    lines.append(f"requests       {running:.0f} running, {waiting:.0f} waiting in the engine{_format_queue(status)}")
    lines.append(f"answers        {_format_counts(sample.labels.get('http_requests_total', {}))}")
    lines.append(f"finished       {_format_counts(sample.labels.get('request_success_total', {}))}")
    lines.append(f"tokens/s       {_format_rates(sample, before)}")
    for title, name in LATENCIES.items():
        lines.append(f"{title:<14} {_format_latency(sample, before, name)}")
    lines.append(f"prefix cache   {_format_share(values, 'prefix_cache_hits_total', 'prefix_cache_queries_total')}")
    for number, engine in sorted(sample.engines.items()):
        if _MARKER in engine:
            lines.append(_format_engine(number, engine, status))
    return "\n".join(lines) + "\n"


def _format_queue(status: Mapping[str, Any]) -> str:
    queue = status.get("queue")
    return f", {queue['num_open']} open, {queue['waiting_requests']} without a first token" if queue else ""


def _format_counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {count:.0f}" for name, count in sorted(counts.items()) if count) or "none"


def _format_rates(sample: MetricsSample, before: MetricsSample | None) -> str:
    seconds = sample.time - before.time if before else float(sample.status.get("uptime_seconds", 0))
    parts = []
    for title, name in (("prompt", "prompt_tokens_total"), ("output", "generation_tokens_total")):
        count = sample.values.get(name, 0.0)
        since = count - (before.values.get(name, 0.0) if before else 0.0)
        parts.append(f"{title} {since / seconds:.1f} ({count:,.0f})" if seconds > 0 else f"{title} - ({count:,.0f})")
    return ", ".join(parts)


def _format_latency(sample: MetricsSample, before: MetricsSample | None, name: str) -> str:
    histogram = sample.latencies.get(name, LatencyHistogram({}))
    if before is not None and name in before.latencies:
        histogram = histogram.subtract(before.latencies[name])
    quantiles = [(share, histogram.find_quantile(share)) for share in (0.5, 0.9, 0.99)]
    return ", ".join(f"p{100 * share:.0f} {_format_seconds(value)}" for share, value in quantiles)


def _format_seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 10 else f"{value:.1f} s"


def _format_share(values: Mapping[str, float], part: str, whole: str) -> str:
    total = values.get(whole, 0.0)
    return f"{values.get(part, 0.0) / total:.1%} of {total:,.0f} prompt tokens" if total else "-"


def _format_engine(number: str, engine: Mapping[str, float], status: Mapping[str, Any]) -> str:
    usage = engine.get("kv_cache_usage_perc", 0.0)
    filled = round(20 * min(1.0, usage))
    line = f"engine {number:<7} KV cache [{'#' * filled}{'.' * (20 - filled)}] {usage:.1%}"
    engines = status.get("engines") or []
    described = engines[int(number)] if number.isdecimal() and int(number) < len(engines) else None
    if described:
        num_ranks = described["num_ranks"]
        line += f" of {described['kv_cache']['tokens']:,} tokens, {num_ranks} rank{'s' * (num_ranks > 1)}"
        if not described["ready"]:
            line += ", not ready"
    return f"{line}, {engine[_MARKER]:.0f} running, {engine.get('num_preemptions_total', 0):.0f} preemptions"
