"""Measure the front end's CPU time per streamed token: the real app under uvicorn, with a scripted engine.

Run: PYTHONPATH=tests python -m bench.frontend [--streams 64] [--tokens 400] [--steps-per-second 100]

The server is a separate process; its engine sends one message per step, decoded as from the wire, with one token for
each stream, paced so that every token gets its own event. The clients read in this process and are not counted. Prints
a table, then one JSON line. On a busy machine, compare the minimum and the median time of a step, writes included: they
vary less than the sum. Idle figures are measured with the same streams open but nothing generated, and with none open
(uvicorn itself ticks ten times a second).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import uvloop

from serve_llm.common import messages
from serve_llm.common.hub import resolve_model
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, FinishReason, ModelInfo, SchedulerStats
from serve_llm.server.app import create_app
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.http.connection import HttpServer
from serve_llm.server.metrics.meter import Clock, Meter
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.storage.storage import Storage

IDLE_SECONDS = 2.0
LOOP_TURNS = 3  # turns of the event loop after which the events of a step have been written
TEXT = "def main():\n    stack = Stack()\n    for number in range(10):\n        stack.push(number)\n"


class PacedEngine:
    """Runs steps at a fixed rate once all streams are open."""

    model_info = ModelInfo(
        architecture="Scripted",
        max_model_len=2**20,
        vocab_size=4096,
        block_size=16,
        num_kv_blocks=1,
        kv_cache_tokens=16,
        max_num_seqs=256,
        dtype="bfloat16",
        device="cpu",
    )

    def __init__(self, ids: list[int]) -> None:
        self.ready = True
        self.stats = SchedulerStats()
        self.meter = Meter(Clock())
        self.sinks: dict[int, Callable[[EngineCoreOutput], None]] = {}
        self._ids = ids

    def submit_many(self, pairs: Iterable[tuple[EngineCoreRequest, Callable[[EngineCoreOutput], None]]]) -> None:
        self.sinks |= {request.id: sink for request, sink in pairs}

    def abort(self, ids: Sequence[int]) -> None:
        for request_id in ids:
            self.sinks.pop(request_id, None)

    def message(self, number: int, last: bool) -> bytes:
        reason = FinishReason.LENGTH if last else None
        token_ids = [self._ids[number % len(self._ids)]]
        return messages.encode(
            messages.EngineCoreOutputs(
                [EngineCoreOutput(one, token_ids, reason) for one in self.sinks], SchedulerStats(num_steps=number)
            )
        )

    def deliver(self, message: bytes) -> None:
        step = messages.decode_from_engine(message)
        assert isinstance(step, messages.EngineCoreOutputs)
        self.stats = step.stats
        self.meter.count_step(step.stats)
        for output in step.outputs:
            self.sinks[output.id](output)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def idle_cpu_seconds() -> float:
    before = cpu_seconds()
    await asyncio.sleep(IDLE_SECONDS)
    return cpu_seconds() - before


async def serve(listener: socket.socket, num_streams: int, num_tokens: int, rate: float) -> None:
    """Run in the child: serve, step, and print the cost."""
    options = make_options("demo")
    model = ServedModel.load(resolve_model("demo"), options)
    engine = PacedEngine(model.tokenizer.encode(TEXT, add_special_tokens=False))
    app, admission, *_ = create_app(Replicas([engine]), model, options, Storage(None, None))
    server = HttpServer(app, options.limits, None, None)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    await asyncio.sleep(0.5)
    idle_without = await idle_cpu_seconds()
    print("ready", flush=True)
    while len(engine.sinks) < num_streams:
        await asyncio.sleep(0.01)
    messages = [engine.message(number, number == num_tokens - 1) for number in range(num_tokens)]
    await asyncio.sleep(0.5)  # work left over from opening the streams
    idle = await idle_cpu_seconds()
    loop = asyncio.get_running_loop()
    before, began = cpu_seconds(), loop.time()
    steps = []
    for number, message in enumerate(messages):
        await asyncio.sleep(max(0.0, began + number / rate - loop.time()))
        step_began = time.thread_time()
        engine.deliver(message)
        for _ in range(LOOP_TURNS):
            await asyncio.sleep(0)
        steps.append(time.thread_time() - step_began)
    await admission.drained()
    spent, seconds = cpu_seconds() - before, loop.time() - began
    middle = steps[1:-1]  # the first and the last step begin and end the streams
    found = {
        "cpu_seconds": spent,
        "seconds": seconds,
        "idle_cpu_seconds": idle,
        "idle_without": idle_without,
        "least_step_seconds": min(middle),
        "median_step_seconds": statistics.median(middle),
    }
    print(json.dumps(found), flush=True)
    server.should_exit = True
    await serving


async def read_stream(port: int, num_tokens: int) -> int:
    """Read one client's stream. Returns the number of events with text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": "x", "max_tokens": num_tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    received = b"".join([chunk async for chunk in _chunks(reader)])
    writer.close()
    return received.count(b'data: {"id"')


async def _chunks(reader: asyncio.StreamReader):
    while chunk := await reader.read(65536):
        yield chunk


async def measure(num_streams: int, num_tokens: int, rate: float) -> dict[str, float]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        arguments = ["--listen", str(listener.fileno()), "--streams", str(num_streams)]
        arguments += ["--tokens", str(num_tokens), "--steps-per-second", str(rate)]
        command = [sys.executable, __file__, *arguments]
        child = subprocess.Popen(command, pass_fds=[listener.fileno()], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    counts = await asyncio.gather(*(read_stream(port, num_tokens) for _ in range(num_streams)))
    output, _ = child.communicate()
    found: dict[str, float] = json.loads(output)
    total = num_streams * num_tokens
    return {
        "streams": num_streams,
        "tokens": total,
        "events": sum(counts),
        "us_per_token": round(found["cpu_seconds"] / total * 1e6, 2),
        "us_per_token_least": round(found["least_step_seconds"] / num_streams * 1e6, 2),
        "us_per_token_median": round(found["median_step_seconds"] / num_streams * 1e6, 2),
        "tokens_per_second": round(total / found["seconds"]),
        "idle_cpu_ms_per_second": round(found["idle_cpu_seconds"] / IDLE_SECONDS * 1e3, 3),
        "idle_cpu_ms_per_second_without_streams": round(found["idle_without"] / IDLE_SECONDS * 1e3, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--steps-per-second", type=float, default=100)
    parser.add_argument("--listen", type=int, help=argparse.SUPPRESS)  # the child's inherited socket
    given = parser.parse_args()
    if given.listen is not None:
        uvloop.run(serve(socket.socket(fileno=given.listen), given.streams, given.tokens, given.steps_per_second))
        return
    result = asyncio.run(measure(given.streams, given.tokens, given.steps_per_second))
    for name, value in result.items():
        print(f"{name:40} {value:>12}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
