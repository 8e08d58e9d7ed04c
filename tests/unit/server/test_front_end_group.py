"""The number of front end processes on each host: while they load, after one has died, through an upgrade, and when a
host joins and leaves."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

import pytest

from serve_llm.common.errors import OptionError
from serve_llm.common.options.sources import make_options
from serve_llm.server.assemble import assemble
from serve_llm.server.front_ends import host as host_module
from serve_llm.server.front_ends.group import FrontEndGroup
from serve_llm.server.front_ends.host import FrontEndHost
from serve_llm.server.front_ends.messages import Drain, Loaded
from serve_llm.server.front_ends.process import FrontEndProcess


class FakeProcess(FrontEndProcess):
    """Ends when it is killed or drained."""

    def __init__(self, number: int, revision: int, _: socket.socket | None = None) -> None:
        super().__init__(number, revision)
        self.pid = number
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


class FakeHost(FrontEndHost):
    name = "other"
    has_own_clock = True

    def launch(self, number: int, revision: int) -> FrontEndProcess:
        return FakeProcess(number, revision)


@pytest.fixture(autouse=True)
def fake_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "LocalFrontEnd", FakeProcess)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def load(group: FrontEndGroup) -> None:
    """Let processes load, the oldest first, until none is missing."""
    while loading := [(host, one) for host, one in group.processes if one.phase == "loading"]:
        assert len(group.processes) <= 4 * len(group._hosts), "two serve, one is in reserve, and one drains"
        mark_loaded(group, *loading[0])
        await settle()


def mark_loaded(group: FrontEndGroup, host: FrontEndHost, process: FrontEndProcess) -> None:
    process.relay = process.relay or object()  # type: ignore[assignment]
    group._receive(host, process, Loaded())
    process.relay = None


def count_phases(group: FrontEndGroup, name: str | None = None) -> Counter[tuple[str, int]]:
    return Counter((one.phase, one.revision) for host, one in group.processes if host.name == name)


async def serve(group: FrontEndGroup) -> None:
    await settle()
    for host, process in group.processes:
        mark_loaded(group, host, process)
    group._is_serving = True
    group.advance()
    await load(group)


def test_one_is_in_reserve_after_crashes_and_after_an_upgrade() -> None:
    async def scenario() -> None:
        with socket.socket() as listener:
            group = FrontEndGroup(make_options("demo", front_ends=2), listener)
            await serve(group)
            assert count_phases(group) == {("serving", 0): 2, ("spare", 0): 1}
            for _, process in group.processes[:2]:
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


def test_the_old_spare_is_in_reserve_until_new_code_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A serving process may die during an upgrade, and the new code may fail to load."""
    monkeypatch.setattr(host_module, "FIRST_PAUSE", 3600.0)

    async def scenario() -> None:
        with socket.socket() as listener:
            group = FrontEndGroup(make_options("demo", front_ends=2), listener)
            await serve(group)
            group.upgrade()
            await settle()
            assert count_phases(group) == {("serving", 0): 2, ("spare", 0): 1, ("loading", 1): 1}
            group.processes[-1][1].kill()  # it fails to load
            await settle()
            group.processes[0][1].kill()
            await settle()
            assert count_phases(group) == {("serving", 0): 2} and group.counts.num_restarts == 1
            for _ in range(2):  # after it has been fixed
                group.upgrade()
            await settle()
            await load(group)
            assert count_phases(group) == {("serving", 3): 2, ("spare", 3): 1}
            await group.stop()

    asyncio.run(scenario())


def test_an_upgrade_during_the_start_waits_until_front_ends_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrontEndGroup, "_send_state", lambda self: None)

    async def scenario() -> None:
        with socket.socket() as listener:
            group = FrontEndGroup(make_options("demo", front_ends=2), listener)
            for _ in range(2):
                group.upgrade()
            await settle()
            for host, process in group.processes:
                mark_loaded(group, host, process)
            assert count_phases(group) == {("spare", 0): 2}
            serving = asyncio.ensure_future(group.serve())
            await settle()
            await load(group)
            assert count_phases(group) == {("serving", 1): 2, ("spare", 1): 1}
            serving.cancel()
            await group.stop()

    asyncio.run(scenario())


def test_each_host_has_its_own_processes() -> None:
    async def scenario() -> None:
        with socket.socket() as listener:
            group = FrontEndGroup(make_options("demo", front_end_addr="127.0.0.1:1", cluster_secret="s"), listener)
            await serve(group)
            assert group.processes == [] and group.counts.num_serving == 1, "the server process answers clients"
            other = FakeHost(2, "/there")
            group.add_host(other)
            group.advance()
            await settle()
            await load(group)
            assert count_phases(group, "other") == {("serving", 0): 2, ("spare", 0): 1}
            assert group.counts.num_serving == 3
            group.upgrade()
            await settle()
            await load(group)
            assert count_phases(group, "other") == {("serving", 1): 2, ("spare", 1): 1}
            other.processes[0].kill()
            await settle()
            await load(group)
            assert count_phases(group, "other") == {("serving", 1): 2, ("spare", 1): 1}
            assert group.counts.num_restarts == 1
            other.num_wanted = 0
            group.advance()
            await settle()
            assert other.processes == [] and group.counts.num_serving == 1 and group.counts.num_restarts == 1
            group.remove_host(other)
            await group.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("option", [{"front_ends": 2}, {"front_end_addr": "127.0.0.1:1", "cluster_secret": "s"}])
def test_only_the_daemon_has_front_ends(option: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=r"^--front-end\S+: only the server that `serve-llm MODEL` starts has"):
        asyncio.run(assemble(make_options("demo", **option)))
