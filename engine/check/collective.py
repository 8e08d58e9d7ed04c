"""The all-reduce over all hosts: what a host is told, what it found, and the process that does it. Torch-free."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import msgspec

SMALL, LARGE = 16_384, 4 << 20  # bytes: a decode step of a few sequences, a long prompt


class Reduce(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a host is told: where all meet, and who it is."""

    address: str  # of the store
    port: int
    size: int  # number of hosts
    rank: int = 0
    own_address: str = ""
    interface: str = ""


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """What one host found. Empty error: the sums are exact."""

    backend: str
    error: str = ""
    small_us: float = 0.0  # median time of an all-reduce of SMALL bytes
    large: float = 0.0  # bytes per second of the tensor, for LARGE bytes
    transport: str = ""  # NCCL: see `nccl_log.MEANINGS`


class Process:
    """`all_reduce` on this host, started early because importing torch takes seconds."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-P", "-m", "serve_llm.engine.check.all_reduce", address]
        quiet = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # what torch says of host names is no finding
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def store_port(self, seconds: float) -> int:
        """Waits until torch is imported. Where the process has a store on the address, for all to meet if this is node
        0. 0 if the process ended or the time is over; `reduce` then says so."""
        return int(self._line(seconds) or 0)

    def reduce(self, task: Reduce, seconds: float) -> list[Collective]:
        """Take part in the all-reduce."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(task).decode() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return [Collective(backend="gloo", error="its process ended early")]
        line = self._line(seconds)
        if not line:
            return [Collective(backend="gloo", error=f"no end within {seconds:g} s")]
        return msgspec.json.decode(line, type=list[Collective])

    def _line(self, seconds: float) -> str:
        """The next line that the process writes; empty if it ends, which it is made to do when the time is over."""
        assert self._process.stdout is not None
        limit = threading.Timer(seconds, self._process.kill)
        limit.start()
        try:
            return self._process.stdout.readline().strip()
        finally:
            limit.cancel()
