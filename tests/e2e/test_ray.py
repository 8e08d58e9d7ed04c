"""Ranks as Ray actors: same tokens as one rank, where they are placed, and what happens when a process dies.

Each test has its own Ray and ends it, and looks only at its own processes. The machine may be busy.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from serve_llm.common.errors import CapacityError, EngineError, OptionError
from support.daemon import SERVE_LLM, Daemon
from support.namespaces import Machines
from support.ray_machines import RAY, serve_on, short_folder, start_ray, wait_until
from support.ray_nodes import RayNodes, environment, skip_without_ray
from support.streams import Streams, mixed
from support.tiny import make_checkpoint, make_tokenizer

LIMIT = 180.0  # seconds; more than any test takes on a busy machine
PROMPTS = ["class Stack:\n    def __init__(self):\n", "def main():\n", "import os\n", "x"]
SMALL = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory", "16MiB", "--device", "cpu")
ONCE = ("--max-restarts", "0")
BODY = {"prompt": PROMPTS, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
FORCED = {"structured_outputs": {"choice": ["unconditionally yes", "unconditionally no"]}, "logprobs": 0}
NAMED = r"rank {} \(node [\d.]+, pid {}\) died in a step by (end of its process, killed|loss of its host)"


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def complete(url: str, model: str) -> list[str]:
    """Return greedy continuations of all prompts, requested at once; then with a grammar that forces most of the
    text."""
    texts = []
    for body in (BODY, BODY | FORCED | {"ignore_eos": False}):
        request = urllib.request.Request(
            url + "/v1/completions", json.dumps(body | {"model": model}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            texts += [choice["text"] for choice in json.load(answer)["choices"]]
    assert set(texts[len(PROMPTS) :]) <= set(FORCED["structured_outputs"]["choice"])
    return texts


def of_one_rank(model: str) -> list[str]:
    """Return the texts of `PROMPTS`, then those with forced tokens, from a single rank."""
    with Daemon(model, *SMALL) as daemon:
        return complete(daemon.wait_until_serving(), model)


def processes_with(text: str) -> list[psutil.Process]:
    """Return processes with this text in their command line or, like workers, in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if text in " ".join([*process.cmdline(), *process.environ().values()]):
                found.append(process)
    return found


def actors(folder: Path) -> list[psutil.Process]:
    """Return the ranks of a Ray with files in this folder."""
    found = []
    for process in processes_with(str(folder)):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[0].startswith("ray::RankActor"):
                found.append(process)
    return found


