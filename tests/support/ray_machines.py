"""Nodes of a Ray cluster on machines in network namespaces, and a daemon on one of them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support.daemon import SERVE_LLM
from support.namespaces import Machine
from support.ray_nodes import STORE_BYTES, environment

RAY = ("--distributed-executor-backend", "ray")
LIMIT = 180.0  # seconds; more than enough on a busy machine
# Settings of a head that declares a lost machine dead within about ten seconds, as in deploy/; by default it takes a
# minute.
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Create a folder for the files of one Ray cluster."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield Path(name)


def wait_until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline, f"still not so: {what}"
        time.sleep(0.05)


def start_ray(machine: Machine, folder: Path, num_cpus: int, head: str = "", **environ: str) -> None:
    """Start a node of the cluster whose head has this address, or the head itself. Returns when it has joined."""
    log = folder.with_suffix(f".{machine.name}")
    where = ["--address", f"{head}:6379"] if head else ["--head", "--port=6379", "--include-dashboard=false"]
    own = [f"--node-ip-address={machine.address}", f"--num-cpus={num_cpus}", f"--object-store-memory={STORE_BYTES}"]
    ray = str(Path(sys.executable).with_name("ray"))
    with log.open("w") as output:
        machine.popen(
            *(ray, "start", *where, *own, "--disable-usage-stats", "--block"),
            env=environment(folder) | environ,
            stdout=output,
            stderr=output,
        )
    wait_until(lambda: "Ray runtime started" in log.read_text(), f"Ray started on {machine.name}")


def serve_on(
    host: Machine, folder: Path, log: Path, *options: str, model: str = "demo"
) -> tuple[subprocess.Popen[str], str]:
    """Start a daemon on this machine. Returns it and its URL once it serves."""
    where = ("--served-model-name", "demo", "--host", host.address, "--port", "8000")
    with log.open("w") as output:
        daemon = host.popen(SERVE_LLM, model, *RAY, *options, *where, env=environment(folder), stderr=output)
    wait_until(lambda: daemon.poll() is not None or f"Serving {model}" in log.read_text(), "serving")
    assert daemon.poll() is None, log.read_text()
    return daemon, f"http://{host.address}:8000"
