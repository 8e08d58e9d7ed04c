"""Results of a benchmark: statistics, a table for people, and JSON for programs, under vLLM's names."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from serve_llm.cli.bench.client import TimedReply
from serve_llm.common.errors import OptionError

WIDTH = 50
TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def find_percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated linearly; 0 if there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    lower = int(place)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (place - lower)


def summarize_replies(
    replies: Sequence[TimedReply], seconds: float, percentiles: Sequence[float]
) -> dict[str, float | int | str | None]:
    """Throughput, and mean, median, standard deviation and percentiles of each time in milliseconds."""
    good = find_good(replies)
    input_tokens = sum(reply.usage.prompt_tokens for reply in good if reply.usage)
    counts = [count_tokens(reply) for reply in good]
    errors = [reply.error or "a reply without tokens" for reply in replies if reply.error or not reply.times]
    result: dict[str, float | int | str | None] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "total_input_tokens": input_tokens,
        "total_output_tokens": sum(counts),
        "request_throughput": len(good) / seconds,
        "output_throughput": sum(counts) / seconds,
        "total_token_throughput": (input_tokens + sum(counts)) / seconds,
    }
    for name, values in find_times(good).items():
        result |= summarize_times(name, values, percentiles)
    return result


def find_good(replies: Sequence[TimedReply]) -> list[TimedReply]:
    """Replies with tokens and without an error."""
    return [reply for reply in replies if reply.error is None and reply.times]


def find_times(good: Sequence[TimedReply]) -> dict[str, list[float]]:
    """Each kind of time of TITLES in milliseconds. good: replies with tokens."""
    counts = [count_tokens(reply) for reply in good]
    times = {
        "ttft": [reply.times[0] - reply.began for reply in good],
        "tpot": [
            (reply.times[-1] - reply.times[0]) / (count - 1)
            for reply, count in zip(good, counts, strict=True)
            if count > 1
        ],
        "itl": [later - earlier for reply in good for earlier, later in itertools.pairwise(reply.times)],
        "e2el": [reply.ended - reply.began for reply in good],
    }
    return {name: [1000 * value for value in values] for name, values in times.items()}


def count_tokens(reply: TimedReply) -> int:
    """The server's count, if it reports one; otherwise the number of events."""
    return reply.usage.completion_tokens if reply.usage else len(reply.times)


def summarize_times(name: str, milliseconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Keys such as mean_ttft_ms and p99_ttft_ms."""
    return {
        f"mean_{name}_ms": statistics.fmean(milliseconds) if milliseconds else 0.0,
        f"median_{name}_ms": find_percentile(milliseconds, 50),
        f"std_{name}_ms": statistics.pstdev(milliseconds) if milliseconds else 0.0,
    } | {f"p{percent:g}_{name}_ms": find_percentile(milliseconds, percent) for percent in percentiles}


def format_title(title: str, fill: str) -> str:
    return f" {title} ".center(WIDTH, fill)


def format_row(title: str, value: float | int | str) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{title:<{WIDTH - 12}} {text:<10}".rstrip()


def format_times(name: str, result: Mapping[str, object], percentiles: Sequence[float]) -> list[str]:
    """The rows of one kind of time."""
    rows = [format_title(TITLES[name], "-")]
    statistics = [
        ("Mean", "mean"),
        ("Median", "median"),
        *((f"P{percent:g}", f"p{percent:g}") for percent in percentiles),
    ]
    for title, key in statistics:
        value = result[f"{key}_{name}_ms"]
        assert isinstance(value, float)
        rows.append(format_row(f"{title} {name.upper()} (ms):", value))
    return rows


def write_json(path: Path, result: Mapping[str, object]) -> None:
    """Raises OptionError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}") from None
