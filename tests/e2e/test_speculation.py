"""A server that verifies drafts answers like one that does not, even when an engine dies under open streams."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.streams import Streams, chats, mixed
from support.tools import write_files

SMALL = ("demo", "--kv-cache-memory", "64MiB", "--max-restarts", "100")
NGRAM = ("--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}')
OFF = ("--speculative-config", "none")
REPEATED: dict[str, Any] = {"prompt": "import os\n" * 8, "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def kill_and_compare(daemon: Daemon, pid: int, bodies: list[dict[str, Any]], undisturbed: Any) -> None:
    """Kill the process while it computes the bodies, and check that the answers are those of an undisturbed run."""
    streams = Streams(daemon.url, bodies)
    streams.wait_for(120)
    os.kill(pid, signal.SIGKILL)
    daemon.wait_until_logged("it is replaced")
    assert streams.finish() == undisturbed


@pytest.mark.slow
@pytest.mark.pairs("speculation + tools", "speculation + DP", "tools + DP")
def test_same_answers_from_two_engines_one_of_which_is_killed(tmp_path: Path) -> None:
    files = [word for pair in write_files(tmp_path).items() for word in pair]
    bodies = [*mixed(12), *chats(4), REPEATED | {"stop": ["os\nimport os\nimport os\nimp"], "stream": True}]
    with Daemon(*SMALL, *files, *OFF) as daemon:
        alone = Streams(daemon.wait_until_serving(), [REPEATED]).finish()
        undisturbed = Streams(daemon.url, bodies).finish()
        assert daemon.metrics()["serve_llm_spec_decode_num_drafts_total"] == 0
    with Daemon(*SMALL, *files, *NGRAM, "--data-parallel-size", "2") as daemon:
        assert Streams(daemon.wait_until_serving(), [REPEATED]).finish() == alone
        metrics = daemon.metrics()
        assert metrics["serve_llm_spec_decode_num_draft_tokens_total"] > 0
        assert metrics["serve_llm_spec_decode_num_accepted_tokens_total"] > 0
        kill_and_compare(daemon, daemon.engine_pids()[0], bodies, undisturbed)


def test_prompt_lookup_is_on_unless_it_is_turned_off() -> None:
    with Daemon(*SMALL) as daemon:
        url = daemon.wait_until_serving()
        daemon.wait_until_logged("Prompt lookup is on: with at most 2 requests at a time")
        found = Streams(url, [REPEATED]).finish()
        assert daemon.metrics()["serve_llm_spec_decode_num_drafts_total"] > 0
        with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
            assert 'source="ngram"' in answer.read().decode()
    with Daemon(*SMALL, *OFF) as daemon:
        assert Streams(daemon.wait_until_serving(), [REPEATED]).finish() == found
        assert daemon.metrics()["serve_llm_spec_decode_num_drafts_total"] == 0


@pytest.mark.slow
def test_a_draft_model_beside_two_ranks() -> None:
    """The demo model drafts for itself: all drafts are right."""
    body = {"prompt": "def area(width, height):", "max_tokens": 30, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    ranks = ("--tensor-parallel-size", "2")
    with Daemon(*SMALL, *ranks, *OFF) as daemon:
        daemon.wait_until_serving()
        alone = Streams(daemon.url, [body]).finish()
    with Daemon(*SMALL, *ranks, "--speculative-config", "demo") as daemon:
        daemon.wait_until_serving()
        daemon.wait_until_logged("Draft model")
        assert Streams(daemon.url, [body]).finish() == alone
        metrics = daemon.metrics()
        assert metrics["serve_llm_spec_decode_num_accepted_tokens_total"] > 0


@pytest.mark.slow
@pytest.mark.pairs("TP + draft model", "PP + draft model", "replay + draft model")
def test_a_draft_model_on_the_ranks_one_of_which_is_killed() -> None:
    """Greedy and sampled texts, n, logprobs and grammars, from two stages of two ranks. The other two hold no shard."""
    ranks = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
    split = {"model": "demo", "draft_tensor_parallel_size": 2, "num_speculative_tokens": 4}
    bodies = mixed(12)
    with Daemon(*SMALL, *ranks, *OFF) as daemon:
        undisturbed = Streams(daemon.wait_until_serving(), bodies).finish()
    with Daemon(*SMALL, *ranks, "--speculative-config", json.dumps(split)) as daemon:
        daemon.wait_until_serving()
        daemon.wait_until_logged("on 2 ranks: Weights: ")
        assert Streams(daemon.url, bodies).finish() == undisturbed
        metrics = daemon.metrics()
        assert metrics["serve_llm_spec_decode_num_accepted_tokens_total"] > 0
        kill_and_compare(daemon, daemon.rank_pids()[3], bodies, undisturbed)
