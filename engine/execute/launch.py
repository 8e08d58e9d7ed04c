"""Starts ranks as processes of this host and sees how they fare. No torch: so that they import theirs meanwhile."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

END_SECONDS = 5.0  # for killed processes to be gone

SECRET_VARIABLE = "SERVE_LLM_CLUSTER_SECRET"  # command lines can be read by all users of a host


class LocalRanks:
    """See `roster.Launched`."""

    def __init__(
        self, ranks: Sequence[int], url: str, *, secret: str = "", address: str = "", directory: str | None = None
    ) -> None:
        """Each connects to `url` (ZeroMQ) and ends with this process: its standard input is the leash.

        secret: of the engine's endpoint. address: this host's, for ranks on others. directory: the checkpoint, if it
        may lie elsewhere than on the engine's host.
        """
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._host = socket.gethostname()
        for rank in ranks:
            command = [sys.executable, "-P", "-m", "serve_llm.engine.execute.rank"]
            command += ["--connect", url, "--rank", str(rank)]
            command += ["--address", address] if address else []
            command += ["--directory", directory] if directory is not None else []
            # one progress bar is enough
            environ = os.environ | ({"TQDM_DISABLE": "1"} if rank != ranks[0] else {}) | {SECRET_VARIABLE: secret}
            self._processes[rank] = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)

    def ended(self) -> Mapping[int, str]:
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: _how(code) for rank, code in codes.items() if code is not None}

    def where(self, rank: int) -> str:
        return f"host {self._host}, pid {self._processes[rank].pid}"

    def state(self, rank: int) -> str:
        return process_state(self._processes[rank].pid)

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def serve(self) -> None:
        """Nobody else has to be told."""

    def end(self, cause: str = "") -> None:
        for process in self._processes.values():  # a rank has nothing to lose
            process.kill()
        deadline = time.monotonic() + END_SECONDS
        for rank, process in self._processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except (
                subprocess.TimeoutExpired
            ):  # it sleeps in the kernel: a driver that hangs, a file server that is gone
                logger.error("rank %d (%s) does not end, not even killed: %s", rank, self.where(rank), self.state(rank))
            if process.stdin is not None:
                process.stdin.close()


def process_state(pid: int) -> str:
    """What a process of this host does; see `roster.Launched`."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return {"T": "stopped", "t": "stopped", "R": "running", "D": "running"}.get(letter, "waiting")


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    known = -code in {number.value for number in signal.Signals}
    return f"signal {signal.Signals(-code).name if known else -code}"
