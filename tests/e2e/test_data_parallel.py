"""Two engines behind one front end: the same tokens, work for both, one engine for each prefix, and nothing left
behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from serve_llm import LLM, SamplingParams
from support.daemon import SERVE_LLM, Daemon

TWO = ("demo", "--data-parallel-size", "2", "--kv-cache-memory", "64MiB")
PROMPTS = [f"class Stack{number}:\n    def __init__(self, {'x' * number}):\n" for number in range(8)]
LONG = {"prompt": "import", "max_tokens": 2000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def two() -> Iterator[Daemon]:
    with Daemon(*TWO) as daemon:
        daemon.wait_until_serving()
        yield daemon


@contextlib.contextmanager
def post(daemon: Daemon, body: dict[str, object]) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(daemon.wait_until_serving().removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps({"model": "demo"} | body))
        with connection.getresponse() as answer:
            assert answer.status == 200, answer.read()
            yield answer


def texts(daemon: Daemon, **body: object) -> list[str]:
    with post(daemon, {"max_tokens": 24, "temperature": 0} | body) as answer:
        return [choice["text"] for choice in json.loads(answer.read())["choices"]]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5, "n": 2}], ids=["greedy", "seeded"])
def test_the_tokens_are_those_of_one_engine(two: Daemon, server: Daemon, sampling: dict[str, object]) -> None:
    expected = texts(server, prompt=PROMPTS, **sampling)
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        found = clients.map(lambda prompt: texts(two, prompt=prompt, **sampling), PROMPTS)
        assert [text for one in found for text in one] == expected
    assert texts(two, prompt=PROMPTS, **sampling) == expected


def test_both_engines_work_under_load_and_the_sums_are_honest(two: Daemon) -> None:
    before, shares = two.metrics(), [two.metrics(engine) for engine in (0, 1)]
    with ThreadPoolExecutor(8) as clients:
        bodies = list(clients.map(lambda number: usage(two, f"def f{number}():\n"), range(16)))
    after = two.metrics()
    for name, key in (("prompt_tokens_total", "prompt_tokens"), ("generation_tokens_total", "completion_tokens")):
        metric = f"serve_llm_{name}"
        assert after[metric] - before[metric] == sum(body[key] for body in bodies)
        for engine in (0, 1):
            assert two.metrics(engine)[metric] > shares[engine][metric]


def usage(daemon: Daemon, prompt: str) -> dict[str, int]:
    with post(daemon, {"prompt": prompt, "max_tokens": 12, "ignore_eos": True}) as answer:
        found: dict[str, int] = json.loads(answer.read())["usage"]
        return found


@pytest.mark.pairs("prefix cache + DP")
def test_prompts_that_share_a_prefix_go_to_the_same_engine(two: Daemon) -> None:
    prefixes = [[1000 + number] * 800 for number in range(4)]
    before = [two.metrics(engine)["serve_llm_prefix_cache_hits_total"] for engine in (0, 1)]
    for tail in range(3):
        for prefix in prefixes:
            texts(two, prompt=[*prefix, 2000 + tail], max_tokens=1)
    hits = [two.metrics(engine)["serve_llm_prefix_cache_hits_total"] - before[engine] for engine in (0, 1)]
    assert hits == [2 * 2 * 800] * 2, "two prefixes at home on each engine, each found by all but its first request"


@pytest.mark.pairs("prefix cache + n", "n + DP")
def test_choices_of_a_prompt_compute_it_once(two: Daemon) -> None:
    before = two.metrics()["serve_llm_prefix_cache_hits_total"]
    texts(two, prompt=[3000] * 801, max_tokens=1, n=4, temperature=1.0)
    assert two.metrics()["serve_llm_prefix_cache_hits_total"] - before == 3 * 800


def test_log_lines_say_which_engine(two: Daemon) -> None:
    for engine in (0, 1):
        assert any(re.search(rf"\] engine {engine}: CPU KV cache size: [\d,]+ tokens$", line) for line in two.log)


@pytest.mark.slow
def test_without_restarts_one_engines_death_ends_the_daemon_and_names_it() -> None:
    with (
        Daemon(*TWO, "--max-restarts", "0") as daemon,
        post(daemon, LONG) as one,
        post(daemon, LONG | {"prompt": "def"}) as other,
    ):
        one.readline()
        other.readline()
        running = [daemon.metrics(engine)["serve_llm_num_requests_running"] for engine in (0, 1)]
        assert running == [1, 1]
        pids = daemon.engine_pids()
        os.kill(pids[1], signal.SIGKILL)
        cause = f"engine 1: the engine process {pids[1]} died while serving by signal SIGKILL"
        for answer in (one, other):
            events = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
            assert cause in json.loads(events[-2])["error"]["message"] and events[-1] == "[DONE]"
        assert daemon.wait() == 5
        assert daemon.log[-1].startswith(f"serve-llm: {cause}")
        assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_engine_outlives_the_daemon(number: signal.Signals) -> None:
    with Daemon(*TWO) as daemon:
        daemon.wait_until_serving()
        engines = [psutil.Process(pid) for pid in daemon.engine_pids()]
        assert len(engines) == 2
        daemon.signal(number)
        assert daemon.wait() == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        assert psutil.wait_procs(engines, timeout=10)[1] == []


@pytest.mark.slow
def test_what_an_engine_cannot_start_with_is_named_once() -> None:
    command = [SERVE_LLM, "demo", "-dp", "2", "--kv-cache-memory", "1MiB", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert re.match(r"serve-llm: engine [01]: the KV cache has room for ", done.stderr.splitlines()[-1])
    assert done.stderr.count("serve-llm: ") == 1


@pytest.mark.slow
def test_an_engine_that_dies_while_starting_takes_the_others_along() -> None:
    with Daemon(*TWO) as daemon:
        while len(pids := daemon.engine_pids()) < 2:
            assert daemon.process.poll() is None
        os.kill(pids[1], signal.SIGKILL)
        assert daemon.wait() == 5
        assert daemon.log[-1].startswith(
            f"serve-llm: engine 1: the engine process {pids[1]} died while starting by signal"
        )
        assert not any("Traceback" in line for line in daemon.log)
        assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
def test_offline_with_two_engines() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with LLM("demo", kv_cache_memory="64MiB", data_parallel_size=2) as llm:
        several = llm.generate(PROMPTS, greedy, use_tqdm=False)
    with LLM("demo", kv_cache_memory="64MiB") as llm:
        one = llm.generate(PROMPTS, greedy, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in several] == [output.outputs[0].token_ids for output in one]
