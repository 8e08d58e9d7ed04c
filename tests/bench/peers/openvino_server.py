"""Serve OpenVINO GenAI through a small /v1/completions, to measure it beside other servers. For measuring only.

Run with an interpreter that has openvino-genai: python openvino_server.py MODEL --port 8000. MODEL is a folder that
optimum-intel has converted. The pipeline has continuous batching but no HTTP server. This one accepts prompts as token
ids, streams every token as soon as a step has produced it, and adds almost no cost: a token's text is its id.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import threading
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

HEAD = "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n"


TURNS = 8  # turns of the event loop after each step: enough to write its tokens and to read new requests


class Pipeline:
    """Runs steps in a thread while there is work; ids reach the requests' queues through the event loop.

    A step holds the GIL, so the thread waits after each one until the event loop has had its turns.
    """

    def __init__(self, model: str, precision: str, threads: int, batched_tokens: int, cache_gb: int) -> None:
        scheduling = genai.SchedulerConfig()
        scheduling.max_num_batched_tokens = batched_tokens
        scheduling.max_num_seqs = 64
        scheduling.cache_size = cache_gb
        scheduling.enable_prefix_caching = True
        properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduling, "CPU", properties)
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._new: list[tuple[list[int], int, asyncio.Queue[int]]] = []
        self._numbers = itertools.count()
        self._delivered = threading.Event()
        threading.Thread(target=self._step_forever, daemon=True).start()

    def submit(self, prompt: list[int], max_tokens: int) -> asyncio.Queue[int]:
        queue: asyncio.Queue[int] = asyncio.Queue()
        with self._wake:
            self._new.append((prompt, max_tokens, queue))
            self._wake.notify()
        return queue

    def _step_forever(self) -> None:
        open_requests: list[tuple[Any, asyncio.Queue[int]]] = []
        while True:
            with self._wake:
                while not (self._new or open_requests):
                    self._wake.wait()
                new, self._new = self._new, []
            for prompt, max_tokens, queue in new:
                config = genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
                ids = ov.Tensor(np.array([prompt], np.int64))
                open_requests.append((self._pipeline.add_request(next(self._numbers), ids, config), queue))
            self._pipeline.step()
            fresh = []
            for handle, queue in open_requests:
                while handle.can_read():
                    for output in handle.read().values():
                        fresh += [(queue, token_id) for token_id in output.generated_ids]
            self._delivered.clear()
            self._loop.call_soon_threadsafe(self._deliver, fresh, TURNS)
            self._delivered.wait()
            running = genai.GenerationStatus.RUNNING
            open_requests = [(handle, queue) for handle, queue in open_requests if handle.get_status() == running]

    def _deliver(self, fresh: list[tuple[asyncio.Queue[int], int]], turns: int) -> None:
        for queue, token_id in fresh:
            queue.put_nowait(token_id)
        if turns:
            self._loop.call_soon(self._deliver, [], turns - 1)
        else:
            self._delivered.set()


async def complete(pipeline: Pipeline, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    prompt, max_tokens = body["prompt"], body["max_tokens"]
    writer.write(HEAD.format(status="200 OK", kind="text/event-stream").encode())
    queue = pipeline.submit(prompt, max_tokens)
    for number in range(max_tokens):
        token_id = await queue.get()
        reason = '"length"' if number == max_tokens - 1 else "null"
        choice = f'{{"index":0,"text":" {token_id}","finish_reason":{reason}}}'
        writer.write(f'data: {{"object":"text_completion","choices":[{choice}]}}\n\n'.encode())
    usage = {"prompt_tokens": len(prompt), "completion_tokens": max_tokens, "total_tokens": len(prompt) + max_tokens}
    writer.write(f'data: {{"choices":[],"usage":{json.dumps(usage)}}}\n\ndata: [DONE]\n\n'.encode())


async def answer(pipeline: Pipeline, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        lengths = [line.partition(":")[2] for line in head if line.lower().startswith("content-length:")]
        if head[0].startswith("POST /v1/completions "):
            await complete(pipeline, json.loads(await reader.readexactly(int(lengths[0]))), writer)
        else:
            known = head[0].startswith("GET /v1/models ")
            writer.write(HEAD.format(status="200 OK" if known else "404 Not Found", kind="application/json").encode())
            writer.write(b'{"data":[{"id":"openvino"}]}' if known else b"{}")
        await writer.drain()
    writer.close()


async def serve(given: argparse.Namespace) -> None:
    pipeline = Pipeline(given.model, given.precision, given.threads, given.batched_tokens, given.cache_gb)
    server = await asyncio.start_server(lambda r, w: answer(pipeline, r, w), "127.0.0.1", given.port)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--precision", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batched-tokens", type=int, default=2048, help="maximum tokens per step")
    parser.add_argument("--cache-gb", type=int, default=2)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
