"""A real `serve-llm` process on a free port, its log, and what /metrics says."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil

from support.namespaces import Machine
from support.registered import DAEMONS

START_SECONDS = 300.0  # several ranks import torch on a machine that may be busy
SERVE_LLM = str(Path(sys.executable).with_name("serve-llm"))


class Daemon:
    """Starts at once; `wait_until_serving` returns the URL. A context manager that ends the process."""

    def __init__(
        self,
        *arguments: str,
        environ: dict[str, str] | None = None,
        folder: Path | None = None,
        machine: Machine | None = None,
    ) -> None:
        """folder: working directory. machine: where to run it, if not on this one."""
        command = [SERVE_LLM, *arguments, "--port", "0"]
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        env = inherited | (environ or {})
        self._machine = machine
        DAEMONS[self] = arguments
        if machine is not None:
            self.process = machine.popen(*command, env=env, stderr=subprocess.PIPE)
        else:
            self.process = subprocess.Popen(
                command, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True, cwd=folder
            )
        self.log: list[str] = []
        self.url = ""
        self._serving = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))
            if found := re.search(r"Serving .* on (https?://\S+)", line):
                self.url = found[1]
                self._serving.set()
        self._serving.set()  # it ended

    def wait_until_serving(self) -> str:
        assert self._serving.wait(START_SECONDS), "not serving in time:\n" + "\n".join(self.log)
        assert self.url, "the daemon ended:\n" + "\n".join(self.log)
        return self.url

    def wait_until_logged(self, pattern: str) -> re.Match[str]:
        """Wait for the first log line that matches the pattern, and return it."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            ended = not self._reader.is_alive()
            found = next((match for line in list(self.log) if (match := re.search(pattern, line))), None)
            if found is not None:
                return found
            assert not ended and time.monotonic() < deadline, f"no {pattern!r} in:\n" + "\n".join(self.log)
            time.sleep(0.05)

    def wait(self, seconds: float = 30.0) -> int:
        """Wait for the daemon to end by itself, and return the exit code."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def signal(self, number: signal.Signals) -> None:
        if self._machine is not None:
            self._machine.signal(self.process, number)
        else:
            self.process.send_signal(number)

    def engine_pids(self) -> list[int]:
        """Return the process ids of the engines, ordered by index."""
        found = []
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended just now
                if "serve_llm.engine" in Path(f"/proc/{child}/cmdline").read_text():
                    found.append(int(child))
        return found

    def engine_pid(self) -> int:
        (pid,) = self.engine_pids()
        return pid

    def rank_pids(self, starter: int | None = None) -> dict[int, int]:
        """Return rank -> its process. starter: process that started the ranks, if not the engine."""
        found = {}
        for process in psutil.Process(starter or self.engine_pid()).children():
            command = process.cmdline()
            if "serve_llm.engine.distributed.worker_main" in command:
                found[int(command[command.index("--rank") + 1])] = process.pid
        return found

    def metrics(self, engine: int | None = None) -> dict[str, float]:
        """Return samples of /metrics by name, of one engine if given; labels are dropped and values added up."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        samples: dict[str, float] = {}
        for line in lines:
            if not line.startswith("#") and (engine is None or f'engine="{engine}"' in line):
                name, value = line.split("{")[0].split(" ")[0], float(line.rpartition(" ")[2])
                samples[name] = samples.get(name, 0.0) + value
        return samples

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
