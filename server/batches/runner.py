"""Answer the requests of a batch, many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from types import MappingProxyType

from starlette.types import ASGIApp

from serve_llm.server.batches.lines import BatchRequest, build_refusal, build_result
from serve_llm.server.batches.local_call import LocalResponse, post_locally

RETRIED_STATUSES = (503, 529)  # the queue is full, or an engine restarts; 529 is Anthropic's


async def run_requests(
    app: ASGIApp,
    requests: Iterator[BatchRequest],
    write: Callable[[bytes, int], None],
    concurrency: int,
    *,
    slot: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    state: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Pass each request to the app, up to `concurrency` at a time, and call `write` once with the line of its result
    and its status.

    Requests are read from `requests` only when they can start, so that a file of any length needs little memory. slot:
    a context in which a request may run. state: added to the scope of each. Cancelling this call aborts running
    requests; an exception of `write` ends it. A line may be large, so threads read them, one at a time.
    """
    reading = asyncio.Lock()

    async def read() -> BatchRequest | None:
        async with reading:
            return await asyncio.to_thread(next, requests, None)

    async def work() -> None:
        while True:
            async with slot():
                request = await read()
                if request is None:
                    return
                response = await _answer(app, request, state)
                write(build_result(request.custom_id, response), response.status)

    tasks = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _answer(app: ASGIApp, request: BatchRequest, state: Mapping[str, object]) -> LocalResponse:
    """Answer a request. Waits as long as the server is unavailable."""
    if request.refusal is not None:
        return build_refusal(request, request.refusal)
    while True:
        response = await post_locally(app, request.url, request.body, state)
        if response.status not in RETRIED_STATUSES:
            return response
        await asyncio.sleep(float(response.headers.get("retry-after", "1")))
