"""`serve-llm check --ray` on a cluster of two machines in namespaces."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.daemon import SERVE_LLM
from support.namespaces import Machine, Machines, why_not

RAY = str(Path(sys.executable).with_name("ray"))
CHECK = (SERVE_LLM, "check", "--ray", "demo")
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


def start(machine: Machine) -> subprocess.Popen[str]:
    joining = ["--address=10.77.0.1:6379"] if machine.number else ["--head", "--port=6379", "--include-dashboard=false"]
    size = ["--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
    command = [RAY, "start", *joining, f"--node-ip-address={machine.address}", *size]
    return machine.popen(*command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_nodes(machine: Machine, number: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        status = machine.run(RAY, "status", "--address=10.77.0.1:6379", env=ENVIRONMENT).stdout
        if len(re.findall(r"node_[0-9a-f]+", status.partition("Pending")[0])) == number:
            return
    raise AssertionError("the cluster does not come up")


@pytest.mark.slow
@needs_ray
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_cluster_of_two() -> None:
    with Machines(2, private=["/tmp/ray"]) as machines:
        for number, machine in enumerate(machines):
            start(machine)
            wait_for_nodes(machines[0], number + 1)
        # Started on the second machine: node 0 is where the check starts, whichever machine has the head.
        run = machines[1].run(*CHECK, env=ENVIRONMENT, seconds=60)
        print(run.stdout, run.stderr)
        assert run.returncode == 0 and "No problem found between 2 hosts." in run.stdout
        assert re.search(
            r"^0     host1  10\.77\.0\.2  eth0 .*\n1     host0  10\.77\.0\.1  eth0 ", run.stdout, re.MULTILINE
        )
        assert "gloo all-reduce: exact" in run.stdout

        machines[0].run("mount", "-o", "remount,size=200m", "/dev/shm")
        run = machines[0].run(*CHECK, env=ENVIRONMENT, seconds=60)
        print(run.stdout, run.stderr)
        assert run.returncode == 1
        assert re.search(r"^PROBLEM: node 0 \(host0\): /dev/shm holds 200 MiB", run.stdout, re.MULTILINE)

        machines.set_path_mtu(1, 1000)  # Ray itself cannot start workers on that machine
        run = machines[0].run(*CHECK, "--timeout", "8", env=ENVIRONMENT, seconds=60)
        print(run.stdout, run.stderr)
        assert run.returncode == 1
        assert re.search(r"^PROBLEM: node 1 \(host1\): .*; run the check with --nnodes", run.stdout, re.MULTILINE)


@needs_ray
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_no_cluster() -> None:
    with Machines(1, private=["/tmp/ray"]) as machines:  # so that no other Ray cluster is found
        run = machines[0].run(*CHECK, env=ENVIRONMENT)
    assert run.returncode == 2 and "start one with `ray start` on each host" in run.stderr


def test_ray_finds_the_hosts_by_itself() -> None:
    run = subprocess.run([*CHECK, "--nnodes", "2"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "--ray finds the hosts by itself" in run.stderr
