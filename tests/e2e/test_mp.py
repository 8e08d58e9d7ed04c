"""Ranks as processes of this host: same tokens as one rank, and what happens when a process dies.

All timeouts are at least a minute, and tests look only at their own processes and files: the machine may be busy.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from serve_llm import LLM, SamplingParams
from serve_llm.common.errors import EngineError, ModelError, OptionError, RankFailed
from serve_llm.common.hub import read_config, resolve_model
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import Sampling
from serve_llm.engine import startup
from serve_llm.engine.distributed import mp
from serve_llm.engine.distributed.worker_group import WorkerGroup
from serve_llm.engine.scheduler.output import NewRequestData, ScheduledTokens, SchedulerOutput
from support.daemon import SERVE_LLM, Daemon
from support.engine import generate, greedy, make_engine
from support.quantised import quantise_checkpoint
from support.resolved import resolve_all
from support.tiny import make_checkpoint, make_tokenizer

IDLE_SECONDS = 3.0
LIMIT = 300.0  # seconds; more than any test takes on a busy machine
PROMPTS = ["class Stack:\n    def __init__(self):\n", "def main():\n", "import os\n", "x"]
SMALL = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory", "16MiB")
ONCE = ("--max-restarts", "0")
WHO = r"rank \d \(host \S+, pid \d+\)"


def complete(url: str, model: str) -> list[str]:
    """Return greedy continuations of all prompts, requested at once."""
    body = {"model": model, "prompt": PROMPTS, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        return [choice["text"] for choice in json.load(answer)["choices"]]


def serve_and_complete(model: str, *options: str) -> list[str]:
    with Daemon(model, *SMALL, *options) as daemon:
        return complete(daemon.wait_until_serving(), model)


def gone(pids: Sequence[int]) -> bool:
    """Wait until these processes have ended."""
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(left, LIMIT)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def thread_seconds(processes: Sequence[psutil.Process]) -> dict[str, float]:
    """Return the CPU nanoseconds of each thread so far; /proc/PID/stat only counts in units of 10 ms."""
    files = [path for process in processes for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat")]
    return {str(path): int(path.read_text().split()[0]) / 1e9 for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_ranks_compute_with_as_many_threads_as_asked_for(count: int) -> None:
    with Daemon("demo", *SMALL, "-tp", "2", "--cpu-threads", str(count)) as daemon:
        url = daemon.wait_until_serving()
        threads = "1 thread" if count == 1 else "3 threads"
        daemon.wait_until_logged(rf"Computing with {threads} per rank \(--cpu-threads\)")
        for pid in daemon.rank_pids().values():
            before = thread_seconds([psutil.Process(pid)])
            complete(url, "demo")
            after = thread_seconds([psutil.Process(pid)])
            spent = [after[thread] - before.get(thread, 0.0) for thread in after]
            # Threads that compute share the work; all others use far less time.
            assert sum(seconds > sum(spent) / 20 for seconds in spent) == count


@pytest.mark.slow
def test_an_idle_daemon_leaves_the_cores_alone() -> None:
    with Daemon("demo", *SMALL, "-tp", "2") as daemon:
        complete(daemon.wait_until_serving(), "demo")
        server = psutil.Process(daemon.process.pid)
        processes = [server, *server.children(recursive=True)]
        assert len(processes) == 5, "server, the process that reads large requests, engine, two ranks"

        def is_idle() -> bool:
            before = sum(thread_seconds(processes).values())
            time.sleep(IDLE_SECONDS)
            return sum(thread_seconds(processes).values()) - before < 0.01 * IDLE_SECONDS

        assert any(is_idle() for _ in range(5)), "at first there is something left to do: a process still starts"


def network_addresses(daemon: Daemon) -> set[str]:
    """Return where a daemon's processes accept connections or datagrams: "127.0.0.1:8000"."""
    server = psutil.Process(daemon.process.pid)
    sockets = [found for process in (server, *server.children(recursive=True)) for found in process.net_connections()]
    return {f"{found.laddr.ip}:{found.laddr.port}" for found in sockets if found.status in ("LISTEN", "NONE")}


def test_two_by_two_ranks_serve_the_tokens_of_one() -> None:
    expected = serve_and_complete("demo")
    with Daemon("demo", *SMALL, "-tp", "2", "-pp", "2") as daemon:
        assert complete(daemon.wait_until_serving(), "demo") == expected
        ranks = daemon.rank_pids()
        assert sorted(ranks) == [0, 1, 2, 3]
        assert network_addresses(daemon) == {daemon.url.removeprefix("http://")}
        log = "\n".join(daemon.log)
    assert gone(list(ranks.values()))
    for line in (
        r"Executor mp, because 4 ranks fit on a CPU host",
        r"Tensor parallel, 2 ranks: query heads 2\+2",
        r"Pipeline parallel, 2 stages: layers \d\+\d",
        r"4 ranks up in [\d.]+ s",
        r"Weights loaded and packed by 4 ranks in [\d.]+ s",
        r"CPU KV cache size: [\d,]+ tokens",
    ):
        assert len(re.findall(line, log)) == 1, line


