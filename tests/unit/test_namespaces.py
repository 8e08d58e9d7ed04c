"""The simulated machines of other tests: each fault has its effect, and nothing is left behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.namespaces import Machines, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

# Replies to each request, a number n in four bytes, with n bytes.
SERVER = """
import socket, threading
listener = socket.create_server(("", 7000))
print("ready", flush=True)
def answer(peer):
    while request := peer.recv(4):
        peer.sendall(bytes(int.from_bytes(request, "big")))
while True:
    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
"""
CLIENT = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 7000), timeout=0.5)
for size in map(int, sys.argv[2:]):
    peer.sendall(size.to_bytes(4, "big"))
    got = 0
    while got < size:
        got += len(peer.recv(65536))
    print(size)
"""


def ask(machines: Machines, source: int, target: int, *sizes: int) -> str:
    """Run the client. Returns its output, and the name of the exception that ended it."""
    run = machines[source].run(
        sys.executable, "-I", "-c", CLIENT, machines[target].address, *map(str, sizes), seconds=20
    )
    return " ".join([*run.stdout.split(), *run.stderr.splitlines()[-1:]]).partition(":")[0]


def serve(machines: Machines, number: int) -> subprocess.Popen[str]:
    server = machines[number].popen(sys.executable, "-I", "-c", SERVER, stdout=subprocess.PIPE)
    assert server.stdout is not None and server.stdout.readline() == "ready\n"
    return server


def test_faults_and_their_repair() -> None:
    with Machines(3, private=["/tmp/serve-llm-private"]) as machines:
        servers = [serve(machines, number) for number in range(3)]
        assert ask(machines, 0, 1, 8, 100_000) == ask(machines, 1, 0, 8, 100_000) == "8 100000"
        machines.cut(0, 1)
        assert ask(machines, 0, 1, 8) == ask(machines, 1, 0, 8) == "TimeoutError"
        assert ask(machines, 0, 2, 8) == ask(machines, 2, 1, 8) == "8"
        machines[1].restore()
        machines[1].close_port(7000)
        assert ask(machines, 0, 1, 8) == "TimeoutError" and ask(machines, 1, 0, 8) == "8"
        machines[1].restore()
        assert ask(machines, 0, 1, 8, 100_000) == "8 100000"
        machines.set_path_mtu(1, 1000)
        assert ask(machines, 0, 1, 8, 900, 100_000) == "8 900 TimeoutError"
        assert ask(machines, 0, 2, 100_000) == "100000"

        machines[0].run("touch", "/tmp/serve-llm-private/mine")
        assert machines[0].run("ls", "/tmp/serve-llm-private").stdout == "mine\n"
        assert machines[1].run("ls", "/tmp/serve-llm-private").stdout == ""
        assert [machine.run("hostname").stdout for machine in machines] == ["host0\n", "host1\n", "host2\n"]
        machines[2].power_off()
        assert ask(machines, 0, 2, 8) in ("OSError", "TimeoutError")
        assert servers[2].wait(5) != 0
    assert all(server.poll() is not None for server in servers)
    assert machines._prefix not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


def test_latency() -> None:
    with Machines(2) as machines:
        machines.delay(0, 600)
        serve(machines, 1)
        assert ask(machines, 0, 1, 8) == "TimeoutError"
