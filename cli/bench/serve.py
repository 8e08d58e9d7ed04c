"""`serve-llm bench serve [URL|MODEL]`: put load on a server and measure its answers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import uvloop
from tqdm import tqdm

from serve_llm.cli.api_client import ApiClient, ApiError, is_url
from serve_llm.cli.bench.chart import Chart, chart_distribution, chart_open, chart_rate, write_charts
from serve_llm.cli.bench.client import StreamClient, TimedReply
from serve_llm.cli.bench.datasets import (
    BenchRequest,
    find_words,
    make_prefix_repetition,
    make_random,
    read_conversations,
)
from serve_llm.cli.bench.goodput import count_met, parse_objectives
from serve_llm.cli.bench.peer_options import refuse_peer_options
from serve_llm.cli.bench.report import (
    TITLES,
    count_tokens,
    find_good,
    find_times,
    format_row,
    format_times,
    format_title,
    summarize_replies,
    write_json,
)
from serve_llm.cli.bench.workloads import WORKLOADS, parse_with_workload
from serve_llm.cli.server_process import end_on_signals, find_server, refuse_mistyped, split_target
from serve_llm.common.errors import OptionError
from serve_llm.common.options.help_text import DefaultsFormatter
from serve_llm.common.options.sources import OptionParser

DESCRIPTION = (
    "Load a server with requests and measure its answers. Give the URL of a running server of any make, or a model, "
    "for which a server is started; other options are then that server's. Names are those of `vllm bench serve`."
)
PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions", "vllm": "/v1/completions"}


def positive_int(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def positive_float(text: str) -> float:
    """Parse a number above 0; inf is allowed."""
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def create_parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="serve-llm bench serve",
        usage="serve-llm bench serve [URL|MODEL] [options] [options of the server]",
        description=DESCRIPTION,
        formatter_class=DefaultsFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--base-url", metavar="URL", help="the same as URL")
    add("--host", help="host of a running server, instead of a URL (default: 127.0.0.1 if --port is given)")
    add("--port", type=positive_int, help="port of a running server (default: 8000 if --host is given)")
    add("--model", metavar="NAME", help="name of the model at a URL (default: the first one)")
    add("--api-key", metavar="KEY", help="key of the server (default: SERVE_LLM_API_KEY)")
    add("--backend", choices=sorted(PATHS), default="openai", help="openai, vllm: completions; openai-chat: chat")
    add("--endpoint", metavar="PATH", help="path of the route, if it is not the backend's")
    add_dataset_name(parser)
    add(
        "--workload",
        choices=sorted(WORKLOADS),
        help="lengths, requests and concurrency of docs/performance.md; other options override them",
    )
    add("--num-prompts", type=positive_int, default=1000, metavar="N", help="requests in all")
    add(
        "--request-rate",
        type=positive_float,
        default=math.inf,
        metavar="RATE",
        help="requests per second; inf: all at once",
    )
    add("--burstiness", type=positive_float, default=1.0, help="1: Poisson arrivals; less: in bursts; more: evenly")
    add("--max-concurrency", type=positive_int, metavar="N", help="maximum number of open requests")
    add("--num-warmups", type=int, default=0, metavar="N", help="requests before the measurement")
    add("--random-input-len", type=positive_int, default=1024, metavar="TOKENS", help="tokens of a prompt")
    add("--random-output-len", type=positive_int, default=128, metavar="TOKENS", help="tokens of an answer")
    add("--random-range-ratio", type=float, default=0.0, metavar="SHARE", help="how much both lengths vary")
    add("--random-prefix-len", type=int, default=0, metavar="TOKENS", help="tokens shared at the start of all prompts")
    add("--sharegpt-output-len", type=positive_int, metavar="TOKENS", help="tokens of an answer, instead of the file's")
    add_prefix_repetition(parser)
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate answers of full length (default: for all datasets but sharegpt)",
    )
    add("--temperature", type=float, default=0.0, help="field of the requests")
    add("--seed", type=int, default=0, help="seed of prompts and arrivals")
    add("--percentile-metrics", default=",".join(TITLES), metavar="NAMES", help="rows of the table")
    add("--metric-percentiles", default="99", metavar="NUMBERS", help="percentiles, with commas")
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="objectives such as ttft:200 tpot:50 e2el:3000; count the requests per second that meet all of them",
    )
    add("--save-result", action="store_true", help="write the figures as JSON")
    add("--result-dir", default=".", metavar="DIR", help="directory of that file")
    add("--result-filename", metavar="FILE", help="name of that file (default: from rate, model and time)")
    add("--plot", metavar="FILE", help="draw times, open requests and tokens per second as SVG")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    return parser


def add_dataset_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dataset-name",
        type=lambda name: name.replace("_", "-"),  # vLLM writes prefix_repetition
        choices=("random", "sharegpt", "prefix-repetition"),
        default="random",
        help="kind of prompts",
    )
    parser.add_argument("--dataset-path", metavar="FILE", help="JSON or JSONL of sharegpt")


def add_prefix_repetition(parser: argparse.ArgumentParser) -> None:
    for name, default, metavar, text in (
        ("prefix-len", 256, "TOKENS", "tokens of a prefix"),
        ("suffix-len", 256, "TOKENS", "tokens of a prompt after its prefix"),
        ("num-prefixes", 10, "N", "number of different prefixes"),
        ("output-len", 128, "TOKENS", "tokens of an answer"),
    ):
        parser.add_argument(
            f"--prefix-repetition-{name}", type=positive_int, default=default, metavar=metavar, help=text
        )


def check_dataset(options: argparse.Namespace) -> None:
    """Raises OptionError."""
    if options.dataset_name == "sharegpt" and not options.dataset_path:
        raise OptionError("--dataset-path: sharegpt needs a file of conversations")
    if options.dataset_name != "sharegpt" and options.dataset_path:
        raise OptionError("--dataset-path belongs to --dataset-name sharegpt")


def find_target(target: str, options: argparse.Namespace) -> str:
    """The URL or model. target: the first argument, or the default URL. Raises OptionError."""
    is_given = target != split_target([])[0]
    has_place = options.host is not None or options.port is not None
    if is_given + has_place + bool(options.base_url) > 1:
        name = "--base-url" if options.base_url else "--host, --port"
        raise OptionError(f"{name}: the server is given twice")
    if has_place:
        host = options.host or "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{options.port or 8000}"
    return options.base_url or target


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code: 1 if a request failed. Raises ServeError."""
    target, rest = split_target(argv)
    parser = create_parser()
    options, server_arguments = parse_with_workload(parser, rest)
    target = find_target(target, options)
    refuse_peer_options(server_arguments, starts_server=not is_url(target))
    refuse_mistyped(parser, server_arguments)
    metrics, percentiles = check_options(options)
    objectives = parse_objectives(options.goodput)
    # The environment may hold several keys; one is enough.
    api_key = options.api_key or environ.get("SERVE_LLM_API_KEY", "").split(",")[0] or None
    with contextlib.ExitStack() as stack:
        stack.enter_context(end_on_signals())
        url = stack.enter_context(find_server(target, server_arguments, options.api_key))
        client = ApiClient(url, api_key)
        model = options.model or client.find_model()
        requests, note = make_requests(options, client, model)
        if note:
            sys.stderr.write(f"serve-llm bench: {note}\n")
        load = LoadGenerator(StreamClient(client.url, api_key), options, model)
        replies, seconds = uvloop.run(load.run(requests))
    result = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "model_id": model,
        "dataset": options.dataset_name,
        "num_prompts": options.num_prompts,
        "request_rate": options.request_rate if math.isfinite(options.request_rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    } | summarize_replies(replies, seconds, percentiles)
    result["request_goodput"] = count_met(find_good(replies), objectives) / seconds if objectives else None
    sys.stdout.write(format_result(result, metrics, percentiles))
    if options.save_result:
        name = f"{options.backend}-{result['request_rate']}qps-{Path(model).name}-{result['date']}.json"
        write_json(Path(options.result_dir) / (options.result_filename or name), result)
    if options.plot:
        write_charts(Path(options.plot), f"{model}, {options.dataset_name}", make_charts(replies, seconds, metrics))
    return 1 if result["failed"] else 0