@pytest.mark.slow
def test_a_tiny_llama_over_http(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, make_checkpoint(tmp_path, "llama"))
    expected = serve_and_complete(str(tmp_path))
    assert serve_and_complete(str(tmp_path), "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2") == expected


@pytest.mark.slow
def test_gpt2_on_three_ranks(tmp_path: Path) -> None:
    vocab_size = make_checkpoint(tmp_path, "gpt2")
    requests = [greedy(number, [(7 * number + i) % vocab_size for i in range(5 + 9 * number)], 20) for number in (1, 2)]
    one = generate(make_engine(tmp_path), requests)
    engine = make_engine(tmp_path, tensor_parallel_size=3)
    with contextlib.closing(engine._executor):
        three = generate(engine, requests)
    assert {number: result.token_ids for number, result in three.items()} == {
        number: result.token_ids for number, result in one.items()
    }


def test_ranks_pass_over_the_keys_that_are_allowed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_scale": 1.0}))
    engine = make_engine(tmp_path, tensor_parallel_size=2, allow_unknown_config=("layer_scale",))
    with contextlib.closing(engine._executor):
        assert len(generate(engine, [greedy(1, [5, 6], 3)])[1].token_ids) == 3


@pytest.mark.slow
def test_an_int8_checkpoint_on_two_stages(tmp_path: Path) -> None:
    """Stages round as one rank does, so ids and the bits of logprobs are equal."""
    make_checkpoint(tmp_path / "float", "llama")
    quantise_checkpoint(tmp_path / "float", tmp_path / "int8")
    requests = [greedy(0, [3, 1, 4, 1, 5], 12, logprobs=0)]
    for name, quantization in (("int8", "auto"), ("float", "int8")):
        found = []
        for num_stages in (1, 2):
            engine = make_engine(tmp_path / name, quantization=quantization, pipeline_parallel_size=num_stages)
            with contextlib.closing(engine._executor):
                found.append(generate(engine, requests)[0])
        assert found[0].token_ids == found[1].token_ids and found[0].logprobs == found[1].logprobs


@pytest.mark.slow
def test_the_offline_class_takes_the_same_options() -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    options = {"dtype": "float32", "kv_cache_memory": "16MiB", "max_model_len": 256}
    found = []
    for more in ({}, {"tensor_parallel_size": 2, "tensor_parallel_split": (3, 1)}):
        with LLM("demo", **options, **more) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


