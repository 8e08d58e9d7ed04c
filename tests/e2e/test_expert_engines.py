"""Two engines that share the experts of a model, behind one front end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from support.daemon import SERVE_LLM, Daemon
from support.streams import Streams, mixed
from support.tiny import make_served_checkpoint

SMALL = ("--served-model-name", "demo", "--kv-cache-memory", "16MiB", "--max-model-len", "400", "--max-restarts", "100")
TWO = ("--data-parallel-size", "2", "--enable-expert-parallel")
LONGEST = 300  # tokens per stream
COUNTERS = ("prompt_tokens_total", "generation_tokens_total", "request_success_total", "iteration_tokens_total_sum")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a tiny model with 5 experts per layer and the demo model's tokenizer."""
    return make_served_checkpoint(tmp_path_factory.mktemp("models") / "qwen3_moe", "qwen3_moe")


@pytest.fixture(scope="module")
def undisturbed(model: str) -> Iterator[Streams]:
    """Yield the result of the streams on a single engine."""
    with Daemon(model, *SMALL) as daemon:
        yield Streams(daemon.wait_until_serving(), mixed(12, LONGEST)).finish()


def cpu_seconds(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


@pytest.mark.slow
def test_streams_on_both_one_idle_and_none(model: str, undisturbed: Streams) -> None:
    with Daemon(model, *SMALL, *TWO) as daemon:
        assert Streams(daemon.wait_until_serving(), mixed(12, LONGEST)).finish() == undisturbed
        both, each = daemon.metrics(), [daemon.metrics(engine) for engine in (0, 1)]
        for name in COUNTERS:
            assert all(one[f"serve_llm_{name}"] > 0 for one in each)
            assert both[f"serve_llm_{name}"] == sum(one[f"serve_llm_{name}"] for one in each)
        assert both["serve_llm_generation_tokens_total"] == undisturbed.num_tokens
        Streams(daemon.url, mixed(1, LONGEST)).finish()  # one request: the other engine only holds experts
        name = "serve_llm_generation_tokens_total"
        assert sum(daemon.metrics(engine)[name] > each[engine][name] for engine in (0, 1)) == 1
        pids = daemon.engine_pids()
        began, spent = time.monotonic(), cpu_seconds(pids)
        with pytest.raises(subprocess.TimeoutExpired):  # it keeps serving; meanwhile nobody sends requests
            daemon.process.wait(2.0)
        assert cpu_seconds(pids) - spent < 0.1 * (time.monotonic() - began), "idle engines compute"
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert not [line for line in daemon.log if re.search("WARNING|ERROR|Traceback", line) and "kernel" not in line]


@pytest.mark.slow
@pytest.mark.pairs("EP + replay")
def test_when_one_is_killed_all_are_replaced_and_the_streams_go_on(model: str, undisturbed: Streams) -> None:
    with Daemon(model, *SMALL, *TWO) as daemon:
        daemon.wait_until_serving()
        streams = Streams(daemon.url, mixed(12, LONGEST))
        streams.wait_for(120)
        before = daemon.engine_pids()
        os.kill(before[1], signal.SIGKILL)
        assert streams.finish() == undisturbed
        after = daemon.engine_pids()
        assert len(after) == 2 and not set(before) & set(after)
        errors = [line for line in daemon.log if "ERROR" in line]
        died = f"engine 1: the engine process {before[1]} died while serving by signal SIGKILL"
        assert len(errors) == 1 and died in errors[0]
        assert errors[0].endswith("; it and the engines that share experts with it are replaced")
        metrics = [daemon.metrics(engine) for engine in (0, 1)]
        assert [one["serve_llm_restarts_total"] for one in metrics] == [1, 1]
        assert sum(one["serve_llm_generation_tokens_total"] for one in metrics) == undisturbed.num_tokens


@pytest.mark.slow
def test_the_end_amid_steps(model: str) -> None:
    """Each engine is told to shut down while the other one needs it."""
    with Daemon(model, *SMALL, *TWO, "--drain-timeout", "0.1") as daemon:
        daemon.wait_until_serving()
        endless = {"prompt": "x", "max_tokens": 380, "ignore_eos": True, "stream": True}
        streams = Streams(daemon.url, [endless] * 8)
        streams.wait_for(60)
        pids = daemon.engine_pids()
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
        assert not any("did not stop" in line for line in daemon.log)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        streams.finish()


@pytest.mark.slow
def test_ranks_of_one_engine(model: str) -> None:
    """Three processes hold 2, 2 and 1 of the experts of each layer.

    Their sums are rounded differently from those of one rank, so a long sampled stream meets a near tie in the end.
    """
    bodies = [{name: value for name, value in body.items() if name != "logprobs"} for body in mixed(12, longest=30)]
    with Daemon(model, *SMALL) as daemon:
        expected = Streams(daemon.wait_until_serving(), bodies).finish()
    with Daemon(model, *SMALL, "-tp", "3", "--enable-expert-parallel") as daemon:
        assert Streams(daemon.wait_until_serving(), bodies).finish() == expected


@pytest.mark.pairs("grammar + EP", "TP + DP")
@pytest.mark.slow
@pytest.mark.parametrize("split", ["-tp", "-pp"])
def test_ranks_of_each_engine(split: str, model: str) -> None:
    """Ranks are processes, one of which dies."""
    bodies = mixed(6, LONGEST)
    with Daemon(model, *SMALL, *TWO, split, "2") as daemon:
        expected = Streams(daemon.wait_until_serving(), bodies).finish()
        streams = Streams(daemon.url, bodies)
        streams.wait_for(30)
        os.kill(daemon.rank_pids(daemon.engine_pids()[0])[1], signal.SIGKILL)
        assert streams.finish() == expected
        assert re.search("engine 0: rank 1 .* died in a step by signal SIGKILL", "\n".join(daemon.log))
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", *TWO), "--enable-expert-parallel: this model has no experts; omit it"),
    ],
)
def test_what_does_not_work_is_said_at_once(model: str, arguments: tuple[str, ...], message: str) -> None:
    command = [SERVE_LLM, *(model if word == "MODEL" else word for word in arguments), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