def check_options(options: argparse.Namespace) -> tuple[list[str], list[float]]:
    """The kinds of times and the percentiles to show. Raises OptionError."""
    metrics = options.percentile_metrics.split(",")
    if not set(metrics) <= TITLES.keys():
        raise OptionError(
            f"--percentile-metrics: expected some of {', '.join(TITLES)}, not {options.percentile_metrics}"
        )
    try:
        percentiles = [float(text) for text in options.metric_percentiles.split(",")]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= percent <= 100 for percent in percentiles):
        raise OptionError(f"--metric-percentiles: expected numbers from 0 to 100, not {options.metric_percentiles}")
    check_dataset(options)
    if options.workload is not None and options.dataset_name != "random":
        raise OptionError(f"--workload {options.workload} has random prompts; omit --dataset-name")
    if not 0 <= options.random_range_ratio < 1:
        raise OptionError("--random-range-ratio: expected a number from 0 to below 1")
    for name in ("num_warmups", "random_prefix_len"):
        if getattr(options, name) < 0:
            raise OptionError(f"--{name.replace('_', '-')}: expected a number that is at least 0")
    return metrics, percentiles


def make_requests(options: argparse.Namespace, client: ApiClient, model: str) -> tuple[list[BenchRequest], str]:
    """The requests, warm-up requests first, and a note for the user. Raises OptionError."""
    count = options.num_prompts + options.num_warmups
    if options.dataset_name == "sharegpt":

        def count_tokens(text: str) -> int:
            try:
                return int(client.post_json("/tokenize", {"model": model, "prompt": text})["count"])
            except (ApiError, LookupError, TypeError):  # a server from another vendor
                return len(text) // 4

        conversations = read_conversations(
            options.dataset_path, count, options.sharegpt_output_len, options.seed, count_tokens
        )
        return conversations, ""
    words = find_words(client, model, options.seed)
    note = "" if words.is_exact else "the server has no /tokenize, so the lengths of prompts are approximate"
    if options.dataset_name == "random":
        lengths = (options.random_input_len, options.random_output_len)
        return make_random(words, count, *lengths, options.random_range_ratio, options.random_prefix_len), note
    requests = make_prefix_repetition(
        words,
        count,
        options.prefix_repetition_prefix_len,
        options.prefix_repetition_suffix_len,
        options.prefix_repetition_num_prefixes,
        options.prefix_repetition_output_len,
    )
    return requests, note


