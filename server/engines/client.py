"""The server's end of the ZeroMQ channel to one engine process.

Every request has a sink: a plain function that is called in the event loop with each `EngineCoreOutput` up to the final
one.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec
import zmq

from serve_llm.common import messages
from serve_llm.common.errors import EngineError, ServeError
from serve_llm.common.heartbeat import Heartbeat, heartbeat_path
from serve_llm.common.options.schema import Options
from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, ModelInfo, SchedulerStats
from serve_llm.server.metrics.meter import Meter

Sink = Callable[[EngineCoreOutput], None]

# One for all engines of this process: without files or threads for a further context, libzmq ends the process, while it
# reports that it has none for a further socket.
_CONTEXT: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)  # zmq's own constants are flags, which take longer to compare


class EngineClient:
    """Create and use it inside one running event loop."""

    def __init__(self, meter: Meter) -> None:
        """meter: counts the engine's steps and advances the clock. Raises OSError or ZMQError if there is no room for
        further files."""
        with contextlib.ExitStack() as on_failure:
            self.directory = tempfile.mkdtemp(prefix="serve-llm-")  # mode 700: only this user can connect
            on_failure.callback(shutil.rmtree, self.directory, ignore_errors=True)
            self.address = f"ipc://{self.directory}/engine"
            self.heartbeat = Heartbeat(heartbeat_path(self.address), create=True)
            on_failure.callback(self.heartbeat.close)
            self._socket = _CONTEXT.socket(zmq.PAIR)
            on_failure.callback(self._socket.close)
            self._socket.linger = 0
            self._socket.set_hwm(0)  # sends to a connected engine never block; admission bounds the open requests
            self._socket.bind(self.address)
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._on_readable)
            on_failure.pop_all()
        self._unsubmitted: list[msgspec.Raw] = []  # requests of this event-loop iteration, not sent yet
        self._unsent: deque[bytes] = deque()  # until the engine is connected
        self._received: deque[bytes] = deque()  # until they are handled
        self._has_received = asyncio.Event()  # for `start`
        self._ended: asyncio.Future[None] | None = None  # done when `run` has ended; None before it begins
        self._sinks: dict[int, Sink] = {}
        self._model_info: ModelInfo | None = None
        self.meter = meter
        self.stats = SchedulerStats()
        self.failure: ServeError | None = None
        self.responds = True  # the heartbeat is advancing; set by EngineProcess

    @property
    def ready(self) -> bool:
        """Whether a request submitted now would be computed."""
        return self._model_info is not None and self.failure is None and self.responds

    @property
    def model_info(self) -> ModelInfo:
        """What the engine has reported. Raises EngineError while the engine is starting."""
        if self._model_info is None:
            raise EngineError("the engine is still starting")
        return self._model_info

    async def start(
        self,
        options: Options,
        directory: str,
        engine: int = 0,
        *,
        replaces: bool = False,
        meeting: str | None = None,
    ) -> None:
        """Send the options to a connected engine and wait until it is ready. Raises the engine's ServeError if it
        fails.

        directory: the local checkpoint. engine: index among the data-parallel engines. replaces: engines have served
        before. meeting: directory where engines that step together find each other.
        """
        self._send(messages.Start(options.for_engine(), directory, engine, _ray_cluster(), replaces, meeting))
        await self._has_received.wait()
        message = messages.decode_from_engine(self._received.popleft())
        if isinstance(message, messages.Failed):
            self.failure = message.to_exception()
            raise self.failure
        assert isinstance(message, messages.EngineReady)
        self._model_info = message.model_info

    async def run(self) -> None:
        """Deliver outputs until cancelled. Raises the engine's ServeError if it fails."""
        self._ended = asyncio.get_running_loop().create_future()
        self._handle_received()
        await self._ended

    def _deliver(self, step: messages.EngineCoreOutputs) -> None:
        self.stats = step.stats
        self.meter.count_step(step.stats)
        for output in step.outputs:
            is_final = output.finish_reason is not None
            sink = self._sinks.pop(output.id, None) if is_final else self._sinks.get(output.id)
            if sink is not None:
                sink(output)

    def submit_many(self, pairs: Iterable[tuple[EngineCoreRequest, Sink]]) -> None:
        """Open requests. Those submitted in the same iteration of the event loop are sent in one message, so that they
        can start in the same step. Does nothing if the engine is gone."""
        if self.failure is not None:
            return
        if not self._unsubmitted:
            asyncio.get_running_loop().call_soon(self._submit)
        for request, sink in pairs:
            encoded = msgspec.Raw(messages.encode(request))
            self._sinks[request.id] = sink
            self._unsubmitted.append(encoded)

    def _submit(self) -> None:
        if self._unsubmitted:
            requests = self._unsubmitted
            self._unsubmitted = []
            self._send(messages.EncodedSubmit(requests))

    def abort(self, ids: Sequence[int]) -> None:
        """Abort requests; their sinks are not called again. Ignores ids that have already ended."""
        open_ids = [request_id for request_id in ids if self._sinks.pop(request_id, None) is not None]
        if open_ids and self.failure is None:
            self._submit()
            self._send(messages.Abort(open_ids))

    def shut_down(self) -> None:
        """Ask the engine process to exit."""
        self._send(messages.Shutdown())

    def fail(self, error: ServeError) -> None:
        """Mark the engine as gone: call no sink again and accept no requests. Keeps the first error."""
        if self.failure is None:
            self.failure = error
        self._sinks = {}
        self._unsubmitted = []

    def close(self) -> None:
        """Idempotent."""
        if self._socket.closed:
            return
        self._unsubmitted = []
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self.heartbeat.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _send(self, message: messages.ToEngine | messages.EncodedSubmit) -> None:
        self._unsent.append(messages.encode(message))
        self._exchange()
        if self._received:
            asyncio.get_running_loop().call_soon(self._handle_received)

    def _on_readable(self) -> None:
        self._exchange()
        self._handle_received()

    def _handle_received(self) -> None:
        """Handle what has arrived while `run` runs. Called by the event loop, never by those who send, because sinks
        would be called while the caller changes the requests. Waking a task for each message would cost more."""
        if self._ended is None or self._ended.done():
            return
        try:
            while self._received and not self._ended.done():
                message = messages.decode_from_engine(self._received.popleft())
                if isinstance(message, messages.EngineCoreOutputs):
                    self._deliver(message)
                elif isinstance(message, messages.Failed):
                    raise message.to_exception()
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)

    def _exchange(self) -> None:
        """Send and receive what is possible now. The socket's descriptor becomes readable when that may have changed,
        but not for a change that a call has already noticed, so this ends only when nothing more is possible."""
        while True:
            events = int(self._socket.get(zmq.EVENTS))
            if events & POLLIN:
                self._received.append(self._socket.recv(zmq.NOBLOCK))
                self._has_received.set()
            elif events & POLLOUT and self._unsent:
                try:
                    self._socket.send(self._unsent[0], zmq.NOBLOCK)
                except zmq.Again:  # the engine has just gone, which the events show from now on
                    continue
                self._unsent.popleft()
            else:
                return


def _ray_cluster() -> messages.RayCluster | None:
    """Find the Ray cluster that this process, such as a Ray Serve or Ray Data actor, belongs to. None if Ray is not
    imported."""
    ray = sys.modules.get("ray")
    if ray is None or not hasattr(ray, "is_initialized") or not ray.is_initialized():
        return None  # the calls below would start a cluster
    address = getattr(ray.get_runtime_context(), "gcs_address", None)
    if address is None:
        return None  # connected through the Ray client from outside the cluster
    group = ray.util.get_current_placement_group()
    return messages.RayCluster(address, group.id.hex() if group is not None else None)
