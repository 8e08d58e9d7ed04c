"""The server's end of the wire to one engine process. Torch-free; asyncio.

Holds who waits for which output: every request has a sink, a plain function that is called in the event loop for each
Output until the final one. Knows nothing of text, HTTP or processes (`server.supervise` starts those).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence

import zmq
import zmq.asyncio

from serve_llm.engine import wire
from serve_llm.engine.errors import BY_NAME, EngineError, ServeError
from serve_llm.engine.options import Options
from serve_llm.engine.pulse import Pulse, beside
from serve_llm.engine.types import ModelFacts, Output, Request, Stats

Sink = Callable[[Output], None]


class EngineClient:
    """Make it inside a running event loop, in which all its methods are called."""

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="serve-llm-")  # mode 700: only this user reaches the socket
        self.address = f"ipc://{self.directory}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # sends never block; what is open is bounded by admission
        self._socket.linger = 0
        self._socket.bind(self.address)
        self.pulse = Pulse(beside(self.address), create=True)
        self._sinks: dict[int, Sink] = {}
        self._facts: ModelFacts | None = None
        self.stats = Stats()
        self.on_step: Callable[[wire.Step], None] | None = None
        self.failure: ServeError | None = None
        self.responds = True  # as far as whoever watches the pulse has seen

    @property
    def ready(self) -> bool:
        """A request submitted now would be computed."""
        return self._facts is not None and self.failure is None and self.responds

    @property
    def facts(self) -> ModelFacts:
        """What is true of the served model. Raises EngineError before the engine said so."""
        if self._facts is None:
            raise EngineError("the engine is still starting")
        return self._facts

    async def start(
        self,
        options: Options,
        directory: str,
        engine: int = 0,
        *,
        replaces: bool = False,
        meeting: str | None = None,
    ) -> None:
        """Tell a connected engine what to serve, which of several it is, whether it takes the place of one that has
        served, and where it meets others that it makes its steps with; wait until it is ready. Raises what it failed
        with."""
        self._send(wire.Start(options, directory, engine, _ray_cluster(), replaces, meeting))
        message = wire.decode_from_engine(await self._socket.recv())
        if isinstance(message, wire.Failed):
            self.failure = BY_NAME.get(message.kind, EngineError)(message.message)
            raise self.failure
        assert isinstance(message, wire.Ready)
        self._facts = message.facts

    async def run(self) -> None:
        """Hand out what the engine sends, until it fails (raises what it failed with) or this is cancelled."""
        while True:
            message = wire.decode_from_engine(await self._socket.recv())
            if isinstance(message, wire.Step):
                self._deliver(message)
            elif isinstance(message, wire.Failed):
                raise BY_NAME.get(message.kind, EngineError)(message.message)

    def _deliver(self, step: wire.Step) -> None:
        self.stats = step.stats
        if self.on_step is not None:
            self.on_step(step)
        for output in step.outputs:
            final = output.finish_reason is not None
            sink = self._sinks.pop(output.id, None) if final else self._sinks.get(output.id)
            if sink is not None:
                sink(output)

    def submit(self, request: Request, sink: Sink) -> None:
        self.submit_many([(request, sink)])

    def submit_many(self, pairs: Iterable[tuple[Request, Sink]]) -> None:
        """Open requests, in one message. If the engine is gone, nothing comes of it."""
        if self.failure is not None:
            return
        requests = []
        for request, sink in pairs:
            self._sinks[request.id] = sink
            requests.append(request)
        self._send(wire.Submit(requests))

    def abort(self, ids: Sequence[int]) -> None:
        """End requests; their sinks are not called again. Ids that have ended already are fine."""
        open_ids = [request_id for request_id in ids if self._sinks.pop(request_id, None) is not None]
        if open_ids and self.failure is None:
            self._send(wire.Abort(open_ids))

    def shut_down(self) -> None:
        """Ask the engine process to end."""
        self._send(wire.Shutdown())

    def fail(self, error: ServeError) -> None:
        """The engine is gone: no sink is called again, and no request is taken."""
        if self.failure is None:
            self.failure = error
        self._sinks = {}

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self.pulse.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _send(self, message: wire.ToEngine) -> None:
        self._socket.send(wire.encode(message))


def _ray_cluster() -> wire.RayCluster | None:
    """What this process, such as an actor of Ray Serve or Ray Data, is part of. Whoever is has imported Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not hasattr(ray, "is_initialized") or not ray.is_initialized():
        return None  # asking on would start a Ray
    address = getattr(ray.get_runtime_context(), "gcs_address", None)
    if address is None:
        return None  # through Ray's client, from a host that is no node
    group = ray.util.get_current_placement_group()
    return wire.RayCluster(address, group.id.hex() if group is not None else None)
