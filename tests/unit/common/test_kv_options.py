"""KV cache options that depend on each other, and refused values."""

from __future__ import annotations

import pytest

from serve_llm.common.errors import OptionError
from serve_llm.common.options.sources import parse_args


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--kv-offload-memory", "1GiB", "--no-prefix-caching"], "--kv-offload-memory needs prefix caching"),
        (["--kv-events-config", '{"enable_kv_cache_events": true}', "--no-prefix-caching"], "omit --no-prefix-caching"),
        (["--kv-events-config", '{"topic": 1}'], "topic must be a text"),
        (["--kv-events-config", '{"hwm": 0}'], "hwm must be a whole number of at least 1"),
        (["--kv-events-config", '{"publisher": "kafka"}'], "publisher 'kafka' is not supported"),
        (["--kv-events-config", '{"endpoint": "localhost:1"}'], "must begin with one of tcp://"),
        (["--kv-events-config", '{"port": 1}'], "'port' is not supported; the keys are"),
        (["--kv-offload-dir", "/cache"], "--kv-offload-dir needs --kv-offload-memory"),
        (["--kv-offload-dir-size", "1GiB"], "--kv-offload-dir-size needs --kv-offload-dir"),
        (
            ["--kv-offload-dir", "/c", "--kv-offload-memory", "1GiB", "--distributed-executor-backend", "ray"],
            "--kv-offload-dir needs all ranks on one host",
        ),
    ],
)
def test_what_is_refused(argv: list[str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse_args(["demo", *argv], {})
