"""`serve-llm check` between machines in namespaces: no false alarms, and each fault is named."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import pytest

from support.daemon import SERVE_LLM
from support.matrix import mostly_slow
from support.namespaces import Machine, Machines, why_not

several_machines = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

PORT = 29400
CHECK = (SERVE_LLM, "check")
LIMIT_SECONDS = 120.0  # on a busy machine; alone each of these takes a few seconds


def start(machine: Machine, nnodes: int, *arguments: str, program: tuple[str, ...] = CHECK) -> subprocess.Popen[str]:
    network = ["--nnodes", str(nnodes), "--node-rank", str(machine.number), "--master-addr", f"10.77.0.1:{PORT}"]
    return machine.popen(*program, *network, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(*processes: subprocess.Popen[str]) -> tuple[list[int], list[str]]:
    """Return exit codes and outputs in order. Fails if a process takes too long."""
    began = time.monotonic()
    outputs = ["".join(process.communicate(timeout=LIMIT_SECONDS)) for process in processes]
    print(f"{time.monotonic() - began:.1f} s", *outputs, sep="\n")
    return [process.returncode for process in processes], outputs


def check_all(machines: Machines, *arguments: str) -> tuple[list[int], list[str]]:
    every = list(machines)
    return finish(*[start(machine, len(every), *arguments) for machine in every])


def problems(output: str) -> list[str]:
    return re.findall(r"^PROBLEM: (.*)$", output, re.MULTILINE)


def test_this_host_alone() -> None:
    run = subprocess.run([*CHECK, "demo"], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert "127.0.0.1" in run.stdout and "from  to" not in run.stdout
    assert re.search(
        r"^note: .* [1-9]\d* shapes of linear layer checked \(\w+\): no result depends", run.stdout, re.MULTILINE
    )
    assert (run.returncode == 0) == ("No problem found." in run.stdout)
    run = subprocess.run([*CHECK, "./nothing"], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    found = problems(run.stdout)
    assert run.returncode == 1 and any("there is no directory nothing" in line and "; copy" in line for line in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "2"], "--nnodes needs --master-addr HOST:PORT"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "127.0.0.1:1"], "--node-rank one of 0 to nnodes - 1"),
        (["--nnodes", "2", "--master-addr", "127.0.0.1"], "--master-addr 127.0.0.1: expected host:port"),
        (
            ["--nnodes", "2", "--master-addr", "127.0.0.1:1", "--host-ip", "192.0.2.1"],
            "--host-ip 192.0.2.1 is not an address",
        ),
        (["--node-count", "2"], "unknown option --node-count; did you mean --node-rank?"),
    ],
)
def test_arguments_that_cannot_work(arguments: list[str], message: str) -> None:
    run = subprocess.run([*CHECK, *arguments], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert run.returncode == 2 and message in run.stderr


def test_two_nodes_on_this_host() -> None:
    """Needs no namespaces; the limits of this host do not matter to the test."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{unused.getsockname()[1]}"
    both = [*CHECK, "--nnodes", "2", "--master-addr", master, "--node-rank"]
    with subprocess.Popen([*both, "1"], stdout=subprocess.PIPE, text=True) as follower:
        run = subprocess.run([*both, "0"], capture_output=True, text=True, timeout=LIMIT_SECONDS)
        assert follower.communicate(timeout=LIMIT_SECONDS)[0] == run.stdout
    assert len(re.findall(r"^[01] +[01] +ok +ok +\d+ us", run.stdout, re.MULTILINE)) == 2
    assert "gloo all-reduce: exact; " in run.stdout and not any("->" in line for line in problems(run.stdout))


