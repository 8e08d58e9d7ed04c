"""Calls of /v1/responses with --responses-store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from support.asgi import Call, Reply
from support.serving import Served

Json = dict[str, Any]
Serve = Callable[..., Served]

PATH = "/v1/responses"


def ask(served: Served, headers: dict[str, str] | None = None, **fields: Any) -> Json:
    reply = served.post(PATH, {"input": "Hi", **fields}, headers)
    assert reply.status == 200, reply.content
    return dict(reply.json())


def read_events(content: bytes) -> list[Json]:
    return [json.loads(event.split(b"data: ")[1]) for event in content.split(b"\n\n") if event]


def get(served: Served, response_id: str, headers: dict[str, str] | None = None) -> Reply:
    return served.get(f"{PATH}/{response_id}", headers)


async def wait_for_status(served: Served, response_id: str, *statuses: str) -> Json:
    while True:
        found = (await Call(served.app, "GET", f"{PATH}/{response_id}").reply()).json()
        assert found["status"] in (*statuses, "queued", "in_progress"), found
        if found["status"] in statuses:
            return found
        await asyncio.sleep(0)
