"""Several hosts without Ray: node 0 and a follower.

Both are plain processes of this machine that appear to be on two hosts (tests/support/fakehost), so only the network
connects them. Limits are generous.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from serve_llm.common.errors import CapacityError, EngineError, ModelError, OptionError
from support.daemon import Daemon
from support.nodes import LIMIT, ONCE, SMALL, Hosts, body, complete
from support.tiny import make_checkpoint, make_tokenizer


def ends(*pids: int) -> bool:
    """Wait until all of these processes have ended."""
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, LIMIT)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def serving(*options: str) -> Iterator[tuple[Daemon, Daemon]]:
    """Start node 0 and node 1 on two hosts. Yields once they serve."""
    hosts = Hosts()
    with (
        hosts.node(1) as follower,
        hosts.node(0, "demo", *SMALL, *options) as master,
    ):
        master.wait_until_serving()
        yield master, follower


@contextmanager
def request_under_way(url: str, seconds: float = LIMIT) -> Iterator[list[str]]:
    """Start a long completion with a deadline; enter the block at its first event. Collects the lines of its answer."""
    lines: list[str] = []
    begun = threading.Event()

    def run() -> None:
        long = body(prompt="import", max_tokens=1000, stream=True)
        headers = {"Content-Type": "application/json", "X-Request-Timeout": str(seconds)}
        request = urllib.request.Request(url + "/v1/completions", long.encode(), headers)
        with urllib.request.urlopen(request, timeout=LIMIT) as answer:
            for line in answer:
                lines.append(line.decode().strip())
                begun.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert begun.wait(LIMIT)
    yield lines
    thread.join(LIMIT)


def test_a_stage_on_each_host_follower_first_and_an_end_in_order(continuations: list[str]) -> None:
    hosts = Hosts()
    with hosts.node(1) as follower:
        follower.wait_until_logged(r"Waiting for node 0 of 2 nodes at 127\.0\.0\.1:\d+")
        with hosts.node(0, "demo", *SMALL, "-tp", "2", "-pp", "2") as master:
            assert complete(master.wait_until_serving()) == continuations
            here, there = master.rank_pids(), follower.rank_pids(follower.process.pid)
            assert (sorted(here), sorted(there)) == ([0, 1], [2, 3])
            master.signal(signal.SIGTERM)
            assert master.wait(LIMIT) == 0
        assert follower.wait(LIMIT) == 0
        assert ends(*here.values(), *there.values())
        log = "\n".join(master.log + follower.log)
    for line in (
        r"Waiting for node 1 at 127\.0\.0\.1:\d+",
        r"Joined: node 1, host \S+ at 127\.0\.0\.1, for ranks 2-3",
        r"Executor mp, because --nnodes spreads 4 ranks over 2 hosts",
        r"4 ranks up in",
        r"node 1: Runs ranks 2-3 of demo",
    ):
        assert len(re.findall(line, log)) == 1, line
    assert "Traceback" not in log and "crosses hosts" not in log and "--cluster-secret" not in log


@pytest.mark.slow
def test_a_tensor_group_over_hosts_follower_last_and_who_is_refused(continuations: list[str]) -> None:
    hosts = Hosts()
    with ExitStack() as stack:
        master = stack.enter_context(hosts.node(0, "demo", *SMALL, "-tp", "4"))
        master.wait_until_logged("Waiting for node 1")
        refused = {
            r"refuses the connection: --cluster-secret \(SERVE_LLM_CLUSTER_SECRET\)": hosts.node(1, secret="other"),
            r"node 0 refuses this node: node 0 has --nnodes 2, node 2 has --nnodes 3": hosts.node(2, nnodes=3),
        }
        for why, node in refused.items():
            with node:
                assert node.wait(LIMIT) == OptionError.exit_code
                assert re.search(why, node.log[-1]) and node.log[-1].startswith("serve-llm: ")
        follower = stack.enter_context(hosts.node(1, "demo", *SMALL, "-tp", "4"))  # may log the same words
        url = master.wait_until_serving()
        with hosts.node(1) as second:
            assert second.wait(LIMIT) == OptionError.exit_code
            assert re.search(r"refuses this node: --node-rank 1 is taken by node 1, host \S+ at", second.log[-1])
        assert complete(url) == continuations
        assert sum("Tensor parallelism of ranks 0 to 3 crosses hosts (127.0.0.1)" in line for line in master.log) == 1
        master.signal(signal.SIGTERM)
        assert (master.wait(LIMIT), follower.wait(LIMIT)) == (0, 0)


@pytest.mark.slow
def test_three_hosts_for_four_ranks_in_groups_that_span(continuations: list[str]) -> None:
    """Ranks 0 and 1 | 2 | 3: the second stage is on two hosts, the first on one; without a secret."""
    hosts = Hosts(secret=None)
    with hosts.node(2, nnodes=3), hosts.node(1, nnodes=3) as follower:
        with hosts.node(0, "demo", *SMALL, "-tp", "2", "-pp", "2", nnodes=3) as master:
            assert complete(master.wait_until_serving()) == continuations
    for node in (master, follower):
        assert any("--cluster-secret is not set: anyone who reaches" in line for line in node.log)
    assert any("Tensor parallelism of ranks 2 to 3 crosses hosts" in line for line in master.log)


@pytest.mark.slow
def test_a_rank_that_dies_on_the_other_host_is_named() -> None:
    with serving(*ONCE, "-tp", "2") as (master, follower):
        (victim,) = follower.rank_pids(follower.process.pid).values()
        with request_under_way(master.url) as lines:
            os.kill(victim, signal.SIGKILL)
        named = rf"rank 1 \(node 1, host \S+ at 127\.0\.0\.1, pid {victim}\) died in a step by signal SIGKILL"
        assert any(re.search(named, line) for line in lines) and lines[-2] == "data: [DONE]"
        assert master.wait(LIMIT) == EngineError.exit_code and re.search(rf"^serve-llm: {named}", master.log[-1])
        assert follower.wait(LIMIT) == EngineError.exit_code and re.search(rf"Node 0 ends: {named}", follower.log[-1])


@pytest.mark.slow
def test_a_follower_that_dies_is_named_and_leaves_nothing() -> None:
    with serving(*ONCE, "-pp", "2") as (master, follower):
        ranks = [*follower.rank_pids(follower.process.pid).values(), *master.rank_pids().values()]
        with request_under_way(master.url):
            os.kill(follower.process.pid, signal.SIGKILL)
        named = r"rank 1 \(node 1, host \S+ at 127\.0\.0\.1, pid \d+\) died in a step by loss of its node"
        assert master.wait(LIMIT) == EngineError.exit_code and re.search(rf"^serve-llm: {named}", master.log[-1])
        assert ends(*ranks)


@pytest.mark.pairs("PP + replay", "replay + several hosts")
@pytest.mark.slow
def test_a_rank_that_dies_on_the_other_host_costs_no_stream_and_the_node_joins_again(continuations: list[str]) -> None:
    with serving("-pp", "2") as (master, follower):
        (victim,) = follower.rank_pids(follower.process.pid).values()
        with request_under_way(master.url) as lines:
            os.kill(victim, signal.SIGKILL)
        assert lines[-2] == "data: [DONE]" and not any("error" in line for line in lines)
        assert complete(master.url) == continuations
        assert any(re.search(r"Node 0 ends: rank 1 .*; waiting for the next engine", line) for line in follower.log)
        (again,) = follower.rank_pids(follower.process.pid).values()
        assert again != victim
        master.signal(signal.SIGTERM)
        assert (master.wait(LIMIT), follower.wait(LIMIT)) == (0, 0)


@pytest.mark.slow
def test_streams_wait_for_a_host_that_comes_back_no_longer_than_their_deadline() -> None:
    hosts = Hosts()
    with hosts.node(0, "demo", *SMALL, "-pp", "2") as master, hosts.node(1) as follower:
        master.wait_until_serving()
        with request_under_way(master.url) as lines:
            with request_under_way(master.url, seconds=8) as hasty:
                os.kill(follower.process.pid, signal.SIGKILL)
                master.wait_until_logged("died in a step by loss of its node.*; it is replaced")
            assert re.search(
                r"deadline has passed: it waited for an engine to be replaced: rank 1 "
                r"\(node 1, host \S+ at 127\.0\.0\.1, pid \d+\) died in a step by loss of its node.*deadline_exceeded",
                hasty[-4],
            )
            with hosts.node(1) as other:
                while "data: [DONE]" not in lines:
                    assert master.process.poll() is None and other.process.poll() is None
                    time.sleep(0.05)
                assert not any("error" in line for line in lines)
                master.signal(signal.SIGTERM)
                assert (master.wait(LIMIT), other.wait(LIMIT)) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine", "daemon"])
def test_no_follower_outlives_node_0(victim: str) -> None:
    with serving(*ONCE, "-pp", "2") as (master, follower):
        engine = master.engine_pid()
        ranks = [*follower.rank_pids(follower.process.pid).values(), *master.rank_pids().values()]
        os.kill(engine if victim == "engine" else master.process.pid, signal.SIGKILL)
        assert follower.wait(LIMIT) == EngineError.exit_code
        assert re.search(r"^serve-llm: node 0 is lost: the connection to 127\.0\.0\.1:\d+ is lost$", follower.log[-1])
        assert ends(engine, *ranks)
        master.wait(LIMIT)


@pytest.mark.slow
def test_signals_of_a_follower() -> None:
    """Before node 0 is up, one signal ends the follower; while it serves, the first signal lets it drain, the second
    does not."""
    with Hosts().node(1) as alone:
        alone.wait_until_logged("Waiting for node 0")
        alone.signal(signal.SIGTERM)
        assert alone.wait(LIMIT) == 0
    with serving(*ONCE, "-pp", "2") as (master, follower):
        follower.signal(signal.SIGTERM)
        follower.wait_until_logged("Continuing until node 0 exits")
        assert complete(master.url)
        follower.signal(signal.SIGTERM)
        assert follower.wait(LIMIT) == 0
        assert master.wait(LIMIT) == EngineError.exit_code and "loss of its node" in master.log[-1]


def two_models(folder: Path) -> tuple[Path, Path]:
    """Return folders on two hosts in which ./model differs: the second one was trained further."""
    for name in ("first", "second"):
        make_tokenizer(folder / name / "model", make_checkpoint(folder / name / "model", "llama"))
    weights = folder / "second/model/model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data.replace(b"norm.weight", b"morn.weight", 1))
    return folder / "first", folder / "second"


@pytest.mark.slow
def test_other_model_files_on_the_follower_are_named(tmp_path: Path) -> None:
    first, second = two_models(tmp_path)
    hosts = Hosts()
    with hosts.node(1, folder=second) as follower, hosts.node(0, "./model", "-pp", "2", folder=first) as master:
        assert master.wait(LIMIT) == EngineError.exit_code
        assert re.search(
            r"^serve-llm: all hosts must have the same versions and the same model files: the host \S+ "
            r"\(127\.0\.0\.1\) has model weights \w+, the engine's host has \w+$",
            master.log[-1],
        )
        assert follower.wait(LIMIT) == EngineError.exit_code and "has model weights" in follower.log[-1]


@pytest.mark.slow
def test_no_model_on_the_follower(tmp_path: Path) -> None:
    first, _ = two_models(tmp_path)
    hosts = Hosts()
    with hosts.node(1, folder=tmp_path) as node, hosts.node(0, "./model", "-pp", "2", folder=first) as master:
        assert master.wait(LIMIT) == ModelError.exit_code
        named = r"node 1, host \S+ at 127\.0\.0\.1: there is no directory model"
        assert re.search(rf"^serve-llm: {named}", master.log[-1])
        assert node.wait(LIMIT) == ModelError.exit_code
        assert node.log[-1].startswith("serve-llm: there is no directory model: ")


def test_other_words_on_the_follower() -> None:
    hosts = Hosts()
    with hosts.node(1, "-tp", "4") as follower, hosts.node(0, "demo", *SMALL, "-pp", "2") as master:
        assert follower.wait(LIMIT) == OptionError.exit_code
        words = "node 1 was started with --tensor-parallel-size 4, node 0 with 1"
        assert follower.log[-1] == f"serve-llm: {words}"
        assert master.wait(LIMIT) == OptionError.exit_code and words in master.log[-1]


@pytest.mark.slow
def test_a_follower_learns_why_node_0_cannot_start() -> None:
    hosts = Hosts()
    with hosts.node(1) as follower, hosts.node(0, "demo", "--kv-cache-memory", "64KiB", "-pp", "2") as master:
        assert master.wait(LIMIT) == CapacityError.exit_code
        cause = master.log[-1].removeprefix("serve-llm: ")
        assert follower.wait(LIMIT) == EngineError.exit_code and follower.log[-1].endswith(f"Node 0 ends: {cause}")


def test_a_master_address_of_another_host() -> None:
    with Daemon("demo", *SMALL, "-tp", "2", "--nnodes", "2", "--master-addr", "192.0.2.1:29500") as master:
        assert master.wait(LIMIT) == OptionError.exit_code
        assert re.search(r"serve-llm: (--master-addr 192\.0\.2\.1 is 192|no route from this host)", master.log[-1])
