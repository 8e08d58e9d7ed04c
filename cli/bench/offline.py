"""`serve-llm bench latency` and `throughput`: measure the engine without HTTP, through the class LLM."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tqdm import tqdm

from serve_llm.cli.bench.chart import Chart, chart_distribution, chart_rate, write_charts
from serve_llm.cli.bench.datasets import WORDS, read_conversations, repeat_prefixes
from serve_llm.cli.bench.peer_options import refuse_peer_options
from serve_llm.cli.bench.report import format_row, format_title, summarize_times, write_json
from serve_llm.cli.bench.serve import add_dataset_name, add_prefix_repetition, check_dataset, positive_int
from serve_llm.cli.run_batch import BATCH_FIELDS
from serve_llm.common.errors import OptionError
from serve_llm.common.options.sources import make_parser, read_command_line

# The engine's options; the class LLM has neither HTTP nor stored batches.
_OF_SERVER = ("responses_store", "batches_dir", "enable_log_requests", "max_log_len", "otlp_traces_endpoint")
ENGINE_FIELDS = [option for option in BATCH_FIELDS if option.name not in _OF_SERVER]
_ENGINE_NAMES = {option.name for option in ENGINE_FIELDS} | {"help", "version", "config"}
PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)


def create_latency_parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "serve-llm bench latency", "Measure how long one batch of requests takes, without HTTP.", ENGINE_FIELDS
    )
    _add_lengths(parser, input_len=32, output_len=128)
    parser.add_argument(
        "--batch-size", type=positive_int, default=8, metavar="N", help="requests in a batch (default: 8)"
    )
    parser.add_argument("--num-iters-warmup", type=int, default=10, metavar="N", help="warm-up batches (default: 10)")
    parser.add_argument(
        "--num-iters", type=positive_int, default=30, metavar="N", help="measured batches (default: 30)"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the times of batches as SVG")
    return parser


def create_throughput_parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "serve-llm bench throughput", "Measure how fast many requests are answered, without HTTP.", ENGINE_FIELDS
    )
    _add_lengths(parser, input_len=1024, output_len=128)
    parser.set_defaults(output_len=None)  # conversations from a file set the length of answers
    parser.add_argument("--num-prompts", type=positive_int, default=1000, metavar="N", help="requests (default: 1000)")
    add_dataset_name(parser)
    add_prefix_repetition(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw how many requests have been answered over time as SVG")
    return parser


def _add_lengths(parser: argparse.ArgumentParser, input_len: int, output_len: int) -> None:
    for name, tokens in (("--input-len", input_len), ("--output-len", output_len)):
        parser.add_argument(name, type=positive_int, default=tokens, metavar="TOKENS", help=f"(default: {tokens})")
    parser.add_argument("--output-json", metavar="FILE", help="write the figures as JSON")


def _read_options(
    parser: argparse.ArgumentParser, argv: Sequence[str], names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the engine's options and the benchmark's, which have `names`. Raises OptionError."""
    refuse_peer_options(parser.parse_known_args(list(argv))[1], starts_server=True)
    given = read_command_line(parser, argv)
    if given.pop("config", None) is not None:
        raise OptionError("--config: a benchmark takes its options from the command line")
    if "model" not in given:
        raise OptionError("no model: give a checkpoint directory, a Hugging Face id, or `demo` for the bundled model")
    own = {name: given.pop(name, None) for name in names}
    return {"log_level": "warning"} | given, own


class OfflineRequest(NamedTuple):
    prompt: str | list[int]
    output_tokens: int


class OfflineBench:
    """An engine, and prompts for it. A context manager."""

    def __init__(self, engine_options: dict[str, Any]) -> None:
        """Raises ServeError."""
        from serve_llm import LLM, SamplingParams  # slow to import

        self._llm = LLM(engine_options.pop("model"), **engine_options)
        self._params = SamplingParams(temperature=0, ignore_eos=True)
        warm = self._llm.generate([f" {word}" for word in WORDS], SamplingParams(max_tokens=1), use_tqdm=False)
        self._ids = sorted({token_id for output in warm for token_id in output.prompt_token_ids})
        self._random = random.Random(0)

    def make_random(self, count: int, input_len: int, output_len: int) -> list[OfflineRequest]:
        return [OfflineRequest(self._make_ids(input_len), output_len) for _ in range(count)]

    def make_prefix_repetition(
        self, count: int, prefix_len: int, suffix_len: int, num_prefixes: int, output_len: int
    ) -> list[OfflineRequest]:
        """See `datasets.repeat_prefixes`."""
        prompts = repeat_prefixes(self._make_ids, self._random, count, prefix_len, suffix_len, num_prefixes)
        return [OfflineRequest(prompt, output_len) for prompt in prompts]

    def read_conversations(self, path: str, count: int, output_len: int | None) -> list[OfflineRequest]:
        """See `datasets.read_conversations`. Raises OptionError."""
        tokenizer = self._llm.get_tokenizer()
        found = read_conversations(path, count, output_len, 0, lambda text: len(tokenizer.encode(text)))
        return [OfflineRequest(*request) for request in found]

    def _make_ids(self, count: int) -> list[int]:
        return self._random.choices(self._ids, k=count)

    def run(self, requests: Sequence[OfflineRequest], use_tqdm: bool | Callable[..., tqdm[Any]] = False) -> OfflineRun:
        params = [msgspec.structs.replace(self._params, max_tokens=request.output_tokens) for request in requests]
        began = time.perf_counter()
        outputs = self._llm.generate([request.prompt for request in requests], params, use_tqdm)
        seconds = time.perf_counter() - began
        input_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        return OfflineRun(began, seconds, input_tokens, sum(len(output.outputs[0].token_ids) for output in outputs))

    def __enter__(self) -> OfflineBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()


