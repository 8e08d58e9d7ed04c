"""`serve-llm run-batch MODEL -i IN -o OUT`: answer a file of requests in OpenAI's batch format, without a server.

The output file is the only state: a run that was killed continues when the same command is started again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import uvloop
from tqdm import tqdm

from serve_llm.common.errors import OptionError
from serve_llm.common.logs import configure, hold_records
from serve_llm.common.options.schema import OPTION_FIELDS, Options
from serve_llm.common.options.sources import make_parser, merge_sources, read_command_line
from serve_llm.server.assemble import Assembly, assemble
from serve_llm.server.batches.files import BatchInput, BatchOutput
from serve_llm.server.batches.lines import BatchRequest
from serve_llm.server.batches.runner import run_requests
from serve_llm.server.daemon import StopSignals

logger = logging.getLogger(__name__)

# Options for HTTP, and for hosts that find each other without Ray: this command does not have them.
ABSENT_OPTIONS = frozenset(
    {
        "host",
        "port",
        "ssl_keyfile",
        "ssl_certfile",
        "api_key",
        "allowed_origins",
        "max_queue",
        "request_timeout",
        "drain_timeout",
        "metrics_prefix",
        "nnodes",
        "node_rank",
        "master_addr",
    }
)
BATCH_FIELDS = [option for option in OPTION_FIELDS if option.name not in ABSENT_OPTIONS]
DESCRIPTION = (
    "Answer a file of requests in OpenAI's batch format, without a server. Started again with the same files, it "
    "continues where it was stopped. Options mean what they mean to the server."
)
INTERRUPTED = 130  # exit code after a signal, as in shells


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code. Raises ServeError."""
    with hold_records(argv, environ):
        options, input_path, output_path = read_arguments(argv, environ)
    configure(options.log_level, format=options.log_format)
    requests = BatchInput(input_path, options.limits.body_bytes)
    ids = requests.read_ids()
    output = BatchOutput(output_path)
    with contextlib.closing(output):
        done = output.read_ids()
        if not done <= ids:
            unknown = min(done - ids)
            raise OptionError(f"--output-file {output_path}: its result for {unknown!r} has no request in {input_path}")
        logger.info("%d requests, %d of them answered before", len(ids), len(done))
        if done == ids:
            return 0
        return uvloop.run(_run(options, requests.read(done), output, len(ids) - len(done), len(done)))


def read_arguments(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Options, Path, Path]:
    """The server's options, the input and the output. Raises OptionError."""
    given = read_command_line(create_parser(), argv)
    paths = [Path(str(given.pop(name))) for name in ("input_file", "output_file")]
    options = merge_sources(given, environ)
    if options.nnodes > 1:
        raise OptionError("--nnodes: run-batch runs on one host, or on several with Ray")
    if options.is_scalable:
        raise OptionError("--data-parallel-min, --data-parallel-max: only a server adds and removes engines")
    # The environment and the --config file may set these for a server.
    defaults = {
        field.name: field.default
        for field in OPTION_FIELDS
        if field.name in ("api_key", "max_queue", "request_timeout", "responses_store", "batches_dir")
    }
    return dataclasses.replace(options, **defaults), paths[0], paths[1]  # type: ignore[arg-type]


def create_parser() -> argparse.ArgumentParser:
    parser = make_parser("serve-llm run-batch", DESCRIPTION, BATCH_FIELDS)
    parser.usage = "serve-llm run-batch MODEL -i IN.jsonl -o OUT.jsonl [options]"
    for short, name, text in (
        ("-i", "--input-file", "file with one request per line"),
        ("-o", "--output-file", "file for one result per line; a run continues what it holds"),
    ):
        parser.add_argument(short, name, metavar="FILE.jsonl", required=True, help=text)
    return parser


async def _run(
    options: Options, requests: Iterator[BatchRequest], output: BatchOutput, num_requests: int, num_before: int
) -> int:
    """Start the engines and answer all requests, until a signal."""
    signals = StopSignals()
    running = asyncio.create_task(_answer_all(options, requests, output, num_requests, num_before))
    await asyncio.wait([running, signals.first], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
        return 0
    running.cancel()
    await asyncio.wait([running])
    logger.info("Stopped: the same command continues")
    return INTERRUPTED


async def _answer_all(
    options: Options, requests: Iterator[BatchRequest], output: BatchOutput, num_requests: int, num_before: int
) -> None:
    assembly = await assemble(options)
    progress = BatchProgress(output, num_requests, num_before)
    concurrency = 2 * options.max_num_seqs * options.data_parallel_size  # requests that wait in the engine keep it busy
    try:
        answering = asyncio.create_task(
            run_requests(assembly.app, requests, progress.write, min(concurrency, options.max_queue[0], num_requests))
        )
        await _wait_unless_given_up(assembly, answering)
    finally:
        progress.close()
        await assembly.stop()
    logger.info("%d requests answered, %d with an error", progress.num_written, progress.num_errors)


async def _wait_unless_given_up(assembly: Assembly, answering: asyncio.Task[None]) -> None:
    """Raise the supervisor's error if it no longer restarts the engine."""
    watching = asyncio.ensure_future(assembly.supervisor.watch())
    try:
        await asyncio.wait([answering, watching], return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise watching.result()
        answering.result()
    finally:
        watching.cancel()
        answering.cancel()
        await asyncio.wait([answering])


class BatchProgress:
    """Writes results and counts them. Shows a bar on a terminal; otherwise logs each tenth."""

    def __init__(self, output: BatchOutput, num_requests: int, num_before: int = 0) -> None:
        """num_requests: requests to answer. num_before: requests that earlier runs have answered."""
        self.num_written = 0
        self.num_errors = 0
        self._output = output
        self._num_requests = num_requests
        self._step = max(1, num_requests // 10)
        self._bar = tqdm(
            desc="Answered requests",
            total=num_before + num_requests,
            initial=num_before,
            disable=None,  # unless stderr is a terminal
            dynamic_ncols=True,
        )

    def write(self, line: bytes, status: int) -> None:
        self._output.append(line)
        self.num_written += 1
        self.num_errors += status >= 400
        self._bar.update()
        if self._bar.disable and self.num_written % self._step == 0:
            logger.info("%d of %d requests answered", self.num_written, self._num_requests)

    def close(self) -> None:
        self._bar.close()
