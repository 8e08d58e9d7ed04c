"""The shared memory that a process leaves behind when it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from serve_llm.common.heartbeat import CAPACITY, Heartbeat, heartbeat_path


def test_what_is_under_way_is_seen_from_outside(tmp_path: Path) -> None:
    server, engine = Heartbeat(tmp_path / "pulse", create=True), Heartbeat(tmp_path / "pulse")
    assert server.read_running_ids() == [] and server.read().since == 0.0
    engine.show([5, 2**63])
    first = server.read()
    assert server.read_running_ids() == [5, 2**63] and first.since > 0.0 and first.longest == 0.0
    engine.show([7])
    assert server.read_running_ids() == [7] and server.read().since >= first.since
    engine.show([])
    last = server.read()
    assert server.read_running_ids() == [] and last.since == 0.0 and last.longest > 0.0
    engine.show(range(CAPACITY + 1))
    assert len(server.read_running_ids()) == CAPACITY


def test_its_blocks_are_allocated_at_once(tmp_path: Path) -> None:
    """If the disk filled up later, access to a block that does not exist would end the server by SIGBUS."""
    path = tmp_path / "pulse"
    Heartbeat(path, create=True)
    size = path.stat().st_size
    assert size > 8 * CAPACITY and path.stat().st_blocks * 512 >= size


def test_beats_are_counted_beside_the_steps(tmp_path: Path) -> None:
    server, engine = Heartbeat(tmp_path / "pulse", create=True), Heartbeat(tmp_path / "pulse")
    threading.Thread(target=engine.beat, daemon=True).start()
    engine.show([1])
    while server.read().beats < 2:
        pass
    assert server.read_running_ids() == [1]


def test_it_outlives_a_killed_process(tmp_path: Path) -> None:
    path = heartbeat_path(f"ipc://{tmp_path}/engine")
    server = Heartbeat(path, create=True)
    code = f"""
import pathlib, time
from serve_llm.common.heartbeat import Heartbeat
Heartbeat(pathlib.Path({str(path)!r})).show([11, 12])
print("shown", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"shown\n"
        os.kill(process.pid, signal.SIGKILL)
    assert server.read_running_ids() == [11, 12]
