"""`serve-llm bench serve|latency|throughput|start`: measure a server, or the engine without HTTP."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from serve_llm.common.errors import OptionError

USAGE = """\
usage: serve-llm bench serve [URL|MODEL]    load a server and measure its answers
       serve-llm bench latency MODEL        time of one batch, without HTTP
       serve-llm bench throughput MODEL     tokens per second of many requests, without HTTP
       serve-llm bench start MODEL          time until a server answers

Each has --help.
"""


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code. Raises ServeError."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    name = "start" if argv[0] == "startup" else argv[0]  # as vLLM spells it
    if name not in BENCHMARKS:
        raise OptionError(f"bench: expected one of {', '.join(BENCHMARKS)}, not {argv[0]!r}")
    return BENCHMARKS[name](argv[1:], environ)


def _serve(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from serve_llm.cli.bench import serve

    return serve.main(argv, environ)


def _measure_latency(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from serve_llm.cli.bench.offline import measure_latency

    return measure_latency(argv, environ)


def _measure_throughput(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from serve_llm.cli.bench.offline import measure_throughput

    return measure_throughput(argv, environ)


def _start(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    from serve_llm.cli.bench import start

    return start.main(argv, environ)


BENCHMARKS: dict[str, Callable[[Sequence[str], Mapping[str, str]], int]] = {
    "serve": _serve,
    "latency": _measure_latency,
    "throughput": _measure_throughput,
    "start": _start,
}
