"""Publishes events of the prefix cache over ZeroMQ, in vLLM's message format (docs/kv-events.md)."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from typing import NamedTuple

import msgspec
import zmq

from serve_llm.common.errors import OptionError
from serve_llm.common.options.kv_events import KVEventsConfig
from serve_llm.engine.scheduler.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

POLL_SECONDS = 0.05  # interval between checks for replay requests while there is nothing to send
END = (-1).to_bytes(8, "big", signed=True)  # sent instead of a number after the last batch of a replay

logger = logging.getLogger(__name__)


class _Numbered(NamedTuple):
    number: int
    batch: KVEventBatch


class KVEventPublisher:
    """A thread that owns the sockets. Batches are numbered from 0; a gap means that a batch was lost."""

    def __init__(self, config: KVEventsConfig, engine: int) -> None:
        """engine: index of the data-parallel engine. Raises OptionError if an address cannot be used."""
        self._engine = engine
        self._topic = config.topic.encode()
        self._queue: queue.Queue[_Numbered | None] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._num_batches = 0
        self._has_warned = False
        self._encode = msgspec.msgpack.Encoder().encode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(config.hwm)
        self._replies: zmq.Socket[bytes] | None = None
        try:
            endpoint = offset_endpoint(config.endpoint, engine)
            if endpoint.startswith("tcp://") and "*" not in endpoint and "::" not in endpoint:
                self._publisher.connect(endpoint)
            else:
                self._publisher.bind(endpoint)
            if config.replay_endpoint is not None:
                endpoint = offset_endpoint(config.replay_endpoint, engine)
                self._replies = self._context.socket(zmq.ROUTER)
                self._replies.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OptionError(f"--kv-events-config: {endpoint}: {error}") from None
        logger.info("Events of the KV cache are published at %s", offset_endpoint(config.endpoint, engine))
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        """Send the events of a step, if any. Never waits: if the queue is full, the batch is lost."""
        if not events:
            return
        batch = KVEventBatch(time.time(), events, self._engine)
        try:
            self._queue.put_nowait(_Numbered(self._num_batches, batch))
        except queue.Full:
            if not self._has_warned:
                logger.warning("--kv-events-config: max_queue_size is reached, so that batches of events are lost")
            self._has_warned = True
        self._num_batches += 1

    def close(self) -> None:
        """Send the queued batches and end the thread."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(timeout=2.0)
        self._context.destroy(linger=200)

    def _run(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                numbered = self._queue.get(timeout=POLL_SECONDS)
                if numbered is None:
                    return
                self._send(numbered)
            if self._replies is not None and self._replies.poll(0):
                self._replay(self._replies)

    def _send(self, numbered: _Numbered) -> None:
        number, batch = numbered
        payload = self._encode(batch)
        self._publisher.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self._kept.append((number, payload))

    def _replay(self, replies: zmq.Socket[bytes]) -> None:
        """Answer a replay request: its last frame is the first number wanted. Batches that are no longer kept are left
        out."""
        *envelope, wanted = replies.recv_multipart()
        if len(envelope) != 2 or len(wanted) != 8:
            logger.warning("--kv-events-config: a request to replay events is not one number of 8 bytes")
            return
        first = int.from_bytes(wanted, "big")
        for number, payload in self._kept:
            if number >= first:
                replies.send_multipart((*envelope, number.to_bytes(8, "big"), payload))
        replies.send_multipart((*envelope, END, b""))


def offset_endpoint(endpoint: str, engine: int) -> str:
    """The address of a data-parallel engine: the port plus its index, or the name with a suffix."""
    if not engine:
        return endpoint
    if endpoint.startswith("tcp://"):
        address, _, port = endpoint.rpartition(":")
        return f"{address}:{int(port) + engine}"
    return f"{endpoint}_dp{engine}"
