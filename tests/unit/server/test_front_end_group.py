"""How many front end processes there are: while they load, after one has ended, and through an upgrade."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from serve_llm.common.options.sources import make_options
from serve_llm.server.front_ends import group as group_module
from serve_llm.server.front_ends.group import FrontEndGroup
from serve_llm.server.front_ends.messages import Drain, Loaded


class FakeProcess:
    """Ends when it is killed or drained."""

    def __init__(self, number: int, revision: int, _: socket.socket) -> None:
        self.number = self.pid = number
        self.revision = revision
        self.phase = "loading"
        self.is_connected = False
        self.relay: Any = SimpleNamespace(close=lambda: None)
        self._ended = asyncio.Event()

    async def connect(self, _: object) -> None: ...

    async def wait(self) -> str:
        await self._ended.wait()
        return "exit code 0"

    def send(self, message: object) -> None:
        if isinstance(message, Drain):
            self.kill()

    def kill(self) -> None:
        self._ended.set()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def load(group: FrontEndGroup) -> None:
    """Let processes load, the oldest first, until none is missing."""
    while loading := [one for one in group.processes if one.phase == "loading"]:
        assert len(group.processes) <= 4, "two serve, one is in reserve, and one drains"
        group._receive(loading[0], Loaded())
        await settle()


def count_phases(group: FrontEndGroup) -> Counter[tuple[str, int]]:
    return Counter((one.phase, one.revision) for one in group.processes)


def test_one_is_in_reserve_after_crashes_and_after_an_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "FrontEndProcess", FakeProcess)

    async def scenario() -> None:
        with socket.socket() as listener:
            group = FrontEndGroup(make_options("demo", front_ends=2), listener)
            await settle()
            for process in list(group.processes):
                group._receive(process, Loaded())
            group._is_serving = True
            group._advance()
            await load(group)
            assert count_phases(group) == {("serving", 0): 2, ("spare", 0): 1}
            for process in group.processes[:2]:
                process.kill()
            await settle()
            await load(group)
            assert count_phases(group) == {("serving", 0): 2, ("spare", 0): 1}
            group.upgrade()
            await settle()
            await load(group)
            assert count_phases(group) == {("serving", 1): 2, ("spare", 1): 1}
            assert group.counts.num_restarts == 2
            await group.stop()
            assert group.processes == []

    asyncio.run(scenario())
