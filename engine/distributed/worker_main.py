"""The program of one worker. The launcher starts it as `worker_main --connect ADDRESS --rank K`.

It connects to the executor, builds a `Worker`, and computes steps until the step channel is closed. Its standard input
is the parent-death pipe: the process ends when the process that started it does.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import zmq

from serve_llm.common import progress
from serve_llm.common.curve_zmq import BEAT_SECONDS, CurveClient, create_dealer
from serve_llm.common.errors import CapacityError, EngineError, ServeError
from serve_llm.common.logs import configure
from serve_llm.common.messages import Failed
from serve_llm.common.types import EPLBStats
from serve_llm.engine.distributed import messages
from serve_llm.engine.distributed.launcher import SECRET_VARIABLE
from serve_llm.engine.distributed.step_channels import ShmStepReceiver, SocketStepReceiver, StepReceiver
from serve_llm.engine.gpu_software import explain_unusable_gpus, read_gpu_software
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.parallel.shm import ChannelClosed
from serve_llm.engine.parallel.shm_ring import ShmRingBuffer

if TYPE_CHECKING:
    from serve_llm.engine.worker.pending_step import PendingStep
    from serve_llm.engine.worker.worker import Worker

POLL_SECONDS = 20e-6  # between two checks whether a step is finished or another one has arrived

logger = logging.getLogger("serve_llm.engine.distributed.worker_main")  # also when run by -m

T = TypeVar("T", messages.InitWorker, messages.AllocateCache)


class ControlConnection:
    """The worker's end of the control channel."""

    def __init__(self, url: str, rank: int, secret: str = "", address: str = "", directory: str | None = None) -> None:
        """Connect and send WorkerHello. secret, address, directory: for an engine that may be on another host; see
        `messages.build_hello`."""
        self.secret = secret
        self.address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = create_dealer(self._context, url, secret)
        self._socket.connect(url)
        self.send(messages.build_hello(rank, address, directory))

    def send(self, message: messages.FromRank) -> None:
        self._socket.send(messages.encode(message))

    def receive(self, kind: type[T]) -> T:
        """Wait for the next message, which the protocol says is of this kind."""
        message = messages.decode_to_rank(self._socket.recv())
        assert isinstance(message, kind), f"expected {kind.__name__}, not {message}"
        return message

    def set_up_channels(self) -> tuple[messages.InitWorker, object]:
        """Create the channels that the executor requests, until it sends InitWorker. Returns that message, and an
        object to keep alive as long as this worker runs."""
        message = messages.decode_to_rank(self._socket.recv())
        if isinstance(message, messages.SetupChannels):
            from serve_llm.engine.distributed.process_groups import create_channels

            reply, channels = create_channels(message, self.address)
            self.send(reply)
            return self.receive(messages.InitWorker), channels
        assert isinstance(message, messages.InitWorker)
        return message, None

    def close(self) -> None:
        """Wait at most two seconds until the last message has been sent, because torch's threads may abort at exit."""
        self._context.destroy(linger=2000)


def run(connection: ControlConnection, rank: int, directory: str | None = None) -> None:
    """Run the worker until the step channel is closed. directory: of the checkpoint, if not the engine's."""
    # These imports take seconds and are always needed, so they precede the wait for the executor.
    import torch

    from serve_llm.engine.distributed.process_groups import build_process_groups
    from serve_llm.engine.model.registry import apply_engine_config, read_model
    from serve_llm.engine.model.shard import build_rank_shard
    from serve_llm.engine.worker.worker import Worker

    init, channels = connection.set_up_channels()
    config = init.config if directory is None else replace(init.config, directory=directory)
    configure(init.log_level, f"rank {rank}", init.log_format)
    if init.logs_progress:
        progress.logger.setLevel(logging.INFO)
    if config.device == "cuda":
        if not torch.cuda.is_available():
            cause = explain_unusable_gpus(read_gpu_software()) or "look at nvidia-smi"
            raise CapacityError(f"torch finds no GPU on this host: {cause}")
        torch.cuda.set_device(init.device_index % torch.cuda.device_count())  # under Ray, a rank sees only its own GPU
    parallel = ParallelLayout(config.tensor_parallel_size, config.pipeline_parallel_size)
    groups = build_process_groups(parallel, rank, init, connection.address)
    receiver = open_step_receiver(connection, rank, init.steps)
    connection.send(messages.GroupsReady())

    draft = None
    if init.draft is not None:
        from serve_llm.engine.distributed.draft_shard import load_draft_shard

        draft = load_draft_shard(init.draft, config, parallel.tp_rank(rank), groups)
    spec, weights = read_model(json.loads(init.model), config.allow_unknown_config)
    spec = apply_engine_config(spec, config)
    worker = Worker(config, spec, weights, build_rank_shard(spec, config, rank), groups)
    connection.send(
        messages.LoadDone(
            worker.num_blocks,
            worker.weight_bytes,
            worker.threads,
            worker.num_slots,
            draft=None if draft is None else messages.DraftShard(draft.weight_bytes, draft.kv_cache_config),
        )
    )

    request = connection.receive(messages.AllocateCache)
    kv_cache_config = worker.allocate(request.num_blocks, request.num_slots)
    connection.send(messages.CacheReady(kv_cache_config, worker.host_memory))
    gc.freeze()  # otherwise each full collection traverses all modules, which takes longer than a step
    run_steps(
        worker,
        receiver,
        answers=rank == parallel.output_rank,
        report=lambda stats: connection.send(messages.ExpertsPlaced(stats)),
        draft=draft,
    )
    del channels  # other ranks may have used them until now


