"""Front ends on other hosts answer clients like the server itself; hosts may join, leave, and be lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from serve_llm.common.errors import OptionError
from support.daemon import SERVE_LLM, Daemon
from support.front_end_load import Clients, kill_front_end, list_front_ends, read_status
from support.namespaces import Machines
from support.nodes import free_port

SECRET = {"SERVE_LLM_CLUSTER_SECRET": "s3cret"}
SMALL = ("--kv-cache-memory", "32MiB")


def wait_until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Fleet:
    """A server, and a host with two front ends."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.address = f"127.0.0.1:{free_port()}"
        self.server = self.start_server()
        self.host = self.start_host()
        self.server.wait_until_serving()
        self.host.wait_until_serving()

    def start_server(self) -> Daemon:
        options = ("--front-end-addr", self.address, "--responses-store", "memory", *SMALL)
        return self._stack.enter_context(Daemon("demo", *options, environ=SECRET))

    def start_host(self) -> Daemon:
        return self._stack.enter_context(Daemon("front-end", self.address, "--front-ends", "2", environ=SECRET))

    def wait_for_front_ends(self, number: int, num_spares: int = 1) -> list[int]:
        """Wait until this many of the host's front ends serve and one is spare. Returns the process ids of those
        serving."""

        def are_there() -> bool:
            spares = list_front_ends(self.server, "spare")
            return len(list_front_ends(self.server)) == number and len(spares) == num_spares

        wait_until(are_there)
        return list_front_ends(self.server)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack)


