"""Measure the server process's CPU time per streamed token when front ends answer the clients.

Run: PYTHONPATH=tests python -m bench.relay [--front-ends 4] [--streams 64] [--steps 400]

The relays of the front ends are real, including the messages that they decode and encode; the engine and the channels
are not. The figure is the minimum over steps, so that other load on the machine does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time

from bench.frontend import PacedEngine
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.server.admission.controller import AdmissionController
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.front_ends.messages import Open, ToFrontEnd, encode
from serve_llm.server.front_ends.relay import Relay
from serve_llm.server.generate.dispatcher import LocalDispatcher


async def measure(num_front_ends: int, num_streams: int, num_steps: int) -> float:
    """Return microseconds per token."""
    engine = PacedEngine([1])
    replicas = Replicas([engine])
    dispatcher = LocalDispatcher(replicas, AdmissionController(replicas, (num_streams, 2**30)))

    def send(message: ToFrontEnd) -> None:
        encode(message)

    relays = [Relay(dispatcher, 1, send) for _ in range(num_front_ends)]
    sampling = Sampling(max_tokens=num_steps + 1, seed=1)
    for number in range(1, num_streams + 1):
        request = EngineCoreRequest(id=number << 40, prompt_ids=[1, 2, 3], sampling=sampling)
        relays[number % num_front_ends].open(Open(number, 0, 0, num_steps, None, [request]))
    least = math.inf
    for message in [engine.message(number, last=False) for number in range(num_steps)]:
        began = time.thread_time()
        engine.deliver(message)
        await asyncio.sleep(0)  # the relays send
        least = min(least, time.thread_time() - began)
    return least / num_streams * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--front-ends", type=int, default=4)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    given = parser.parse_args()
    found = asyncio.run(measure(given.front_ends, given.streams, given.steps))
    print(f"{given.front_ends} front ends, {given.streams} streams: {found:.2f} us per token")


if __name__ == "__main__":
    main()
