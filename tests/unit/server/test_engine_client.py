"""The Ray cluster that the client reports to the engine, and the channel to it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from serve_llm.common import messages
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, FinishReason, Sampling, SchedulerStats
from serve_llm.server.engines.client import EngineClient, _ray_cluster
from serve_llm.server.metrics.meter import Clock, Meter
from support.fakes import make_model_info


class FakeRay:
    """The parts of the ray module that are used. group: id of the current placement group."""

    def __init__(self, connected: bool, group: bytes | None = None) -> None:
        self.connected = connected
        current = None if group is None else SimpleNamespace(id=SimpleNamespace(hex=group.hex))
        self.util = SimpleNamespace(get_current_placement_group=lambda: current)

    def is_initialized(self) -> bool:
        return self.connected

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(gcs_address="10.0.0.1:6379")


def test_without_ray_there_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert _ray_cluster() is None
    assert "ray" not in sys.modules
    monkeypatch.setitem(sys.modules, "ray", FakeRay(connected=False))  # type: ignore[arg-type]
    assert _ray_cluster() is None


def test_the_cluster_and_placement_group_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay(connected=True))  # type: ignore[arg-type]
    assert _ray_cluster() == messages.RayCluster("10.0.0.1:6379", None)
    monkeypatch.setitem(sys.modules, "ray", FakeRay(connected=True, group=b"\x41\x30"))  # type: ignore[arg-type]
    assert _ray_cluster() == messages.RayCluster("10.0.0.1:6379", "4130")


class Peer:
    """The engine's end of a client's channel, in this thread."""

    def __init__(self, client: EngineClient) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.connect(client.address)

    def receive(self) -> messages.ToEngine:
        return messages.decode_to_engine(self._socket.recv())

    def send(self, message: messages.FromEngine) -> None:
        self._socket.send(messages.encode(message))

    def close(self) -> None:
        self._context.destroy(linger=0)


def test_messages_in_both_directions_arrive_in_order() -> None:
    """The first one is sent before the engine has connected, and later ones while others arrive."""
    requests = [
        EngineCoreRequest(id=index, prompt_ids=[1], sampling=Sampling(max_tokens=1, seed=0)) for index in range(300)
    ]
    delivered: list[int] = []

    def serve(peer: Peer) -> list[int]:
        assert isinstance(peer.receive(), messages.Start)
        peer.send(messages.EngineReady(make_model_info()))
        submitted: list[int] = []
        while len(submitted) < len(requests):
            message = peer.receive()
            assert isinstance(message, messages.Submit)
            submitted += [request.id for request in message.requests]
            outputs = [EngineCoreOutput(request.id, [], FinishReason.LENGTH) for request in message.requests]
            peer.send(messages.EngineCoreOutputs(outputs, SchedulerStats()))
        return submitted

    async def run() -> list[int]:
        client = EngineClient(Meter(Clock()))
        starting = asyncio.ensure_future(client.start(make_options("demo", device="cpu"), "/model"))
        await asyncio.sleep(0)  # it has sent its message
        peer = Peer(client)
        serving = asyncio.ensure_future(asyncio.to_thread(serve, peer))
        await starting
        running = asyncio.ensure_future(client.run())
        for request in requests:
            client.submit_many([(request, lambda output: delivered.append(output.id))])
            if request.id % 7 == 0:
                await asyncio.sleep(0)
        submitted = await serving
        while len(delivered) < len(requests):
            await asyncio.sleep(0)
        running.cancel()
        peer.close()
        client.close()
        return submitted

    submitted = asyncio.run(asyncio.wait_for(run(), 60))
    assert submitted == delivered == list(range(300))


def test_requests_of_one_turn_of_the_event_loop_are_sent_in_one_message() -> None:
    """One that cannot be encoded disturbs no other, and an Abort follows what it aborts."""
    sampling = Sampling(max_tokens=1, seed=0)
    good = [EngineCoreRequest(id=index, prompt_ids=[1], sampling=sampling) for index in range(3)]
    bad = EngineCoreRequest(id=3, prompt_ids=[1], sampling=sampling, cache_salt="\ud800")

    async def run() -> None:
        client = EngineClient(Meter(Clock()))
        peer = Peer(client)
        for request in good[:2]:
            client.submit_many([(request, lambda output: None)])
        with pytest.raises(UnicodeEncodeError):
            client.submit_many([(bad, lambda output: None)])
        await asyncio.sleep(0)
        client.submit_many([(good[2], lambda output: None)])
        client.abort([2])
        received = [await asyncio.to_thread(peer.receive) for _ in range(3)]
        assert received == [messages.Submit(good[:2]), messages.Submit(good[2:]), messages.Abort([2])]
        client.submit_many([(good[0], lambda output: None)])
        client.close()
        await asyncio.sleep(0)
        peer.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_message_that_cannot_be_sent_yet_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq may notice that the engine is gone only after it has reported that a message can be sent."""

    async def run() -> None:
        client = EngineClient(Meter(Clock()))
        send = client._socket.send
        num_calls = 0

        def fail_once(data: bytes, flags: int) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                raise zmq.Again
            send(data, flags)

        monkeypatch.setattr(client._socket, "send", fail_once)
        peer = Peer(client)
        request = EngineCoreRequest(id=1, prompt_ids=[1], sampling=Sampling(max_tokens=1, seed=0))
        client.submit_many([(request, lambda output: None)])
        while num_calls < 2:
            client._exchange()
            await asyncio.sleep(0)
        message = await asyncio.to_thread(peer.receive)
        assert isinstance(message, messages.Submit) and [request.id for request in message.requests] == [1]
        peer.close()
        client.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_client_may_be_closed_twice() -> None:
    async def run() -> None:
        client = EngineClient(Meter(Clock()))
        client.close()
        client.close()
        assert not Path(client.directory).exists()

    asyncio.run(run())
