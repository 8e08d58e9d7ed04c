"""Many hosts and ranks in one light process: they speak the real protocols of nodes, ranks and steps, and compute
nothing.

Run as a program by `start`; it ends when its standard input closes. A socket has one connection per node or rank: to
the other side, a ROUTER that connects is as many peers as it has connections.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from serve_llm.common.curve_zmq import BEAT_SECONDS, LOST_SECONDS, derive_key
from serve_llm.common.hosts import fingerprint, host_id
from serve_llm.engine.distributed import messages
from serve_llm.engine.distributed.multihost import messages as node_messages
from serve_llm.engine.distributed.shm_setup import HostSetup
from serve_llm.engine.distributed.step_channels import ShmStepReceiver
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.parallel.shm import ChannelClosed
from serve_llm.engine.parallel.shm_ring import ShmRingBuffer
from serve_llm.engine.scheduler.output import RunnerOutput, SchedulerOutput
from serve_llm.engine.worker.cpu_threads import CpuThreads
from serve_llm.engine.worker.kv_cache import KVCacheConfig

ADDRESS = "127.0.0.1"
SECRET = "s"
NUM_BLOCKS = 100
KV_CACHE_CONFIG = KVCacheConfig((), 4096, NUM_BLOCKS)


def start(
    directory: str, nnodes: int, url: str, *, nodes: Sequence[int] = (), ranks: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start the program for these nodes of `nnodes`, or for ranks on the caller's host. directory: of the checkpoint.
    url: of node 0's engine for nodes, of its control socket for ranks."""
    command = [sys.executable, "-m", "support.fake_hosts", directory, str(nnodes), url]
    command += ["--nodes", *map(str, nodes)] if nodes else ["--ranks", *map(str, ranks)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path})


