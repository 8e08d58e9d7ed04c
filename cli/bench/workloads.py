"""The workloads of docs/performance.md, which tests/bench uses to compare servers, for `serve-llm bench serve`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def _describe(streams: int, prompt: int, output: int, requests: int, shared: int = 0) -> dict[str, int]:
    """streams: requests that are open at a time. prompt: each request's unique tokens, after `shared` ones."""
    return {
        "max_concurrency": streams,
        "random_input_len": prompt,
        "random_output_len": output,
        "num_prompts": requests,
        "random_prefix_len": shared,
        "num_warmups": 1 if shared else 0,  # the shared prefix is sent once before
    }


WORKLOADS = {
    "W1": _describe(streams=1, prompt=128, output=128, requests=4),
    "W2": _describe(streams=8, prompt=256, output=128, requests=16),
    "W3": _describe(streams=32, prompt=256, output=64, requests=32),
    "W4": _describe(streams=8, prompt=32, output=32, requests=16, shared=1024),
}


def parse_with_workload(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """The benchmark's options and the remaining arguments. A workload's values are defaults that other options
    override."""
    options, rest = parser.parse_known_args(arguments)
    if options.workload is None:
        return options, rest
    parser.set_defaults(**WORKLOADS[options.workload])
    return parser.parse_known_args(arguments)
