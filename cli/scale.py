"""`serve-llm scale --data-parallel-size N [URL]`: change the number of engines of a running server, and wait for it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve_llm.cli.api_client import DEFAULT_URL, ApiClient
from serve_llm.common.errors import OptionError, ServeError
from serve_llm.common.options.sources import OptionParser

DESCRIPTION = (
    "Add engines to a running server or remove some, between its --data-parallel-min and --data-parallel-max, and wait "
    "until that is done. An engine that is removed finishes its requests first."
)
POLL_SECONDS = 0.5


class ScalingFailed(ServeError):
    """The server could not add an engine."""


def create_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="serve-llm scale", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"server (default: {DEFAULT_URL})")
    parser.add_argument(
        "--data-parallel-size", "-dp", type=int, required=True, metavar="ENGINES", help="number of engines"
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        metavar="SECONDS",
        help="time for the requests of an engine that is removed to finish; what is open then continues on the others "
        "(default: the server's --drain-timeout)",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="key of the server that begins with admin: (default: SERVE_LLM_API_KEY)"
    )
    return parser


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code. Raises ServeError if the server refuses or the change fails."""
    options = create_parser().parse_args(list(argv))
    if options.data_parallel_size < 1:
        raise OptionError(f"--data-parallel-size: expected a number of at least 1, not {options.data_parallel_size}")
    keys = [key for key in environ.get("SERVE_LLM_API_KEY", "").split(",") if key]
    admin_keys = [key for key in keys if key.startswith("admin:")]
    client = ApiClient(options.url, options.api_key or next(iter(admin_keys or keys), None))
    scale(client, options.data_parallel_size, options.drain_timeout)
    return 0


def scale(
    client: ApiClient,
    num_engines: int,
    drain_timeout: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Request the change and report progress on stdout until it has ended. Raises ApiError and ScalingFailed."""
    body: dict[str, object] = {"data_parallel_size": num_engines}
    if drain_timeout is not None:
        body["drain_timeout"] = drain_timeout
    scaling = client.post_json("/scale", body)
    shown = ""
    while scaling["is_under_way"]:
        status = client.get_json("/status")
        scaling = status["scaling"]
        line = describe(status)
        if line != shown:
            print(line, flush=True)
            shown = line
        if scaling["is_under_way"]:
            sleep(POLL_SECONDS)
    if scaling["error"] is not None:
        raise ScalingFailed(f"{_count_engines(scaling)}, as before: {scaling['error']}")
    if scaling["num_engines"] != num_engines:
        raise ScalingFailed(f"{_count_engines(scaling)}: another change came after this one")
    print(_count_engines(scaling))


def _count_engines(scaling: Mapping[str, Any]) -> str:
    number = scaling["num_engines"]
    return "1 engine serves" if number == 1 else f"{number} engines serve"


def describe(status: Mapping[str, Any]) -> str:
    """One line about a change in progress."""
    engines = status["engines"]
    num_ready = sum(engine["ready"] for engine in engines)
    num_starting = status["scaling"]["num_engines"] - len(engines)
    parts = [f"{num_ready} ready"]
    if num_starting > 0:
        parts.append(f"{num_starting} starting")
    for index, engine in enumerate(engines):
        if engine["draining"]:
            num_open = engine["num_running"] + engine["num_waiting"]
            parts.append(f"engine {index} draining ({num_open} {'request' if num_open == 1 else 'requests'})")
    return ", ".join(parts)