class Lines:
    """A connection per number to the same URL."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], url: str) -> None:
        self._url = url
        self.socket = context.socket(zmq.ROUTER)
        self.socket.set_hwm(0)
        if url.startswith("tcp://"):
            key = derive_key(SECRET)
            self.socket.curve_secretkey = key.secret
            self.socket.curve_publickey = key.public
            self.socket.curve_serverkey = key.public
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, int(BEAT_SECONDS * 1000))
            self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(LOST_SECONDS * 1000))

    def connect(self, number: int, first: bytes) -> None:
        self.socket.setsockopt(zmq.CONNECT_ROUTING_ID, b"%d" % number)
        self.socket.connect(self._url)
        self.send(number, first)

    def send(self, number: int, message: bytes) -> None:
        self.socket.send_multipart([b"%d" % number, message])


class FakeHosts:
    """The nodes, or only ranks on the engine's own host."""

    def __init__(self, directory: str, nnodes: int) -> None:
        self._nnodes = nnodes
        self._fingerprint = fingerprint(Path(directory))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._handlers: dict[object, Callable[[int, bytes], None]] = {}  # by socket
        self._node_lines: Lines | None = None
        self._rank_lines: Lines | None = None
        self._step_lines: Lines | None = None
        self._setups: list[HostSetup] = []  # kept alive
        self._reports: dict[int, bytes] = {}  # by node
        self._ranks: set[int] = set()
        self._output_rank = -1
        self._num_readers = 0  # ranks that read steps from their connection
        self._num_received = 0  # of these, how many have the current step

    def _open(self, url: str, handler: Callable[[int, bytes], None]) -> Lines:
        lines = Lines(self._context, url)
        self._poller.register(lines.socket, zmq.POLLIN)
        self._handlers[lines.socket] = handler
        return lines

    def join(self, url: str, nodes: Sequence[int]) -> None:
        self._node_lines = self._open(url, self._receive_on_node)
        lines = self._open(url, self._receive_directions)
        for node in nodes:
            lines.connect(
                node, node_messages.encode(node_messages.FindEngines(node, self._nnodes, f"h{node}", ADDRESS))
            )

    def _receive_directions(self, node: int, message: bytes) -> None:
        found = node_messages.decode_to_node(message)
        assert isinstance(found, node_messages.NodeEngines), found
        assert self._node_lines is not None
        self._node_lines.connect(node, node_messages.encode(node_messages.JoinRequest(0, node, f"h{node}", ADDRESS)))

    def _receive_on_node(self, node: int, message: bytes) -> None:
        order = node_messages.decode_to_node(message) if message else None
        if isinstance(order, node_messages.EndNode):
            os._exit(0)
        if isinstance(order, node_messages.RunRanks):
            statuses = {rank: node_messages.RankStatus(10000 + rank, "waiting", "") for rank in order.ranks}
            self._reports[node] = node_messages.encode(node_messages.NodeReport(statuses))
            self.start_ranks(order.url, order.ranks, f"h{node}")

    def start_ranks(self, url: str, ranks: Sequence[int], host: str = "") -> None:
        """host: name and id; "" for that of this process."""
        if self._rank_lines is None:
            self._rank_lines = self._open(url, self._receive_on_rank)
        self._ranks.update(ranks)
        for rank in ranks:
            hello = messages.WorkerHello(
                rank, host or "h0", host or host_id(), ADDRESS, 10000 + rank, self._fingerprint
            )
            self._rank_lines.connect(rank, messages.encode(hello))

    def _receive_on_rank(self, rank: int, message: bytes) -> None:
        received = messages.decode_to_rank(message)
        if isinstance(received, messages.SetupChannels):
            setup = HostSetup(ParallelLayout(received.tp_size, received.pp_size), received.ranks, received.step_bytes)
            self._setups.append(setup)
            rings = {one: setup.rings(one) for one in received.ranks}
            self._send(rank, messages.ChannelsReady(rings, int(received.host_store)))
        elif isinstance(received, messages.InitWorker):
            config = received.config
            self._output_rank = ParallelLayout(config.tensor_parallel_size, config.pipeline_parallel_size).output_rank
            self._open_steps(rank, received.steps)
            self._send(rank, messages.GroupsReady())
            self._send(rank, messages.LoadDone(NUM_BLOCKS, 1 << 30, CpuThreads(1, "1 core for 1 rank", 1, 1)))
        else:
            self._send(rank, messages.CacheReady(KV_CACHE_CONFIG))

    def _send(self, rank: int, message: messages.FromRank) -> None:
        assert self._rank_lines is not None
        self._rank_lines.send(rank, messages.encode(message))

    def _open_steps(self, rank: int, steps: messages.StepRings | messages.StepsUrl) -> None:
        if isinstance(steps, messages.StepRings):
            threading.Thread(target=self._read_ring, args=(rank, steps), daemon=True).start()
            return
        if self._step_lines is None:
            self._step_lines = self._open(steps.url, self._receive_step)
        self._num_readers += 1
        self._step_lines.connect(rank, str(rank).encode())

    def _receive_step(self, rank: int, step: bytes) -> None:
        """The rank that samples answers when all ranks of this process have the step."""
        self._num_received += 1
        if self._num_received == self._num_readers:
            self._num_received = 0
            if self._output_rank in self._ranks:
                assert self._step_lines is not None
                self._step_lines.send(self._output_rank, answer(step))

    def _read_ring(self, rank: int, steps: messages.StepRings) -> None:
        answers = ShmRingBuffer.open(steps.answers) if steps.answers is not None else None
        receiver = ShmStepReceiver(ShmRingBuffer.open(steps.steps), steps.reader, answers)
        try:
            while True:
                step = receiver.receive()
                if rank == self._output_rank:
                    receiver.answer(answer(step))
        except ChannelClosed:
            return

    def run(self) -> None:
        next_report = time.monotonic()
        while True:
            for socket, _ in self._poller.poll(100):
                assert isinstance(socket, zmq.Socket)
                while socket.poll(0):
                    number, message = socket.recv_multipart()
                    self._handlers[socket](int(number), message)
            if self._node_lines is not None and time.monotonic() >= next_report:
                next_report = time.monotonic() + BEAT_SECONDS
                for node, report in self._reports.items():
                    self._node_lines.send(node, report)


def answer(step: bytes) -> bytes:
    """The result of a step: for each sequence, the position of its token as its id."""
    scheduled = msgspec.msgpack.decode(step, type=SchedulerOutput).scheduled
    return msgspec.msgpack.encode([RunnerOutput(one.start) for one in scheduled])


def end_with_parent() -> None:
    os.read(0, 1)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("nnodes", type=int)
    parser.add_argument("url")
    parser.add_argument("--nodes", type=int, nargs="*")
    parser.add_argument("--ranks", type=int, nargs="*")
    given = parser.parse_args()
    threading.Thread(target=end_with_parent, daemon=True).start()
    hosts = FakeHosts(given.directory, given.nnodes)
    if given.nodes:
        hosts.join(given.url, given.nodes)
    else:
        hosts.start_ranks(given.url, given.ranks)
    hosts.run()


if __name__ == "__main__":
    main()