def call(daemon: Daemon, method: str, path: str, body: object = None) -> dict[str, Any]:
    """Use a new connection, which any front end of that host may accept."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(daemon.url + path, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_a_host_answers_as_the_server_does(fleet: Fleet) -> None:
    with Clients(fleet.host, 4, (4, 12, 24)) as there:
        there.wait_for(10)
    with Clients(fleet.server, 1, (4, 12, 24)) as here:
        here.wait_for(1)
    assert not there.load.wrong and not there.load.lost
    assert there.load.expected == here.load.expected
    name = "serve_llm_generation_tokens_total"
    before = fleet.server.metrics()[name]
    body = {"model": "demo", "prompt": "import", "max_tokens": 5, "ignore_eos": True}
    for _ in range(4):
        assert call(fleet.host, "POST", "/v1/completions", body)["usage"]["completion_tokens"] == 5
    assert fleet.host.metrics()[name] - before == 20, "its counts are part of the server's"


def test_what_the_server_keeps_is_there_on_the_host(fleet: Fleet) -> None:
    body = {"model": "demo", "input": "hi", "max_output_tokens": 6, "store": True}
    first = call(fleet.host, "POST", "/v1/responses", body)
    for daemon in (fleet.host, fleet.server):
        assert call(daemon, "GET", f"/v1/responses/{first['id']}")["output"] == first["output"]
    front_ends = read_status(fleet.host)["front_ends"]
    assert {one["host"] for one in front_ends} == {os.uname().nodename}
    assert all(psutil.Process(one["pid"]).ppid() == fleet.host.process.pid for one in front_ends)


def test_a_large_body_and_a_large_answer_pass(fleet: Fleet) -> None:
    text = "x = 1\n" * 60_000
    body = {"model": "demo", "input": text, "max_output_tokens": 1, "store": True}
    request = urllib.request.Request(
        fleet.host.url + "/v1/responses", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value:
        assert refused.value.code == 400 and "tokens" in json.load(refused.value)["error"]["message"]
    document = urllib.request.urlopen(fleet.host.url + "/openapi.json", timeout=60).read()
    with urllib.request.urlopen(fleet.server.url + "/openapi.json", timeout=60) as same:
        assert document == same.read() and len(document) > 100_000


def test_a_front_end_that_is_killed_loses_only_its_own_connections(fleet: Fleet) -> None:
    restarts = fleet.server.metrics()["serve_llm_front_end_restarts_total"]
    engine = fleet.server.engine_pid()
    with Clients(fleet.host, 6, (4, 12, 24)) as clients:
        serving = fleet.wait_for_front_ends(2)
        clients.wait_for(10)
        lost_ports = kill_front_end(serving[0])
        clients.wait_for(20)
    assert not clients.load.wrong
    assert {port for port, _ in clients.load.lost} <= lost_ports, clients.load.lost
    fleet.wait_for_front_ends(2)
    assert fleet.server.metrics()["serve_llm_front_end_restarts_total"] == restarts + 1
    assert fleet.server.engine_pid() == engine


@pytest.mark.slow
def test_an_upgrade_replaces_the_front_ends_of_all_hosts(fleet: Fleet) -> None:
    old = fleet.wait_for_front_ends(2)
    with Clients(fleet.host, 4, (4, 12)) as clients:
        clients.wait_for(4)
        fleet.server.signal(signal.SIGHUP)
        wait_until(lambda: not set(list_front_ends(fleet.server)) & set(old))
        fleet.wait_for_front_ends(2)
        clients.wait_for(4)
    assert not clients.load.wrong and not clients.load.lost


def read_stream(url: str, num_tokens: int) -> subprocess.Popen[str]:
    """Start a client, and wait until its stream has begun."""
    body = {"model": "demo", "prompt": "a", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    code = (
        "import sys, urllib.request as u\n"
        "r = u.Request(sys.argv[1] + '/v1/completions', sys.argv[2].encode(), {'content-type': 'application/json'})\n"
        "for line in u.urlopen(r, timeout=120):\n    print(line.decode().strip(), flush=True)\n"
    )
    command = [sys.executable, "-c", code, url, json.dumps(body)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert client.stdout is not None and client.stdout.readline().startswith("data: ")
    return client


@pytest.mark.slow
def test_a_host_that_leaves_finishes_its_streams() -> None:
    with ExitStack() as stack:
        fleet = Fleet(stack)
        client = read_stream(fleet.host.url, 600)
        fleet.host.signal(signal.SIGTERM)
        rest, error = client.communicate(timeout=120)
        assert rest.rstrip().endswith("data: [DONE]"), error
        assert fleet.host.wait(30) == 0
        assert read_status(fleet.server)["front_ends"] == []
        assert call(fleet.server, "GET", "/health")


@pytest.mark.slow
def test_the_requests_of_a_lost_host_end_and_another_may_join() -> None:
    with ExitStack() as stack:
        fleet = Fleet(stack)
        fleet.wait_for_front_ends(2)
        client = read_stream(fleet.host.url, 2000)
        children = psutil.Process(fleet.host.process.pid).children()
        fleet.host.signal(signal.SIGKILL)
        assert psutil.wait_procs(children, timeout=30)[1] == [], "front ends end with their host's program"
        client.communicate(timeout=60)
        fleet.server.wait_until_logged("is lost, with its front ends' requests")
        wait_until(lambda: call(fleet.server, "GET", "/load")["server_load"] == 0)
        assert read_status(fleet.server)["front_ends"] == []
        other = fleet.start_host()
        other.wait_until_serving()
        assert call(other, "POST", "/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 1})["choices"]


@pytest.mark.slow
def test_a_host_joins_again_when_the_server_is_started_again() -> None:
    with ExitStack() as stack:
        fleet = Fleet(stack)
        fleet.server.signal(signal.SIGKILL)
        fleet.host.wait_until_logged("The server is lost: no message for")
        wait_until(lambda: not psutil.Process(fleet.host.process.pid).children())
        fleet.server = fleet.start_server()
        answer = call(fleet.host, "POST", "/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 1})
        assert answer["choices"], "the connection waited"


@pytest.mark.slow
def test_over_a_network() -> None:
    with Machines(3) as machines, ExitStack() as stack:
        address = f"{machines[0].address}:29700"
        options = ("demo", "--front-end-addr", address, *SMALL)
        stack.enter_context(Daemon(*options, environ=SECRET, machine=machines[0]))
        host = stack.enter_context(
            Daemon("front-end", address, "--host", "0.0.0.0", environ=SECRET, machine=machines[1])
        )
        url = host.wait_until_serving().replace("0.0.0.0", machines[1].address)
        body = json.dumps({"model": "demo", "prompt": "import", "max_tokens": 4, "ignore_eos": True})
        curl = ["curl", "-sS", url + "/v1/completions", "-H", "content-type: application/json", "-d", body]
        assert json.loads(machines[2].run(*curl).stdout)["usage"]["completion_tokens"] == 4
        machines[0].power_off()
        host.wait_until_logged("The server is lost: no message for")


@pytest.mark.long  # the refusal takes 30 s
@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SERVE_LLM_CLUSTER_SECRET": "other"}, r"refuses the connection: --cluster-secret"),
        ({}, r"--cluster-secret \(SERVE_LLM_CLUSTER_SECRET\) is missing"),
    ],
)
def test_a_host_without_the_secret(environ: dict[str, str], message: str, fleet: Fleet) -> None:
    command = [SERVE_LLM, "front-end", fleet.address, "--port", "0"]
    run = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=60)
    assert run.returncode == OptionError.exit_code and re.search(message, run.stderr), run.stderr