@several_machines
@pytest.mark.parametrize("nnodes", mostly_slow([2, 3], [2]))
def test_healthy(nnodes: int) -> None:
    with Machines(nnodes) as machines:
        # The master starts last: the order does not matter.
        codes, outputs = finish(*[start(machine, nnodes, "demo") for machine in reversed(list(machines))])
    assert codes == [0] * nnodes and len(set(outputs)) == 1
    output = outputs[0]
    assert not problems(output) and f"No problem found between {nnodes} hosts." in output
    assert re.search(r"^1     host1  10\.77\.0\.2  eth0       1500 .* [+-]\d+ ms ", output, re.MULTILINE)
    pairs = re.findall(r"^\d +\d +ok +ok +\d+ us +[\d.]+ [KMG]iB/s$", output, re.MULTILINE)
    assert len(pairs) == nnodes * (nnodes - 1)
    assert re.search(r"^gloo all-reduce: exact; 16 KiB in \d+ us, 4 MiB at [\d.]+ [KMG]iB/s$", output, re.MULTILINE)


@pytest.mark.slow
@several_machines
def test_one_direction_dropped_between_two_followers() -> None:
    with Machines(3) as machines:
        machines.cut(2, 1)
        codes, outputs = check_all(machines)
    assert codes == [1, 1, 1]
    (problem,) = problems(outputs[0])
    assert problem.startswith(
        "node 2 (host2) -> node 1 (host1): packets in this direction are lost, those in the other"
    )
    assert "firewall of node 1" in problem


@pytest.mark.slow
@several_machines
@pytest.mark.parametrize("source", [0, 1])
def test_one_direction_dropped_to_or_from_the_master(source: int) -> None:
    with Machines(2) as machines:
        machines.cut(source, 1 - source)
        codes, outputs = check_all(machines, "--timeout", "3")
    assert codes == [1, 1]
    (problem,) = problems(outputs[0])
    if source == 0:
        assert problem.startswith("node 1 (host1) cannot connect to node 0: its packets arrive, those from node 0 to")
    else:
        assert problem.startswith("node 1 has not arrived within 3 s and nothing is heard from it")
    assert "node 0 at 10.77.0.1 port 29400 could not be reached within 3 s: no answer at all" in outputs[1]


@pytest.mark.slow
@several_machines
def test_host_that_is_not_started() -> None:
    with Machines(3) as machines:
        codes, outputs = finish(*[start(machines[rank], 3, "--timeout", "3") for rank in (0, 1)])
    assert codes == [1, 1]
    (problem,) = problems(outputs[0])
    assert problem.startswith("node 2 has not arrived within 3 s") and "--node-rank 2" in problem
    assert outputs[1] == outputs[0] and re.search(r"^0 +1 +ok +ok", outputs[0], re.MULTILINE)


@pytest.mark.slow
@several_machines
def test_master_in_another_network() -> None:
    with Machines(2) as machines:
        machines[1].ip("addr", "flush", "dev", "eth0")
        machines[1].ip("addr", "add", "10.88.0.2/24", "dev", "eth0")
        codes, outputs = check_all(machines, "--timeout", "2")
    assert codes == [1, 2] and "node 1 has not arrived within 2 s" in outputs[0]
    assert "no route from this host to the master 10.77.0.1" in outputs[1] and "10.88.0.2 (eth0)" in outputs[1]


@several_machines
def test_address_that_others_cannot_reach() -> None:
    with Machines(2) as machines:
        machines[1].ip("addr", "add", "10.88.0.2/24", "dev", "eth0")
        codes, outputs = finish(start(machines[0], 2), start(machines[1], 2, "--host-ip", "10.88.0.2"))
    assert codes == [1, 1]
    (problem,) = problems(outputs[0])
    assert "host1" in problem and "10.88.0.2 (eth0)" in problem and "--host-ip" in problem


@pytest.mark.slow
@several_machines
def test_small_mtu_on_the_path() -> None:
    with Machines(3) as machines:
        machines.set_path_mtu(1, 1400)
        codes, outputs = check_all(machines)
    assert codes == [1, 1, 1] and len(set(outputs)) == 1
    found = problems(outputs[0])
    assert len(found) == 2 and all("host1" in line for line in found)
    assert all("the interfaces send 1500 bytes, packets of up to 1400 bytes pass" in line for line in found)