def open_step_receiver(
    connection: ControlConnection, rank: int, steps: messages.StepRings | messages.StepsUrl
) -> StepReceiver:
    """This rank's end of the step channel."""
    if isinstance(steps, messages.StepsUrl):
        return SocketStepReceiver(steps.url, connection.secret, rank)
    answers = ShmRingBuffer.open(steps.answers) if steps.answers is not None else None
    return ShmStepReceiver(ShmRingBuffer.open(steps.steps), steps.reader, answers)


def run_steps(
    worker: Worker,
    receiver: StepReceiver,
    answers: bool,
    report: Callable[[EPLBStats], None],
    draft: Worker | None = None,
) -> None:
    """Compute steps until the channel is closed, which raises ChannelClosed. On a GPU, the next step starts while the
    previous one is computed. answers: whether this rank sends results. report: called after experts were placed.
    draft: holds the rank's shard of a draft model."""
    import msgspec

    from serve_llm.engine.scheduler.output import SchedulerOutput

    decode = msgspec.msgpack.Decoder(SchedulerOutput).decode
    encode = msgspec.msgpack.Encoder().encode
    in_flight: deque[PendingStep] = deque()
    reported: EPLBStats | None = None
    while True:
        if in_flight and in_flight[0].is_ready():
            receiver.answer(encode(in_flight.popleft().finish()))
        elif not in_flight or receiver.ready:
            step = decode(receiver.receive())
            if step.is_for_draft_model and draft is None:
                continue  # it is on another stage
            pending = (draft if step.is_for_draft_model and draft is not None else worker).start(step, receiver.receive)
            if answers:
                in_flight.append(pending)
            stats = worker.eplb_stats
            if stats is not None and stats is not reported:
                report(stats)
                reported = stats
        else:
            time.sleep(POLL_SECONDS)


def end_with_engine(url: str, secret: str, rank: int) -> None:
    """Keep a heartbeat connection to the engine, and end this process when the engine is gone or unreachable.

    Run this in a thread of a worker that no process on its host watches."""
    line = CurveClient(url, secret)
    line.send(messages.encode(messages.WorkerAlive(rank)))
    try:
        while True:
            line.receive(BEAT_SECONDS)
    except ServeError as error:
        logger.error("rank %d ends: %s", rank, error)
        os._exit(EngineError.exit_code)


def _end_with_parent() -> None:
    """Wait on the parent-death pipe, then end this process."""
    while os.read(0, 4096):
        pass
    os._exit(EngineError.exit_code)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all; the server decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    parser = argparse.ArgumentParser()
    parser.add_argument("--connect", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--address", default="", help="address of this host, for ranks on others")
    parser.add_argument("--directory", help="directory of the checkpoint on this host")
    arguments = parser.parse_args()
    secret = os.environ.get(SECRET_VARIABLE, "")
    connection = ControlConnection(arguments.connect, arguments.rank, secret, arguments.address, arguments.directory)
    return serve(connection, arguments.rank, arguments.directory)


def serve(connection: ControlConnection, rank: int, directory: str | None) -> int:
    """Run the worker until it ends, and send Failed on an error. Returns the exit code."""
    try:
        run(connection, rank, directory)
    except ChannelClosed:
        return 0
    except Exception as error:
        if not isinstance(error, ServeError):
            logger.exception("rank %d failed", rank)
        connection.send(Failed.from_exception(error))
        return EngineError.exit_code
    finally:
        connection.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