@contextlib.contextmanager
def stream(url: str) -> Iterator[http.client.HTTPResponse]:
    """Start a long completion; enter the block at its first event."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=LIMIT)
    body = {"model": "demo", "prompt": "import", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body))
        with connection.getresponse() as answer:
            assert answer.readline().startswith(b"data: ")
            yield answer


def test_a_killed_rank_is_named_in_the_stream_and_by_the_daemon_and_nothing_is_left() -> None:
    with Daemon("demo", *ONCE, "-tp", "2", "-pp", "2") as daemon:
        url = daemon.wait_until_serving()
        engine, ranks = daemon.engine_pid(), daemon.rank_pids()
        with stream(url) as answer:
            os.kill(ranks[3], signal.SIGKILL)
            rest = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]
        named = rf"rank 3 \(host \S+, pid {ranks[3]}\) died in a step by signal SIGKILL"
        assert re.search(named, json.loads(rest[-2])["error"]["message"]) and rest[-1] == "[DONE]"
        assert daemon.wait(LIMIT) == EngineError.exit_code
        assert re.search(rf"^serve-llm: {named}", daemon.log[-1])
        assert gone([engine, *ranks.values()])
        assert not any("Traceback" in line for line in daemon.log)


@pytest.mark.slow
def test_a_death_is_noticed_without_any_request() -> None:
    with Daemon("demo", *SMALL, *ONCE, "-tp", "2") as daemon:
        daemon.wait_until_serving()
        ranks = daemon.rank_pids()
        os.kill(ranks[0], signal.SIGTERM)
        assert daemon.wait(LIMIT) == EngineError.exit_code
        assert f"pid {ranks[0]}) died in a step by signal SIGTERM" in daemon.log[-1]
        assert gone(list(ranks.values()))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine", "daemon"])
def test_no_rank_outlives_the_process_that_started_it(victim: str) -> None:
    with Daemon("demo", *SMALL, *ONCE, "-tp", "2") as daemon:
        daemon.wait_until_serving()
        engine, ranks = daemon.engine_pid(), list(daemon.rank_pids().values())
        os.kill(engine if victim == "engine" else daemon.process.pid, signal.SIGKILL)
        assert gone([engine, *ranks])
        daemon.wait(LIMIT)


def build(options: dict[str, object], worker_group: WorkerGroup | None = None) -> mp.MpExecutor:
    """Build an executor of the demo model in this process."""
    directory = resolve_model("demo", None, None, weights=True)
    small = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory": "16MiB"}
    chosen = make_options("demo", **(small | options))
    raw = read_config(directory)
    config, spec, weights = resolve_all(chosen, str(directory), raw)
    executor = startup.build_executor(config, spec, weights, raw, worker_group)
    assert isinstance(executor, mp.MpExecutor)
    return executor


def pids_of(executor: mp.MpExecutor) -> list[int]:
    launched = executor._worker_group._launched
    return [int(launched.describe_place(rank).rpartition(" ")[2]) for rank in range(executor._worker_group.size)]


ONE_PROMPT = SchedulerOutput(
    [NewRequestData(0, [5, 6, 7], 3, Sampling(max_tokens=1, seed=0), None)], [ScheduledTokens(0, 0, 3, [[0]], True, [])]
)
NO_SUCH_ROW = SchedulerOutput([], [ScheduledTokens(5, 0, 1, [[0]], True, [])])


@pytest.mark.slow
def test_a_ranks_exception_names_it_and_stays_the_answer() -> None:
    executor = build({"tensor_parallel_size": 2})
    pids = pids_of(executor)
    first, second = executor.execute(NO_SUCH_ROW), executor.execute(NO_SUCH_ROW)
    for step in (first, second, executor.execute(NO_SUCH_ROW)):
        with pytest.raises(RankFailed, match=rf"^{WHO} failed in a step: \w+"):
            step.result()
    with pytest.raises(RankFailed, match="failed in a step"):
        executor.check()
    executor.close()
    executor.close()
    assert gone(pids)


@pytest.mark.slow
def test_a_silent_rank_is_named() -> None:
    executor = build({"tensor_parallel_size": 2, "step_timeout": 0.5})  # a stopped rank exceeds any time limit
    with contextlib.closing(executor):
        pids = pids_of(executor)
        os.kill(pids[1], signal.SIGSTOP)
        while psutil.Process(pids[1]).status() != psutil.STATUS_STOPPED:
            pass
        with pytest.raises(RankFailed, match=rf"^rank 1 \(host \S+, pid {pids[1]}\), stopped: no answer in a step"):
            executor.execute(ONE_PROMPT).result()  # rank 0 waits for the sum
    assert gone(pids)


def test_a_death_while_starting_ends_the_others() -> None:
    worker_group = mp.launch_workers(2)
    launched = worker_group._launched
    pids = [int(launched.describe_place(rank).rpartition(" ")[2]) for rank in range(2)]
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(RankFailed, match=rf"^rank 0 \(host \S+, pid {pids[0]}\) died while \w+.* by signal SIGKILL"):
        build({"tensor_parallel_size": 2}, worker_group)
    assert gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_file_is_left_of_ranks_that_are_still_starting(number: signal.Signals, tmp_path: Path) -> None:
    with Daemon("demo", *SMALL, "-tp", "2", environ={"TMPDIR": str(tmp_path)}) as daemon:
        while not (engines := daemon.engine_pids()) or not daemon.rank_pids(engines[0]):
            assert daemon.process.poll() is None, daemon.log
        daemon.signal(number)
        daemon.wait()
        assert gone(engines)
    assert list(tmp_path.glob("serve-llm*")) == []


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_loaded_keeps_its_exit_code(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, make_checkpoint(tmp_path, "llama"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    code, line = run(str(tmp_path), "-tp", "2")
    assert code == ModelError.exit_code
    assert re.match(rf"serve-llm: {WHO} failed while loading weights: .* lacks", line)


def run(*arguments: str) -> tuple[int, str]:
    """Return exit code and last line of a daemon that fails to start."""
    done = subprocess.run([SERVE_LLM, *arguments, "--port", "0"], capture_output=True, text=True, timeout=LIMIT)
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_options_that_do_not_go_together() -> None:
    code, line = run("demo", "-tp", "2", "--distributed-executor-backend", "inprocess")
    assert code == OptionError.exit_code
    assert line == "serve-llm: --distributed-executor-backend: inprocess runs one rank, not 2; use mp or ray"
    code, line = run("demo", "-pp", "7")
    assert code == OptionError.exit_code
    assert line == "serve-llm: --pipeline-parallel-size: 7 stages, but the model has only 6 layers; give fewer"


@pytest.mark.slow
def test_one_rank_may_be_a_process_too() -> None:
    executor = build({"distributed_executor_backend": "mp"})
    with contextlib.closing(executor):
        assert len(pids_of(executor)) == 1 and executor.depth == 1
