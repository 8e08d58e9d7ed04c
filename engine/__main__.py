"""The engine process: `python -P -m serve_llm.engine --connect ipc://...`, started by the server, never by hand.

Its standard input is the parent-death pipe: the parent holds the other end, so this process ends when the parent does.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import zmq

from serve_llm.common import messages
from serve_llm.common.errors import EngineError, ServeError
from serve_llm.common.heartbeat import Heartbeat, heartbeat_path
from serve_llm.common.open_files import raise_limit
from serve_llm.engine import loop
from serve_llm.engine.config import Config
from serve_llm.engine.parallel.dp_sync import DPStepSync
from serve_llm.engine.startup import start_engine

logger = logging.getLogger("serve_llm.engine.__main__")  # also when run by -m

LINGER_MS = 5000  # time to deliver the last message on a busy machine; if the server ends, so does this process


class ZmqChannel:
    """See `loop.ServerChannel`: a PAIR socket to the server."""

    def __init__(self, address: str) -> None:
        # Its own context: `close` waits for this socket alone.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # never drop messages; the server's admission control bounds the number of requests
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def wake_for(self, socket: zmq.Socket[bytes]) -> None:
        """Make `receive` also return when this socket becomes readable."""
        self._poller.register(socket, zmq.POLLIN)

    def receive(self, seconds: float | None) -> list[messages.ToEngine | messages.MalformedRequest]:
        timeout = None if seconds is None else int(seconds * 1000)
        if timeout != 0:
            self._poller.poll(timeout)
        received: list[messages.ToEngine | messages.MalformedRequest] = []
        while self._socket.poll(0):
            received += messages.read_to_engine(self._socket.recv())
        return received

    def send(self, message: messages.FromEngine) -> None:
        self._socket.send(messages.encode(message))

    def close(self) -> None:
        """Wait until the server's socket has all messages, but not longer than LINGER_MS."""
        self._context.destroy(linger=LINGER_MS)


def _end_with_parent(directory: Path) -> None:
    """Wait on the parent-death pipe, then end this process and its workers. directory: of the parent's sockets."""
    while os.read(0, 4096):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # including its workers, because a stopped worker would not notice
    os._exit(EngineError.exit_code)


def serve(channel: ZmqChannel, heartbeat: Heartbeat, directory: Path) -> None:
    """Start the engine that the server asks for, send EngineReady, and run the loop until Shutdown.

    directory: of the server's sockets, which removes it however this process ends.
    """
    (start,) = channel.receive(None)[:1]
    assert isinstance(start, messages.Start)

    def join_step_sync(config: Config) -> DPStepSync:
        assert start.meeting is not None
        sync = DPStepSync(Path(start.meeting), start.engine, config.data_parallel_size)
        channel.wake_for(sync.socket)
        return sync

    with contextlib.ExitStack() as resources:
        shares_steps = start.meeting is not None
        core, info = start_engine(start, resources, heartbeat.show, join_step_sync if shares_steps else None, directory)
        channel.send(messages.EngineReady(info))
        gc.freeze()  # otherwise each full collection traverses all modules, which takes longer than a step
        loop.run(core, channel)


def main() -> int:
    # The terminal sends Ctrl-C to the whole group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise_limit()  # in a program that uses `LLM`; the server has done it
    address = sys.argv[sys.argv.index("--connect") + 1]
    directory = heartbeat_path(address).parent
    threading.Thread(target=_end_with_parent, args=(directory,), daemon=True).start()
    heartbeat = Heartbeat(heartbeat_path(address))
    threading.Thread(target=heartbeat.beat, daemon=True).start()
    with contextlib.closing(ZmqChannel(address)) as channel:
        try:
            serve(channel, heartbeat, directory)
        except ServeError as error:
            channel.send(messages.Failed.from_exception(error))
            return error.exit_code
        except Exception as error:
            logger.exception("engine failed")
            channel.send(messages.Failed("EngineError", f"the engine failed: {type(error).__name__}: {error}"))
            return EngineError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
