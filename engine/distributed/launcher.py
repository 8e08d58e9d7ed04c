"""Starts workers as processes on this host and watches them. Must not import torch, so that the workers start
immediately."""

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

from serve_llm.common.library_variables import set_library_defaults
from serve_llm.engine.worker.cpu_threads import count_usable_cores

logger = logging.getLogger(__name__)

END_SECONDS = 5.0  # time for killed processes to exit
MANY_RANKS = 4  # ranks per core; fewer may be an experiment, more are a mistake

SECRET_VARIABLE = "SERVE_LLM_CLUSTER_SECRET"  # all users of a host can read command lines


class WorkerLauncher:
    """See `LaunchedWorkers`."""

    def __init__(
        self,
        ranks: Sequence[int],
        url: str,
        *,
        secret: str = "",
        address: str = "",
        directory: str | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Start one process per rank. Each connects to `url` (ZeroMQ) and ends with this process: its standard input is
        the parent-death pipe.

        secret: of the engine's endpoint. address: of this host, for ranks on others. directory: of the checkpoint, if
        its path may differ from that on the engine's host. environ: environment of the processes, without the secret.
        """
        cores = count_usable_cores()
        if len(ranks) > MANY_RANKS * cores:
            logger.warning(
                "%d ranks on %d cores wait for each other from loading on; fewer are faster "
                "(--tensor-parallel-size, --pipeline-parallel-size)",
                len(ranks),
                cores,
            )
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._host = socket.gethostname()
        for rank in ranks:
            command = [sys.executable, "-P", "-m", "serve_llm.engine.distributed.worker_main"]
            command += ["--connect", url, "--rank", str(rank)]
            command += ["--address", address] if address else []
            command += ["--directory", directory] if directory is not None else []
            variables = {**environ, SECRET_VARIABLE: secret}
            set_library_defaults(variables)  # a node without an engine has not set them
            if rank != ranks[0]:
                variables["TQDM_DISABLE"] = "1"  # show only one progress bar
            self._processes[rank] = subprocess.Popen(command, stdin=subprocess.PIPE, env=variables)

    def find_ended(self) -> Mapping[int, str]:
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: _describe_exit(code) for rank, code in codes.items() if code is not None}

    def describe_place(self, rank: int) -> str:
        return f"host {self._host}, pid {self._processes[rank].pid}"

    def state(self, rank: int) -> str:
        return process_state(self._processes[rank].pid)

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def serve(self) -> None:
        """No other process needs to know."""

    def end(self, cause: str = "") -> None:
        for process in self._processes.values():  # workers have no state to save
            process.kill()
        deadline = time.monotonic() + END_SECONDS
        for rank, process in self._processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # it is blocked in the kernel, for example by a driver or a file server
                logger.error("rank %d (%s) survives SIGKILL: %s", rank, self.describe_place(rank), self.state(rank))
            if process.stdin is not None:
                process.stdin.close()


def process_state(pid: int) -> str:
    """Return the state of a process on this host; see `LaunchedWorkers.state`."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return {"T": "stopped", "t": "stopped", "R": "running", "D": "running"}.get(letter, "waiting")


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    known = -code in {number.value for number in signal.Signals}
    return f"signal {signal.Signals(-code).name if known else -code}"
