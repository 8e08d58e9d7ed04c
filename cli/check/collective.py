"""The all-reduce over all hosts: its task, its result, and the process that runs it. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import msgspec

SMALL_BYTES = 16_384  # a decode step of a few sequences
LARGE_BYTES = 4 << 20  # a long prompt


class AllReduceTask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where the hosts meet, and this host's rank."""

    address: str  # where node 0's store listens
    port: int
    size: int  # number of hosts
    rank: int = 0
    own_address: str = ""
    interface: str = ""


class GpuRankTask(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's part of the all-reduce over all GPUs of all hosts."""

    address: str  # where node 0's store listens
    port: int
    own_address: str
    rank: int
    size: int
    device: int  # index among this host's GPUs


class AllReduceResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one host measured with one backend."""

    backend: str  # gloo or nccl
    error: str = ""  # empty if the sums are exact
    small_us: float = 0.0  # median microseconds for SMALL_BYTES
    large: float = 0.0  # bytes of the tensor per second, for LARGE_BYTES
    transport: str = ""  # NCCL only, between hosts; see `nccl_log.MEANINGS`
    local_transport: str = ""  # NCCL only, between the GPUs of this host


class AllReduceProcess:
    """Runs `all_reduce` on this host. Started early, because importing torch takes seconds."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-P", "-m", "serve_llm.cli.check.all_reduce", address]
        quiet = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # hides torch's warnings about host names
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=quiet)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_for_store(self, seconds: float) -> int:
        """Wait until torch is imported. Returns the port of the process's store; 0 if the process ended or timed out,
        which `all_reduce` then reports."""
        return int(self._read_line(seconds) or 0)

    def all_reduce(self, task: AllReduceTask, seconds: float) -> list[AllReduceResult]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(task).decode() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return [AllReduceResult(backend="gloo", error="its process ended early")]
        line = self._read_line(seconds)
        if not line:
            return [AllReduceResult(backend="gloo", error=f"did not finish within {seconds:g} s")]
        return msgspec.json.decode(line, type=list[AllReduceResult])

    def _read_line(self, seconds: float) -> str:
        """The next line that the process writes; empty if it ends. It is killed when the time is over."""
        assert self._process.stdout is not None
        limit = threading.Timer(seconds, self._process.kill)
        limit.start()
        try:
            return self._process.stdout.readline().strip()
        finally:
            limit.cancel()