def run(*arguments: str, environ: dict[str, str]) -> tuple[int, str]:
    """Return exit code and log of a daemon that fails to start."""
    command = [SERVE_LLM, *arguments, "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=os.environ | environ)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_ray_of_its_own_serves_the_tokens_of_one_rank_and_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    """The home is checked because Ray writes a token there unless told not to."""
    skip_without_ray()
    make_tokenizer(tmp_path, make_checkpoint(tmp_path, "llama"))
    expected = of_one_rank(str(tmp_path))
    home = folder / "home"
    home.mkdir()
    environ = {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(folder), "HOME": str(home), "HF_TOKEN": "hf_secret"}
    with Daemon(str(tmp_path), *SMALL, *RAY, *ONCE, "-tp", "2", environ=environ) as daemon:
        url = daemon.wait_until_serving()
        assert complete(url, str(tmp_path)) == expected
        ranks = actors(folder)
        assert len(ranks) == 2
        victim = ranks[0].pid
        os.kill(victim, signal.SIGKILL)
        assert daemon.wait(LIMIT) == EngineError.exit_code
        assert re.search(r"^serve-llm: " + NAMED.format(r"\d", victim), daemon.log[-1])
        log = "\n".join(daemon.log)
    wait_until(lambda: not processes_with(str(folder)), "all processes have ended")
    assert not (home / ".ray").exists()
    assert re.search(r"Environment copied to ranks on other nodes: .*HF_TOKEN", log) and "hf_secret" not in log
    for line in (r"Executor ray, because it was requested", r"Ray places ranks 0-1 on [\d.]+, one CPU each"):
        assert len(re.findall(line, log)) == 1, line


@pytest.mark.slow
def test_a_killed_actor_costs_no_stream(folder: Path) -> None:
    skip_without_ray()
    environ = {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(folder)}
    with Daemon("demo", *SMALL, *RAY, "-tp", "2", environ=environ) as daemon:
        undisturbed = Streams(daemon.wait_until_serving(), mixed(8, longest=200)).finish()
        streams = Streams(daemon.url, mixed(8, longest=200))
        streams.wait_for(60)
        os.kill(actors(folder)[0].pid, signal.SIGKILL)
        assert streams.finish() == undisturbed
        assert daemon.metrics()["serve_llm_recovery_seconds_count"] == 1
    wait_until(lambda: not processes_with(str(folder)), "all processes have ended")


@pytest.mark.slow
def test_a_draft_model_on_actors(folder: Path) -> None:
    skip_without_ray()
    environ = {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(folder)}
    bodies = mixed(8, longest=100)
    with Daemon("demo", *SMALL, "-tp", "2", "--speculative-config", "none") as daemon:
        undisturbed = Streams(daemon.wait_until_serving(), bodies).finish()
    split = json.dumps({"model": "demo", "draft_tensor_parallel_size": 2})
    with Daemon("demo", *SMALL, *RAY, "-tp", "2", "--speculative-config", split, environ=environ) as daemon:
        assert Streams(daemon.wait_until_serving(), bodies).finish() == undisturbed
        assert daemon.metrics()["serve_llm_spec_decode_num_accepted_tokens_total"] > 0
        daemon.wait_until_logged("on 2 ranks: Weights: ")


@pytest.mark.slow
def test_on_a_cluster_each_tensor_parallel_group_has_a_node(folder: Path) -> None:
    expected = of_one_rank("demo")
    with RayNodes([2, 2], folder) as nodes:
        with Daemon("demo", *SMALL, *RAY, "-tp", "2", "-pp", "2", environ=nodes.environ) as daemon:
            assert complete(daemon.wait_until_serving(), "demo") == expected
            (group,) = nodes.ask("groups")
            assert len(group) == len(set(group)) == 2  # a bundle of two for each stage, each on another node
            code, log = run("demo", *SMALL, *RAY, "-tp", "2", environ=nodes.environ)
            assert code == CapacityError.exit_code
            assert re.search(
                r"^serve-llm: --distributed-executor-backend: ray, because it was requested: 2 ranks need 2 CPUs, but "
                r"the Ray cluster has 4, of which 0 are free \([\d.]+ \(this node\) 0 of 2 free; [\d.]+ 0 of 2 free\)",
                log.splitlines()[-1],
            )
        assert not any("did not stop" in line for line in daemon.log)
        wait_until(lambda: nodes.ask("free") == 4, "all devices are free again")
        assert nodes.ask("groups") == []
        code, log = run("demo", *SMALL, *RAY, "-tp", "5", environ=nodes.environ)
        assert code == CapacityError.exit_code and "5 ranks need 5 CPUs, but the Ray cluster has 4" in log
        # Ranks request GPUs from a cluster that has them, wherever the engine runs.
        code, log = run("demo", *RAY, "-tp", "2", "-pp", "2", environ=nodes.environ)
        assert re.search(r"Ray places ranks 0-1 on [\d.]+, ranks 2-3 on [\d.]+, one GPU each", log)
        assert code == CapacityError.exit_code
        assert re.search(
            r"serve-llm: rank \d \(node [\d.]+, pid \d+\) failed .*: torch finds no GPU", log.splitlines()[-1]
        )
        # The first group fits on a node; the second uses the rest.
        with Daemon("demo", *SMALL, *RAY, *ONCE, "-tp", "3", environ=nodes.environ) as daemon:
            assert complete(daemon.wait_until_serving(), "demo") == expected
            assert sum("it is spread over" in line for line in daemon.log) == 1
            ranks = actors(folder)
            assert len(ranks) == 3
            os.kill(daemon.engine_pid(), signal.SIGKILL)
            daemon.wait(LIMIT)
        wait_until(lambda: not actors(folder), "ranks end with their engine")
        wait_until(lambda: nodes.ask("free") == 4, "all devices are free again")


IN_A_GROUP = """
import json, sys
import ray
from ray.util.placement_group import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

class Offline:
    def generate(self, prompts):
        from serve_llm import LLM, SamplingParams
        options = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory": "16MiB", "device": "cpu"}
        with LLM("demo", tensor_parallel_size=2, **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [output.outputs[0].text for output in outputs], placement_group_table()

ray.init(logging_level="ERROR", log_to_driver=True)
group = placement_group([{"CPU": 1}] * 3, "PACK")
ray.get(group.ready())
strategy = PlacementGroupSchedulingStrategy(group, 0)
actor = ray.remote(Offline).options(num_cpus=1, scheduling_strategy=strategy).remote()
texts, groups = ray.get(actor.generate.remote(json.loads(sys.argv[1])))
after = placement_group_table(group)["state"]
print(json.dumps({"texts": texts, "groups": len(groups), "after": after}))
"""


@pytest.mark.slow
def test_inside_a_placement_group_the_ranks_stay_within(folder: Path) -> None:
    expected = of_one_rank("demo")
    with RayNodes([2, 2], folder) as nodes:
        command = [sys.executable, "-c", IN_A_GROUP, json.dumps(PROMPTS)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT, env=os.environ | nodes.environ, cwd=folder
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found == {"texts": expected[: len(PROMPTS)], "groups": 1, "after": "CREATED"}
        assert "Executor ray, because this runs inside a Ray placement group" in done.stderr + done.stdout


ASK = """
import sys, urllib.request
url, body = sys.argv[1:]
request = urllib.request.Request(url + "/v1/completions", body.encode(), {"Content-Type": "application/json"})
for line in urllib.request.urlopen(request):
    print(line.decode(), end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_cpus", "engine", "first", "last"),
    [
        ((2, 2), 0, 0, 1),
        pytest.param((0, 2, 2), 0, 1, 2, marks=pytest.mark.long),  # the engine's node has no devices
        ((2, 2), 1, 1, 0),  # the head is lost: Ray no longer responds
    ],
)
def test_two_nodes_serve_and_a_node_that_is_gone_is_named(
    tmp_path: Path, folder: Path, num_cpus: Sequence[int], engine: int, first: int, last: int
) -> None:
    """num_cpus: of each node, the head first. engine: the node on which it runs. first, last: the nodes of the two
    stages. The client's machine is not part of the cluster."""
    skip_without_ray()
    expected = of_one_rank("demo")
    log = tmp_path / "log"
    with Machines(1 + len(num_cpus), private=[str(folder)]) as machines:
        client, head, *others = machines
        start_ray(head, folder, num_cpus[0])
        for machine, count in zip(others, num_cpus[1:], strict=True):
            start_ray(machine, folder, count, head.address)
        nodes = [head, *others]
        host, lost = nodes[engine], nodes[last]
        daemon, url = serve_on(host, folder, log, *SMALL, *ONCE, "-tp", "2", "-pp", "2")
        assert f"Ray places ranks 0-1 on {nodes[first].address}, ranks 2-3 on {lost.address}" in log.read_text()
        answer = client.run(sys.executable, "-c", ASK, url, json.dumps(BODY | {"model": "demo"}), seconds=LIMIT)
        assert [choice["text"] for choice in json.loads(answer.stdout)["choices"]] == expected[: len(PROMPTS)]

        endless = {"model": "demo", "prompt": "import", "max_tokens": 250, "ignore_eos": True, "n": 64, "stream": True}
        stream = client.popen(sys.executable, "-c", ASK, url, json.dumps(endless), stdout=subprocess.PIPE)
        assert stream.stdout is not None and stream.stdout.readline().startswith("data: ")
        began = time.monotonic()
        lost.power_off()
        named = rf"rank [23] \(node {lost.address}, pid \d+\) died in a step by loss of"
        wait_until(lambda: re.search(named, log.read_text()), "the lost node is named")
        assert time.monotonic() - began < 30
        events = [line[6:] for line in stream.stdout if line.startswith("data: ")]
        assert re.search(named, events[-2])
        assert daemon.wait(LIMIT) != 0
        assert re.search("serve-llm: " + named, log.read_text().splitlines()[-1])


@pytest.mark.slow
def test_a_stream_goes_on_when_a_node_has_come_in_the_place_of_a_lost_one(tmp_path: Path, folder: Path) -> None:
    skip_without_ray()
    long = json.dumps({"prompt": "import", "max_tokens": 200, "ignore_eos": True, "temperature": 1, "seed": 3})
    with Machines(4, private=[str(folder)]) as machines:
        client, head, lost, spare = machines
        start_ray(head, folder, 2)
        start_ray(lost, folder, 2, head.address)
        daemon, url = serve_on(head, folder, log := tmp_path / "log", *SMALL, "-tp", "2", "-pp", "2")
        undisturbed = json.loads(client.run(sys.executable, "-c", ASK, url, long, seconds=LIMIT).stdout)["choices"]
        streamed = json.dumps(json.loads(long) | {"stream": True})
        stream = client.popen(sys.executable, "-c", ASK, url, streamed, stdout=subprocess.PIPE)
        assert stream.stdout is not None
        first = stream.stdout.readline()
        lost.power_off()
        wait_until(lambda: "4 ranks need 4 CPUs, but the Ray cluster has 2" in log.read_text(), "too few devices")
        start_ray(spare, folder, 2, head.address)
        *events, end = [line.removeprefix("data: ") for line in [first, *stream.stdout] if line.strip()]
        assert end == "[DONE]\n" and daemon.poll() is None, events[-1]
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == undisturbed[0]["text"]


@pytest.mark.long
def test_hosts_with_several_addresses(folder: Path) -> None:
    """Ray uses one network, ranks another; a node states which of its addresses is on the latter."""
    skip_without_ray()
    with Machines(3, private=[str(folder)]) as machines:
        head, right, wrong = machines
        for number, machine in enumerate((head, right), start=1):
            machine.ip("addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
        start_ray(head, folder, 0)
        start_ray(right, folder, 2, head.address, SERVE_LLM_HOST_IP="10.78.0.2")
        command = [SERVE_LLM, "demo", *SMALL, *RAY, "-tp", "2", "--host-ip", "10.78.0.1"]
        log = folder.with_suffix(".log")
        with log.open("w") as output:
            daemon = head.popen(*command, "--port", "8000", env=environment(folder), stderr=output)
        wait_until(lambda: daemon.poll() is not None or "Serving demo" in log.read_text(), "serving")
        assert daemon.poll() is None, log.read_text()
        connections = right.run("ss", "--tcp", "--numeric", "--no-header", "state", "established").stdout
        ours = re.findall(r"10\.78\.0\.2:\d+ +10\.78\.0\.1:\d+", connections)
        assert len(ours) >= 4, connections  # control and heartbeat of each rank
        head.signal(daemon, signal.SIGTERM)
        assert daemon.wait(LIMIT) == 0, log.read_text()

        start_ray(wrong, folder, 2, head.address, SERVE_LLM_HOST_IP="10.78.0.9")
        done = head.run(*command, "-pp", "2", env=environment(folder), seconds=LIMIT)
        assert done.returncode == OptionError.exit_code
        assert re.search(
            rf"serve-llm: rank [23] \(node {wrong.address}, pid \d+\) failed while starting: "
            r"--host-ip 10\.78\.0\.9 is not an address of this host, which has ",
            done.stderr.splitlines()[-1],
        )
