"""The engine process: `python -P -m serve_llm.engine --connect ipc://...`, started by the server, never by hand.

Its standard input is a pipe whose other end the parent holds: when the parent is gone, however it went, so is this.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import zmq

from serve_llm.engine import wire
from serve_llm.engine.config import check
from serve_llm.engine.devices import claim_gpus
from serve_llm.engine.errors import EngineError, ServeError
from serve_llm.engine.execute.choose import Choice
from serve_llm.engine.execute.roster import Roster
from serve_llm.engine.execute.start import start_ranks
from serve_llm.engine.hub import read_config
from serve_llm.engine.logs import configure
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.parallel.lockstep import Lockstep
from serve_llm.engine.pulse import Pulse, beside
from serve_llm.engine.types import ModelFacts

logger = logging.getLogger("serve_llm.engine.__main__")  # also when run by -m


class ZmqChannel:
    """See `loop.Channel`: a PAIR socket to the one parent."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)  # nothing is dropped; what is open is bounded by the server's admission
        self._socket.setsockopt(zmq.LINGER, 1000)  # ms, for the last message
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def also_wake_for(self, socket: zmq.Socket[bytes]) -> None:
        """`receive` returns, if only with what has arrived here, when something can be read from this socket."""
        self._poller.register(socket, zmq.POLLIN)

    def receive(self, seconds: float | None) -> list[wire.ToEngine]:
        timeout = None if seconds is None else int(seconds * 1000)
        if timeout != 0:
            self._poller.poll(timeout)
        messages: list[wire.ToEngine] = []
        while self._socket.poll(0):
            messages.append(wire.decode_to_engine(self._socket.recv()))
        return messages

    def send(self, step: wire.FromEngine) -> None:
        self._socket.send(wire.encode(step))


def _end_with_parent(directory: Path) -> None:
    """directory: the parent's, for its sockets."""
    while os.read(0, 4096):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # with its ranks: one that is stopped does not notice that this process ends
    os._exit(EngineError.exit_code)


def serve(channel: ZmqChannel, pulse: Pulse) -> None:
    """Start what the parent asks for, say Ready, and run the loop until Shutdown."""
    (start,) = channel.receive(None)[:1]
    assert isinstance(start, wire.Start)
    options = start.options
    raw = read_config(Path(start.directory))
    if options.model_impl == "auto":
        spec, _ = read_model(raw, options.allow_unknown_config)
        check(options, spec.max_position, len(spec.layers), spec.has_experts)  # at once: ranks and torch take long
    configure(options.log_level, f"engine {start.engine}" if options.data_parallel_size > 1 else "")
    on_ray = options.distributed_executor_backend == "ray" or (start.ray and start.ray.placement_group)
    if options.device != "cpu" and not on_ray:  # Ray gives each rank its own
        per_engine = options.tensor_parallel_size * options.pipeline_parallel_size
        claim_gpus(os.environ, start.engine, options.data_parallel_size, per_engine)
    with contextlib.ExitStack() as stack:
        choice, roster = start_ranks(options, start.ray, start.engine, replaces=start.replaces)
        if roster is not None:
            stack.push(lambda kind, error, trace: roster.close(error))
        _serve(channel, pulse, start, raw, choice, roster)


def _serve(
    channel: ZmqChannel,
    pulse: Pulse,
    start: wire.Start,
    raw: dict[str, object],
    choice: Choice,
    roster: Roster | None,
) -> None:
    """raw: config.json. roster: ranks that start at the same time as this process."""
    began = time.perf_counter()
    # After the logger is set up and ranks are started, because these import torch: the longest part of a small model's
    # start.
    from serve_llm.engine import loop, startup

    logger.info("Engine modules imported in %.2f s", time.perf_counter() - began)
    config, spec, weights = startup.resolve_all(start.options, start.directory, raw, choice, start.engine)
    lockstep = None
    if start.meeting is not None:
        lockstep = Lockstep(Path(start.meeting), start.engine, config.data_parallel_size)
        channel.also_wake_for(lockstep.socket)
    executor = startup.build_executor(config, spec, weights, raw, roster, lockstep)
    engine = loop.Engine(config, executor, show=pulse.show, steps=lockstep)
    layout = executor.layout
    facts = ModelFacts(
        architecture=spec.architecture,
        max_model_len=config.max_model_len,
        vocab_size=spec.vocab_size,
        block_size=config.block_size,
        num_kv_blocks=layout.num_blocks,
        kv_cache_tokens=startup.cache_tokens(config, layout),
        max_num_seqs=config.max_num_seqs,
        dtype=config.dtype,
        device=config.device,
    )
    channel.send(wire.Ready(facts))
    if roster is not None:
        roster.serve()
    logger.info("Engine ready after %.2f s", time.perf_counter() - began)
    try:
        loop.run(engine, channel)
    except BaseException as error:
        if roster is not None:
            roster.close(error)  # so that other hosts hear why
        raise
    finally:
        executor.close()
        if lockstep is not None:
            lockstep.close()


def main() -> int:
    # The terminal sends Ctrl-C to the whole group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    address = sys.argv[sys.argv.index("--connect") + 1]
    threading.Thread(target=_end_with_parent, args=(beside(address).parent,), daemon=True).start()
    pulse = Pulse(beside(address))
    threading.Thread(target=pulse.beat, daemon=True).start()
    channel = ZmqChannel(address)
    try:
        serve(channel, pulse)
    except ServeError as error:
        channel.send(wire.Failed(type(error).__name__, str(error)))
        return error.exit_code
    except Exception as error:
        logger.exception("engine failed")
        channel.send(wire.Failed("EngineError", f"the engine failed: {type(error).__name__}: {error}"))
        return EngineError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