@pytest.mark.slow
@several_machines
def test_closed_port_of_the_master() -> None:
    with Machines(2) as machines:
        machines[0].close_port(PORT)
        codes, outputs = check_all(machines, "--timeout", "3")
    assert codes == [1, 1]
    (problem,) = problems(outputs[0])
    assert problem.startswith("node 1 (host1) cannot open connections to node 0, though packets pass both ways")
    assert f"its UDP port answers, TCP port {PORT} is closed" in outputs[1]


@pytest.mark.slow
@several_machines
def test_closed_port_of_another() -> None:
    with Machines(2) as machines:
        second = start(machines[1], 2)
        machines[1].close_port(listening_port(machines[1]))
        codes, outputs = finish(start(machines[0], 2), second)
    assert codes == [1, 1]
    (problem,) = problems(outputs[0])
    assert problem.startswith("node 0 (host0) -> node 1 (host1): no connection to 10.77.0.2 port")
    assert "the firewall of node 1 closes the port" in problem


def listening_port(machine: Machine) -> int:
    """Return the only TCP port with a listener, once there is one."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        table = machine.run("cat", "/proc/net/tcp").stdout
        if found := re.findall(r"^ *\d+: [0-9A-F]{8}:([0-9A-F]{4}) 00000000:0000 0A", table, re.MULTILINE):
            return int(found[0], 16)
    raise AssertionError("nobody listens")


@pytest.mark.slow
@several_machines
def test_other_version() -> None:
    """The other host's report must show its version: the installed version of torch is faked there."""
    code = (
        "import sys; from serve_llm.common import hosts; real = hosts.version; "
        "hosts.version = lambda name: '2.12.0' if name == 'torch' else real(name); "
        "from serve_llm.cli.check.__main__ import main; sys.exit(main())"
    )
    with Machines(2) as machines:
        other = start(machines[1], 2, program=(sys.executable, "-P", "-c", code))
        codes, outputs = finish(start(machines[0], 2), other)
    assert codes == [1, 1]
    (problem,) = problems(outputs[0])
    assert problem.startswith("node 1 (host1) has torch 2.12.0, node 0 (host0) has 2.13.0")


@pytest.mark.slow
@several_machines
def test_missing_and_different_model_files(tmp_path: Path) -> None:
    models = [tmp_path / name for name in ("whole", "without", "other")]
    for model in models:
        shutil.copytree(str(files("serve_llm.demo")), model)
    (models[1] / "model.safetensors").unlink()
    (models[2] / "config.json").write_text((models[2] / "config.json").read_text() + "\n")
    with Machines(3) as machines:
        codes, outputs = finish(*[start(machines[rank], 3, str(models[rank])) for rank in range(3)])
    assert codes == [1, 1, 1]
    missing, other = problems(outputs[0])
    assert missing.startswith(f"node 1 (host1): {models[1]}: no *.safetensors in {models[1]}") and "copy" in missing
    assert re.match(r"node 2 \(host2\) has config.json \w+, node 0 \(host0\) has \w+; install", other)


@pytest.mark.slow
@several_machines
def test_tiny_shared_memory() -> None:
    with Machines(2, shm_size="64m") as machines:
        machines[0].run("mount", "-o", "remount,size=1g", "/dev/shm")
        codes, outputs = check_all(machines)
    assert codes == [1, 1]
    (problem,) = problems(outputs[0])
    assert problem.startswith("node 1 (host1): /dev/shm holds 64 MiB") and "--shm-size" in problem


@pytest.mark.slow
@several_machines
def test_rank_given_twice() -> None:
    with Machines(2) as machines:
        first = start(machines[1], 3, "--timeout", "3")
        again = start(machines[1], 3, "--timeout", "3")
        codes, outputs = finish(start(machines[0], 3, "--timeout", "3"), first, again)
    assert sorted(codes) == [1, 1, 2]
    assert sum("--node-rank 1 is taken by host1" in output for output in outputs) == 1
