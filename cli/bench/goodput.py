"""Service-level objectives of a benchmark: how many requests meet all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serve_llm.cli.bench.client import TimedReply
from serve_llm.cli.bench.report import count_tokens
from serve_llm.common.errors import OptionError

NAMES = ("ttft", "tpot", "e2el")


def parse_objectives(words: Sequence[str]) -> dict[str, float]:
    """Return milliseconds by name, from words such as ttft:200. Raises OptionError."""
    objectives: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition(":")
        try:
            milliseconds = float(text)
        except ValueError:
            milliseconds = -1.0
        if name not in NAMES or not milliseconds >= 0:
            raise OptionError(
                f"--goodput: expected {', '.join(NAMES)} with milliseconds, such as ttft:200, not {word!r}"
            )
        objectives[name] = milliseconds
    return objectives


def count_met(good: Sequence[TimedReply], objectives: Mapping[str, float]) -> int:
    """Return the replies that meet every objective. good: replies with tokens."""
    return sum(_meets(reply, objectives) for reply in good)


def _meets(reply: TimedReply, objectives: Mapping[str, float]) -> bool:
    times = {
        "ttft": reply.times[0] - reply.began,
        "tpot": (reply.times[-1] - reply.times[0]) / max(1, count_tokens(reply) - 1),
        "e2el": reply.ended - reply.began,
    }
    return all(1000 * times[name] <= milliseconds for name, milliseconds in objectives.items())
