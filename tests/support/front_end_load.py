"""Clients that send requests one by one, and a record of which front end process had which connection."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from support.daemon import Daemon

BODY = {"model": "demo", "temperature": 0, "ignore_eos": True}


@dataclass
class Load:
    """The outcome of one run. lost: the local port of each connection that ended during a request, and why."""

    expected: dict[int, str]  # max_tokens -> the text
    num_answered: int = 0
    lost: list[tuple[int, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, max_tokens: int, text: str) -> None:
        with self._lock:
            self.num_answered += 1
            if text != self.expected[max_tokens]:
                self.wrong.append(f"{max_tokens} tokens: {text!r}")

    def lose(self, port: int, error: Exception) -> None:
        with self._lock:
            self.lost.append((port, repr(error)))


class Clients:
    """A context manager: threads that send requests until the block ends, or until `num_requests` are answered."""

    def __init__(
        self,
        daemon: Daemon,
        number: int,
        lengths: tuple[int, ...],
        num_requests: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """lengths: values of max_tokens."""
        self._headers = {"content-type": "application/json"} | (headers or {})
        self._address = daemon.wait_until_serving().removeprefix("http://")
        self._lengths = lengths
        self._num_requests = num_requests
        self.load = Load({length: self._expect(length) for length in lengths})
        self._is_stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(number)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._num_requests is None:
            self._is_stopped.set()
        for thread in self._threads:
            thread.join(300)

    def wait_for(self, num_more: int) -> None:
        """Wait until the given number of further requests has been answered."""
        target = self.load.num_answered + num_more
        while self.load.num_answered < target and any(thread.is_alive() for thread in self._threads):
            time.sleep(0.01)

    def _expect(self, length: int) -> str:
        with contextlib.closing(http.client.HTTPConnection(self._address, timeout=60)) as connection:
            return self._complete(connection, length, stream=False)

    def _run(self, number: int) -> None:
        choose = random.Random(number)
        connection: http.client.HTTPConnection | None = None
        while not self._is_stopped.is_set() and self._is_needed():
            if connection is None:
                connection = http.client.HTTPConnection(self._address, timeout=60)
                connection.connect()
            port = connection.sock.getsockname()[1]
            length = choose.choice(self._lengths)
            try:
                self.load.answered(length, self._complete(connection, length, stream=choose.random() < 0.5))
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.load.lose(port, error)
                connection.close()
                connection = None
                continue
            if connection.sock is None or choose.random() < 0.3:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    def _is_needed(self) -> bool:
        return self._num_requests is None or self.load.num_answered < self._num_requests

    def _complete(self, connection: http.client.HTTPConnection, length: int, *, stream: bool) -> str:
        body = BODY | {"prompt": "def main():\n", "max_tokens": length, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
        with connection.getresponse() as answer:
            content = answer.read().decode()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {content[:300]}")
        if not stream:
            text: str = json.loads(content)["choices"][0]["text"]
            return text
        lines = content.split("\n\n")
        if lines[-2:] != ["data: [DONE]", ""]:
            raise ValueError(f"the stream has no end: {content[-300:]}")
        return "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2])


def read_status(daemon: Daemon, headers: dict[str, str] | None = None) -> dict[str, Any]:
    connection = http.client.HTTPConnection(daemon.wait_until_serving().removeprefix("http://"), timeout=60)
    connection.request("GET", "/status", headers=headers or {})
    with connection.getresponse() as answer:
        found: dict[str, Any] = json.loads(answer.read())
    connection.close()
    return found


def list_front_ends(daemon: Daemon, phase: str = "serving") -> list[int]:
    """Return the process ids of the front ends, oldest first."""
    return [one["pid"] for one in read_status(daemon)["front_ends"] if one["phase"] == phase]


def kill_front_end(pid: int) -> set[int]:
    """kill -9 a front end. Returns the client ports of its connections."""
    process = psutil.Process(pid)
    process.suspend()  # it must not accept any more
    ports = {one.raddr.port for one in process.net_connections("inet") if one.raddr}
    os.kill(pid, signal.SIGKILL)
    return ports