class LoadGenerator:
    """Sends requests at a given rate, with a limit on how many are open at a time."""

    def __init__(self, client: StreamClient, options: argparse.Namespace, model: str) -> None:
        self._client = client
        self._options = options
        self._path = options.endpoint or PATHS[options.backend]
        self._is_chat = options.backend == "openai-chat"
        self._fields: dict[str, Any] = {
            "model": model,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        ignores_eos = options.dataset_name != "sharegpt" if options.ignore_eos is None else options.ignore_eos
        if ignores_eos:
            self._fields["ignore_eos"] = True

    async def run(self, requests: Sequence[BenchRequest]) -> tuple[list[TimedReply], float]:
        """Send the warm-up requests one by one, then all others. Returns replies and seconds."""
        num_warmups = self._options.num_warmups
        for request in requests[:num_warmups]:
            await self._send(request)
        measured = requests[num_warmups:]
        gate = asyncio.Semaphore(self._options.max_concurrency or len(measured))
        arrivals = make_arrivals(
            len(measured), self._options.request_rate, self._options.burstiness, self._options.seed
        )
        is_hidden = True if self._options.disable_tqdm else None  # None: only if stderr is a terminal
        with tqdm(total=len(measured), disable=is_hidden, dynamic_ncols=True) as bar:
            began = time.perf_counter()

            async def arrive(request: BenchRequest, after: float) -> TimedReply:
                await asyncio.sleep(began + after - time.perf_counter())
                async with gate:
                    reply = await self._send(request)
                bar.update()
                return reply

            replies = await asyncio.gather(*map(arrive, measured, arrivals))
            return replies, time.perf_counter() - began

    async def _send(self, request: BenchRequest) -> TimedReply:
        prompt: dict[str, Any] = {"prompt": request.prompt}
        if self._is_chat:
            prompt = {"messages": [{"role": "user", "content": request.prompt}]}
        return await self._client.send(self._path, self._fields | prompt | {"max_tokens": request.output_tokens})


def make_arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which requests arrive, `rate` per second on average; all at 0 if it is infinite."""
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.gammavariate(burstiness, 1 / (rate * burstiness)))
    return times[:count]


def make_charts(replies: Sequence[TimedReply], seconds: float, metrics: Sequence[str]) -> list[Chart]:
    """Distributions of the times, and what happened over the seconds of the run."""
    good = find_good(replies)
    times = find_times(good)
    charts = [chart_distribution(TITLES[name], times[name]) for name in metrics]
    start = min((reply.began for reply in replies), default=0.0)
    # An event may contain several tokens.
    tokens = [(when - start, count_tokens(reply) / len(reply.times)) for reply in good for when in reply.times]
    charts.append(chart_rate("Output tokens", "tokens/s", tokens, seconds))
    charts.append(chart_open("Requests", [(reply.began - start, reply.ended - start) for reply in replies]))
    return charts


def format_result(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The table of `vllm bench serve`."""
    rows = [format_title("Serving Benchmark Result", "=")]
    rows.append(format_row("Successful requests:", result["completed"]))
    rows.append(format_row("Failed requests:", result["failed"]))
    if result["max_concurrency"]:
        rows.append(format_row("Maximum request concurrency:", result["max_concurrency"]))
    if result["request_rate"] != "inf":
        rows.append(format_row("Request rate configured (RPS):", result["request_rate"]))
    rows += [
        format_row("Benchmark duration (s):", result["duration"]),
        format_row("Total input tokens:", result["total_input_tokens"]),
        format_row("Total generated tokens:", result["total_output_tokens"]),
        format_row("Request throughput (req/s):", result["request_throughput"]),
        *(
            []
            if result["request_goodput"] is None
            else [format_row("Request goodput (req/s):", result["request_goodput"])]
        ),
        format_row("Output token throughput (tok/s):", result["output_throughput"]),
        format_row("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    for name in metrics:
        rows += format_times(name, result, percentiles)
    rows.append("=" * 50)
    if result["first_error"]:
        rows.append(f"First error: {result['first_error']}")
    return "\n".join(rows) + "\n"