class OfflineRun(NamedTuple):
    began: float  # time.perf_counter
    seconds: float
    input_tokens: int
    output_tokens: int


class TimedBar(tqdm):  # type: ignore[type-arg]  # generic in its stubs only
    """A progress bar that records when requests end."""

    def __init__(self, ends: list[float], **options: Any) -> None:
        """ends: receives times of time.perf_counter."""
        super().__init__(**options)
        self._ends = ends

    def update(self, n: float | None = 1) -> bool | None:
        self._ends.append(time.perf_counter())
        return super().update(n)


def measure_latency(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code. Raises ServeError."""
    names = ("input_len", "output_len", "batch_size", "num_iters", "num_iters_warmup", "output_json", "plot")
    engine_options, own = _read_options(create_latency_parser(), argv, names)
    sizes = (own["batch_size"], own["input_len"], own["output_len"])
    with OfflineBench(engine_options) as bench:
        for _ in range(own["num_iters_warmup"]):
            bench.run(bench.make_random(*sizes))
        rounds = tqdm(range(own["num_iters"]), disable=None, dynamic_ncols=True)
        seconds = [bench.run(bench.make_random(*sizes)).seconds for _ in rounds]
    result: dict[str, Any] = {"latencies": seconds, "avg_latency": sum(seconds) / len(seconds)}
    result |= summarize_times("batch", [1000 * one for one in seconds], PERCENTILES)
    rows = [format_title("Latency Benchmark Result", "="), format_row("Batches:", len(seconds))]
    rows.append(format_row("Mean latency (ms):", result["mean_batch_ms"]))
    rows += [format_row(f"P{percent:g} latency (ms):", result[f"p{percent:g}_batch_ms"]) for percent in PERCENTILES]
    if own["plot"] is not None:
        milliseconds = [1000 * one for one in seconds]
        over_time = Chart("Batches in order", "batch", "ms", list(enumerate(milliseconds, 1)))
        charts = [chart_distribution("Time of a batch", milliseconds), over_time]
        write_charts(Path(own["plot"]), f"Batches of {own['batch_size']}", charts)
    return _finish(rows, result, own["output_json"])


def measure_throughput(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code. Raises ServeError."""
    names = [action.dest for action in create_throughput_parser()._actions if action.dest not in _ENGINE_NAMES]
    engine_options, own = _read_options(create_throughput_parser(), argv, names)
    options = argparse.Namespace(**own)
    check_dataset(options)
    with OfflineBench(engine_options) as bench:
        requests = _make_requests(bench, options)
        ends: list[float] = []
        began, seconds, input_tokens, output_tokens = bench.run(requests, partial(TimedBar, ends, disable=None))
    result = {
        "elapsed_time": seconds,
        "num_requests": own["num_prompts"],
        "total_num_tokens": input_tokens + output_tokens,
        "requests_per_second": own["num_prompts"] / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "tokens_per_second": (input_tokens + output_tokens) / seconds,
    }
    rows = [
        format_title("Throughput Benchmark Result", "="),
        format_row("Requests:", own["num_prompts"]),
        format_row("Duration (s):", seconds),
        format_row("Total input tokens:", input_tokens),
        format_row("Total generated tokens:", output_tokens),
        format_row("Request throughput (req/s):", result["requests_per_second"]),
        format_row("Output token throughput (tok/s):", result["output_tokens_per_second"]),
        format_row("Total token throughput (tok/s):", result["tokens_per_second"]),
    ]
    if options.plot is not None:
        times = [end - began for end in ends]
        answered = Chart(
            "Answered requests", "s", "requests", [(0, 0), *zip(times, range(1, len(times) + 1), strict=True)]
        )
        charts = [answered, chart_rate("Rate", "requests/s", [(second, 1) for second in times], seconds)]
        write_charts(Path(options.plot), f"{len(requests)} requests, {options.dataset_name}", charts)
    return _finish(rows, result, own["output_json"])


def _make_requests(bench: OfflineBench, options: argparse.Namespace) -> list[OfflineRequest]:
    """Raises OptionError."""
    if options.dataset_name == "sharegpt":
        return bench.read_conversations(options.dataset_path, options.num_prompts, options.output_len)
    if options.dataset_name == "random":
        return bench.make_random(options.num_prompts, options.input_len, options.output_len or 128)
    return bench.make_prefix_repetition(
        options.num_prompts,
        options.prefix_repetition_prefix_len,
        options.prefix_repetition_suffix_len,
        options.prefix_repetition_num_prefixes,
        options.prefix_repetition_output_len,
    )


def _finish(rows: list[str], result: Mapping[str, object], path: str | None) -> int:
    rows.append("=" * 50)
    sys.stdout.write("\n".join(rows) + "\n")
    if path is not None:
        write_json(Path(path), result)
    return 0
