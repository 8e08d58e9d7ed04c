"""The program of one rank: `python -P -m serve_llm.engine.execute.rank --connect ADDRESS --rank K`, never by hand.

It speaks `control` to the executor that it connects to, builds its worker, and computes steps until it is told to end.
Its standard input is a pipe whose other end its starter holds: when that is gone, however it went, so is this.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import zmq

from serve_llm.engine.errors import BY_NAME, CapacityError, EngineError, ServeError
from serve_llm.engine.execute import control
from serve_llm.engine.execute.launch import SECRET_VARIABLE
from serve_llm.engine.execute.steps import RingSource, SocketSource, StepSource
from serve_llm.engine.logs import configure
from serve_llm.engine.parallel.encrypted import BEAT_SECONDS, Line, dealer
from serve_llm.engine.parallel.layout import Grid
from serve_llm.engine.parallel.ring import Ring
from serve_llm.engine.parallel.shm import Closed

if TYPE_CHECKING:
    from serve_llm.engine.execute.runner import Started
    from serve_llm.engine.execute.worker import Worker

LOOK_SECONDS = 20e-6  # between two looks at whether a step has been computed or another one has come

logger = logging.getLogger("serve_llm.engine.execute.rank")  # also when run by -m

T = TypeVar("T", control.Begin, control.Allocate)


class Control:
    """This rank's end of the control channel; knows which phase it is in."""

    def __init__(self, url: str, rank: int, secret: str = "", address: str = "", directory: str | None = None) -> None:
        """secret, address, directory: for an engine that may be on another host; see `control.hello`."""
        self.secret, self.address = secret, address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = dealer(self._context, url, secret)
        self._socket.connect(url)
        self._phase = control.PHASES[None]
        self.say(control.hello(rank, address, directory))

    def say(self, message: control.FromRank) -> None:
        self._phase = control.PHASES.get(type(message), self._phase)
        self._socket.send(control.encode(message))

    def hear(self, kind: type[T]) -> T:
        """The next message, which the protocol says is of this kind. Waits as long as the leash holds."""
        message = control.decode_to_rank(self._socket.recv())
        assert isinstance(message, kind), f"expected {kind.__name__}, not {message}"
        return message

    def wire(self) -> tuple[control.Begin, object]:
        """Make what the executor asks for, until it says Begin; and what must be kept as long as this rank runs."""
        kept = None
        message = control.decode_to_rank(self._socket.recv())
        if isinstance(message, control.Wire):
            from serve_llm.engine.execute.neighbours import make

            wired, kept = make(message, self.address)
            self.say(wired)
            return self.hear(control.Begin), kept
        assert isinstance(message, control.Begin)
        return message, kept

    def fail(self, error: Exception) -> None:
        """Says what happened, under the nearest class that the other side knows."""
        known = next((base.__name__ for base in type(error).__mro__ if base.__name__ in BY_NAME), None)
        self.say(control.Failed(self._phase, known or type(error).__name__, str(error)))

    def close(self) -> None:
        """Returns when the last message has gone out, or after two seconds: torch's threads may abort the exit."""
        self._context.destroy(linger=2000)


def run(link: Control, rank: int, directory: str | None = None) -> None:
    """From Begin to the end of the last step. directory: of the checkpoint, if not the engine's."""
    # What takes longest to import is needed in any case, so it is imported before there is word from the executor.
    import torch

    from serve_llm.engine.execute.neighbours import neighbours_of
    from serve_llm.engine.execute.worker import Worker
    from serve_llm.engine.model.registry import read_model, served
    from serve_llm.engine.model.shard import own_shard

    begin, kept = link.wire()
    config = begin.config if directory is None else replace(begin.config, directory=directory)
    configure(begin.log_level, f"rank {rank}")
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise CapacityError("torch finds no GPU on this host: is it built for CUDA, and the driver there?")
        torch.cuda.set_device(begin.device_index % torch.cuda.device_count())  # under Ray a rank sees its own only
    grid = Grid(config.tensor_parallel_size, config.pipeline_parallel_size)
    neighbours = neighbours_of(grid, rank, begin, link.address)
    source = open_steps(link, rank, begin.steps)
    link.say(control.Joined())
    spec, weights = read_model(json.loads(begin.model), config.allow_unknown_config)
    spec = served(spec, config)
    worker = Worker(config, spec, weights, own_shard(spec, config, rank), neighbours)
    link.say(control.Loaded(worker.num_blocks, worker.threads))
    layout = worker.allocate(link.hear(control.Allocate).num_blocks)
    link.say(control.Ready(layout))
    compute(worker, source, answers=rank == grid.output_rank)
    del kept  # rings and store: until now


def open_steps(link: Control, rank: int, steps: control.RingEnds | control.StepsUrl) -> StepSource:
    """This rank's end of the step channel."""
    if isinstance(steps, control.StepsUrl):
        return SocketSource(steps.url, link.secret, rank)
    answers = Ring.open(steps.answers) if steps.answers is not None else None
    return RingSource(Ring.open(steps.steps), steps.reader, answers)


def compute(worker: Worker, source: StepSource, answers: bool) -> None:
    """Steps, until the channel is closed. On a GPU the next one is begun while the last one is computed."""
    import msgspec

    from serve_llm.engine.schedule.batch import Batch

    decode = msgspec.msgpack.Decoder(Batch).decode
    encode = msgspec.msgpack.Encoder().encode
    begun: deque[Started] = deque()
    while True:
        if begun and begun[0].is_ready():
            source.answer(encode(begun.popleft().finish()))
        elif not begun or source.ready:
            started = worker.start(decode(source.receive()))
            if answers:
                begun.append(started)
        else:
            time.sleep(LOOK_SECONDS)


def end_with_engine(url: str, secret: str, rank: int) -> None:
    """For a rank that nobody on its host watches over, in a thread: tells the engine that it lives, and ends the
    process when the engine is gone or out of reach."""
    line = Line(url, secret)
    line.send(control.encode(control.Alive(rank)))
    try:
        while True:
            line.receive(BEAT_SECONDS)
    except ServeError as error:
        logger.error("rank %d ends: %s", rank, error)
        os._exit(EngineError.exit_code)


def _end_with_starter() -> None:
    while os.read(0, 4096):
        pass
    os._exit(EngineError.exit_code)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all; the server decides
    threading.Thread(target=_end_with_starter, daemon=True).start()
    parser = argparse.ArgumentParser()
    parser.add_argument("--connect", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--address", default="", help="of this host, for ranks on others")
    parser.add_argument("--directory", help="of the checkpoint on this host")
    arguments = parser.parse_args()
    secret = os.environ.get(SECRET_VARIABLE, "")
    link = Control(arguments.connect, arguments.rank, secret, arguments.address, arguments.directory)
    return serve(link, arguments.rank, arguments.directory)


def serve(link: Control, rank: int, directory: str | None) -> int:
    """`run` to its end, whatever that is; the exit code. Tells the engine of what went wrong."""
    try:
        run(link, rank, directory)
    except Closed:
        return 0
    except Exception as error:
        if not isinstance(error, ServeError):
            logger.exception("rank %d failed", rank)
        link.fail(error)
        return EngineError.exit_code
    finally:
        link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
