"""Several front ends: they may be killed and replaced at any time, and their shared data stays correct."""

from __future__ import annotations

import http.client
import json
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve_llm.common.hub import resolve_model
from support.adapters import make_adapter
from support.daemon import Daemon
from support.front_end_load import Clients, kill_front_end, list_front_ends, read_status

KEY = "admin:test"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("batches")
    options = ("--front-ends", "2", "--responses-store", "memory", "--batches-dir", str(folder))
    with Daemon("demo", *options, "--kv-cache-memory", "64MiB") as daemon:
        daemon.wait_until_serving()
        yield daemon


def call(daemon: Daemon, method: str, path: str, body: object = None, status: int = 200) -> dict[str, Any]:
    """Use a new connection, which any front end may accept."""
    connection = http.client.HTTPConnection(daemon.wait_until_serving().removeprefix("http://"), timeout=60)
    connection.request(method, path, None if body is None else json.dumps(body), {"x-api-key": KEY})
    with connection.getresponse() as answer:
        content = answer.read()
        assert answer.status == status, content
    connection.close()
    found: dict[str, Any] = json.loads(content)
    return found


def wait_for_front_ends(daemon: Daemon, number: int) -> list[int]:
    """Wait until this many serve and one is spare."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        serving = list_front_ends(daemon)
        if len(serving) == number and len(list_front_ends(daemon, "spare")) == 1:
            return serving
        time.sleep(0.1)
    raise AssertionError(read_status(daemon))


def test_front_ends_that_are_killed_lose_only_their_own_connections(fleet: Daemon) -> None:
    engine = fleet.engine_pid()
    before = fleet.metrics()
    lost_ports: set[int] = set()
    num_kills = 2
    with Clients(fleet, 6, (4, 12, 24)) as clients:
        for number in range(num_kills):
            serving = wait_for_front_ends(fleet, 2)
            clients.wait_for(10)
            lost_ports |= kill_front_end(serving[number % 2])
        clients.wait_for(20)
    load = clients.load
    assert not load.wrong
    assert {port for port, _ in load.lost} <= lost_ports, load.lost
    status = read_status(fleet)
    assert status["restarts"] == 0 and fleet.engine_pid() == engine
    after = fleet.metrics()
    assert after["serve_llm_front_end_restarts_total"] - before["serve_llm_front_end_restarts_total"] == num_kills
    wait_for_front_ends(fleet, 2)


@pytest.mark.slow
def test_an_upgrade_replaces_all_front_ends_and_loses_nothing(fleet: Daemon) -> None:
    old = wait_for_front_ends(fleet, 2)
    processes = [psutil.Process(pid) for pid in old]
    with Clients(fleet, 6, (4, 12, 24)) as clients:
        clients.wait_for(10)
        fleet.signal(signal.SIGHUP)
        while set(wait_for_front_ends(fleet, 2)) & set(old):
            time.sleep(0.1)
        clients.wait_for(10)
    assert not clients.load.wrong and not clients.load.lost
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    wait_for_front_ends(fleet, 2)
    status = read_status(fleet)
    assert status["restarts"] == 0 and len(status["front_ends"]) == 3


def test_any_front_end_speaks_for_all(fleet: Daemon) -> None:
    name = "serve_llm_generation_tokens_total"
    before = fleet.metrics()[name]
    body = {"model": "demo", "prompt": "import", "max_tokens": 5, "ignore_eos": True}
    usages = [call(fleet, "POST", "/v1/completions", body)["usage"] for _ in range(8)]
    assert {fleet.metrics()[name] - before for _ in range(8)} == {sum(one["completion_tokens"] for one in usages)}
    assert {call(fleet, "GET", "/load")["server_load"] for _ in range(8)} == {0}
    listed = call(fleet, "GET", "/requests")["requests"][:8]
    assert [one["generated_tokens"] for one in listed] == [5] * 8 and {one["outcome"] for one in listed} == {"length"}


@pytest.mark.slow
def test_what_is_stored_is_there_in_every_front_end(fleet: Daemon) -> None:
    body: dict[str, Any] = {"model": "demo", "input": "hi", "max_output_tokens": 6, "store": True}
    first = call(fleet, "POST", "/v1/responses", body)
    for _ in range(6):
        assert call(fleet, "GET", f"/v1/responses/{first['id']}")["output"] == first["output"]
    call(fleet, "POST", "/v1/responses", body | {"previous_response_id": first["id"]})
    background = call(fleet, "POST", "/v1/responses", body | {"background": True})
    while (found := call(fleet, "GET", f"/v1/responses/{background['id']}"))["status"] in ("queued", "in_progress"):
        time.sleep(0.05)
    assert found["status"] in ("completed", "incomplete")
    assert call(fleet, "GET", "/v1/batches")["data"] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # from PEFT
def test_adapters_come_and_go_in_all_front_ends_at_once(tmp_path: Path) -> None:
    directory = make_adapter(resolve_model("demo"), tmp_path / "first", seed=1, scale=0.1).directory
    options = ("--front-ends", "3", "--enable-lora", "--api-key", KEY, "--kv-cache-memory", "16MiB")
    body = {"model": "first", "prompt": "import", "max_tokens": 2}
    with Daemon("demo", *options) as daemon:
        for _ in range(3):
            call(daemon, "POST", "/v1/load_lora_adapter", {"lora_name": "first", "lora_path": directory})
            for _ in range(6):
                assert call(daemon, "POST", "/v1/completions", body)["model"] == "first"
            call(daemon, "POST", "/v1/unload_lora_adapter", {"lora_name": "first"})
            for _ in range(6):
                call(daemon, "POST", "/v1/completions", body, status=404)


@pytest.mark.slow
def test_nothing_outlives_the_server(tmp_path: Path) -> None:
    options = ("--front-ends", "2", "--kv-cache-memory", "16MiB")
    with Daemon("demo", *options, environ={"TMPDIR": str(tmp_path)}) as daemon:
        daemon.wait_until_logged("Listening on")
        daemon.signal(signal.SIGHUP)  # too early, which does no harm
        daemon.wait_until_serving()
        daemon.wait_until_logged("Replacing 2 front ends")
        children = psutil.Process(daemon.process.pid).children(recursive=True)
        assert len(children) >= 3
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        assert psutil.wait_procs(children, timeout=30)[1] == []
        assert list(tmp_path.glob("serve-llm-*")) == []


@pytest.mark.long
@pytest.mark.parametrize("num_front_ends", [2, 4])
def test_many_kills_among_many_requests(num_front_ends: int, tmp_path: Path) -> None:
    choose = random.Random(1)
    lost_ports: set[int] = set()
    num_kills = 200 if num_front_ends == 4 else 20
    with Daemon("demo", "--front-ends", str(num_front_ends), "--kv-cache-memory", "64MiB") as daemon:
        engine = daemon.engine_pid() if daemon.wait_until_serving() else 0
        with Clients(daemon, 16, (1, 2, 4, 24), num_requests=100 * num_kills) as clients:
            for _ in range(num_kills):
                clients.wait_for(60)
                serving = list_front_ends(daemon)
                if serving:
                    lost_ports |= kill_front_end(choose.choice(serving))
        load = clients.load
        assert load.num_answered >= 100 * num_kills and not load.wrong
        assert {port for port, _ in load.lost} <= lost_ports, load.lost
        assert read_status(daemon)["restarts"] == 0 and daemon.engine_pid() == engine
        assert daemon.metrics()["serve_llm_num_requests_running"] == 0
        assert not any(re.search("Traceback", line) for line in daemon.log)
