"""`serve-llm bench latency` and `throughput`: the engine without HTTP, through the class LLM."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from serve_llm.cli.bench.chart import Chart, chart_distribution, write_charts
from serve_llm.cli.bench.datasets import WORDS
from serve_llm.cli.bench.report import format_row, format_title, summarize_times, write_json
from serve_llm.cli.bench.serve import positive_int
from serve_llm.cli.run_batch import BATCH_FIELDS
from serve_llm.common.errors import OptionError
from serve_llm.common.options.sources import make_parser, read_command_line

# The options of an engine; the class LLM has neither HTTP nor stored batches.
ENGINE_FIELDS = [option for option in BATCH_FIELDS if option.name not in ("responses_store", "batches_dir")]
PERCENTILES = (10.0, 25.0, 50.0, 75.0, 90.0, 99.0)


def create_latency_parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "serve-llm bench latency", "Measure how long one batch of requests takes, without HTTP.", ENGINE_FIELDS
    )
    _add_lengths(parser, input_len=32, output_len=128)
    parser.add_argument(
        "--batch-size", type=positive_int, default=8, metavar="N", help="requests in a batch (default: 8)"
    )
    parser.add_argument("--num-iters-warmup", type=int, default=10, metavar="N", help="batches before (default: 10)")
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
    parser.add_argument("--num-prompts", type=positive_int, default=1000, metavar="N", help="requests (default: 1000)")
    return parser


def _add_lengths(parser: argparse.ArgumentParser, input_len: int, output_len: int) -> None:
    for name, tokens in (("--input-len", input_len), ("--output-len", output_len)):
        parser.add_argument(name, type=positive_int, default=tokens, metavar="TOKENS", help=f"(default: {tokens})")
    parser.add_argument("--output-json", metavar="FILE", help="write the figures as JSON")


def _read_options(
    parser: argparse.ArgumentParser, argv: Sequence[str], names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of the engine, and those of the benchmark, which have `names`. Raises OptionError."""
    given = read_command_line(parser, ENGINE_FIELDS, argv)
    if given.pop("config", None) is not None:
        raise OptionError("--config: a benchmark takes its options from the command line")
    if "model" not in given:
        raise OptionError("no model: give a checkpoint directory, a Hugging Face id, or `demo` for the bundled model")
    own = {name: given.pop(name, None) for name in names}
    return {"log_level": "warning"} | given, own


class OfflineBench:
    """An engine and random prompts of exact lengths. A context manager."""

    def __init__(self, engine_options: dict[str, Any], input_len: int, output_len: int) -> None:
        """Raises ServeError."""
        from serve_llm import LLM, SamplingParams  # slow to import

        self._params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=output_len)
        self._input_len = input_len
        self._llm = LLM(engine_options.pop("model"), **engine_options)
        warm = self._llm.generate([f" {word}" for word in WORDS], SamplingParams(max_tokens=1), use_tqdm=False)
        self._ids = sorted({token_id for output in warm for token_id in output.prompt_token_ids})
        self._random = random.Random(0)

    def run(self, num_prompts: int, use_tqdm: bool = False) -> tuple[float, int, int]:
        """Seconds, prompt tokens and output tokens."""
        prompts = [self._random.choices(self._ids, k=self._input_len) for _ in range(num_prompts)]
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, self._params, use_tqdm=use_tqdm)
        seconds = time.perf_counter() - began
        return seconds, num_prompts * self._input_len, sum(len(output.outputs[0].token_ids) for output in outputs)

    def __enter__(self) -> OfflineBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()


def measure_latency(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code. Raises ServeError."""
    names = ("input_len", "output_len", "batch_size", "num_iters", "num_iters_warmup", "output_json", "plot")
    engine_options, own = _read_options(create_latency_parser(), argv, names)
    with OfflineBench(engine_options, own["input_len"], own["output_len"]) as bench:
        for _ in range(own["num_iters_warmup"]):
            bench.run(own["batch_size"])
        rounds = tqdm(range(own["num_iters"]), disable=None, dynamic_ncols=True)
        seconds = [bench.run(own["batch_size"])[0] for _ in rounds]
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
    names = ("input_len", "output_len", "num_prompts", "output_json")
    engine_options, own = _read_options(create_throughput_parser(), argv, names)
    with OfflineBench(engine_options, own["input_len"], own["output_len"]) as bench:
        seconds, input_tokens, output_tokens = bench.run(own["num_prompts"], use_tqdm=sys.stderr.isatty())
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
    return _finish(rows, result, own["output_json"])


def _finish(rows: list[str], result: Mapping[str, object], path: str | None) -> int:
    rows.append("=" * 50)
    sys.stdout.write("\n".join(rows) + "\n")
    if path is not None:
        write_json(Path(path), result)
    return 0
