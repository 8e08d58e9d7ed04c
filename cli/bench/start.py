"""`serve-llm bench start MODEL`: how long it takes until a server answers."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from serve_llm.cli.api_client import ApiClient
from serve_llm.cli.bench.chart import Chart, write_charts
from serve_llm.cli.bench.client import StreamClient
from serve_llm.cli.bench.peer_options import refuse_peer_options
from serve_llm.cli.bench.report import format_row, format_title, summarize_times, write_json
from serve_llm.cli.bench.serve import positive_int
from serve_llm.cli.server_process import ServerProcess, end_on_signals, refuse_mistyped, split_target
from serve_llm.common.errors import OptionError, ServeError
from serve_llm.common.options.sources import OptionParser


def create_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="serve-llm bench start",
        usage="serve-llm bench start MODEL [options] [options of the server]",
        description="Start a server several times, and measure the time until it serves and until the first token.",
        allow_abbrev=False,
    )
    parser.add_argument("--num-iters", type=positive_int, default=3, metavar="N", help="starts (default: 3)")
    parser.add_argument("--output-json", metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw the times of the starts as SVG")
    return parser


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code. Raises ServeError."""
    model, rest = split_target(argv)
    parser = create_parser()
    options, server_arguments = parser.parse_known_args(rest)
    if not argv or model != argv[0]:
        raise OptionError("bench start: give a model first")
    refuse_peer_options(server_arguments, starts_server=True)
    refuse_mistyped(parser, server_arguments)
    api_key = environ.get("SERVE_LLM_API_KEY", "").split(",")[0] or None
    serving: list[float] = []
    first_token: list[float] = []
    with end_on_signals():
        for _ in range(options.num_iters):
            with ServerProcess([model, *server_arguments]) as server:
                serving.append(1000 * server.start_seconds)
                first_token.append(serving[-1] + 1000 * _find_first_token_seconds(server.url, api_key))
    result = summarize_times("serving", serving, ()) | summarize_times("first_token", first_token, ())
    rows = [format_title("Start-up Benchmark Result", "="), format_row("Starts:", options.num_iters)]
    for title, name, times in (("Serving", "serving", serving), ("First token", "first_token", first_token)):
        rows.append(format_row(f"{title} after, median (ms):", result[f"median_{name}_ms"]))
        rows.append(format_row(f"{title} after, min (ms):", min(times)))
        rows.append(format_row(f"{title} after, max (ms):", max(times)))
    rows.append("=" * 50)
    sys.stdout.write("\n".join(rows) + "\n")
    if options.output_json is not None:
        write_json(Path(options.output_json), result | {"serving_ms": serving, "first_token_ms": first_token})
    if options.plot is not None:
        charts = [
            Chart(title, "start", "ms", list(enumerate(times, 1)))
            for title, times in (("Serving", serving), ("First token", first_token))
        ]
        write_charts(Path(options.plot), f"Starts of {model}", charts)
    return 0


def _find_first_token_seconds(url: str, api_key: str | None) -> float:
    """Raises ServeError."""
    body = {
        "model": ApiClient(url, api_key).find_model(),
        "prompt": "one two three",
        "max_tokens": 1,
        "stream": True,
        "ignore_eos": True,
    }
    reply = asyncio.run(StreamClient(url, api_key).send("/v1/completions", body))
    if reply.error is not None or not reply.times:
        raise ServeError(f"the first request failed: {reply.error or 'no token came'}")
    return reply.times[0] - reply.began
