"""Results of a simulation or a measured run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from bench.workloads import percentile


class GapHistogram:
    """A histogram of times between tokens, with bins that are 1 % wide, so that millions of them take little memory."""

    _PER_LOG = 100.0

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, times: int = 1) -> None:
        self._counts[math.floor(math.log(max(seconds, 1e-6)) * self._PER_LOG)] += times

    def percentile(self, share: float) -> float:
        """Return the middle of the bin that contains the quantile `share`; NaN if the histogram is empty."""
        wanted = share * self._counts.total()
        seen = 0
        for place in sorted(self._counts):
            seen += self._counts[place]
            if seen >= wanted:
                return math.exp((place + 0.5) / self._PER_LOG)
        return math.nan


class Latencies(msgspec.Struct, frozen=True):
    """Latencies in seconds."""

    ttft_p50: float  # time to first token
    ttft_p99: float
    itl_p50: float  # between tokens
    itl_p99: float
    latency_p50: float  # from sending a request to its last token
    latency_p99: float

    @classmethod
    def summarise(cls, first: Sequence[float], gaps: GapHistogram, whole: Sequence[float]) -> Latencies:
        return cls(
            ttft_p50=percentile(first, 0.5),
            ttft_p99=percentile(first, 0.99),
            itl_p50=gaps.percentile(0.5),
            itl_p99=gaps.percentile(0.99),
            latency_p50=percentile(whole, 0.5),
            latency_p99=percentile(whole, 0.99),
        )


class LossCosts(msgspec.Struct, frozen=True):
    """The cost of lost nodes."""

    lost_replicas: int = 0
    delayed_requests: int = 0  # requests that continued elsewhere; each counts every time
    replayed_tokens: int = 0  # their prompt and output tokens at that time
    recomputed_tokens: int = 0  # tokens that the next engine had not cached
    delay_p50: float = math.nan  # seconds from the loss to the next token
    delay_p99: float = math.nan


class FleetReport(msgspec.Struct, frozen=True):
    """The result of a simulation."""

    requests: int
    finished: int
    refused: int  # by admission control
    output_tokens: int  # refused requests have none
    seconds: float  # virtual time, from the first arrival to the last token
    most_open: int  # requests at a time
    output_tokens_per_second: float
    latencies: Latencies
    hit_rate: float  # share of prompt tokens found in prefix caches
    largest_share: float  # share of the placed requests that each replica got
    preemptions: int
    steps: int
    losses: LossCosts
    wall_seconds: float  # run time of the simulation
    events: int
    events_per_second: float


def describe_report(report: FleetReport) -> str:
    """Format the report for people."""
    one, losses = report.latencies, report.losses
    lines = [
        f"requests          {report.finished} finished, {report.refused} refused, of {report.requests}; "
        f"at most {report.most_open} open",
        f"throughput        {report.output_tokens_per_second:,.0f} output tokens/s in {report.seconds:.1f} s",
        f"first token       {1e3 * one.ttft_p50:.0f} ms (p99 {1e3 * one.ttft_p99:.0f} ms)",
        f"between tokens    {1e3 * one.itl_p50:.1f} ms (p99 {1e3 * one.itl_p99:.1f} ms)",
        f"latency           {one.latency_p50:.2f} s (p99 {one.latency_p99:.2f} s)",
        f"prefix cache      {report.hit_rate:.1%} of prompt tokens",
        f"busiest replica   {report.largest_share:.2%} of requests",
        f"preemptions       {report.preemptions}",
    ]
    if losses.lost_replicas:
        lines.append(
            f"lost replicas     {losses.lost_replicas}: {losses.delayed_requests} requests delayed by "
            f"{losses.delay_p50:.2f} s (p99 {losses.delay_p99:.2f} s), {losses.recomputed_tokens:,} of "
            f"{losses.replayed_tokens:,} tokens computed again"
        )
    lines.append(
        f"simulation        {report.steps:,} steps, {report.events:,} events in {report.wall_seconds:.1f} s, "
        f"{report.events_per_second:,.0f}/s"
    )
    return "\n".join(lines)
