"""Calls of /v1/files and /v1/batches on a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from serve_llm.server.schema.batches import BatchReply, FileReply
from support.asgi import Call, Reply
from support.serving import Served

Json = dict[str, Any]
Serve = Callable[..., Served]

FILES, BATCHES = "/v1/files", "/v1/batches"
FORM = {"content-type": "multipart/form-data; boundary=cut"}
EXPIRY_FIELDS = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
FIRST, SECOND = ({"authorization": f"Bearer {key}"} for key in ("first", "second"))


def build_form(content: bytes, purpose: str = "batch", **fields: str) -> bytes:
    parts = [
        f'--cut\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in {"purpose": purpose, **fields}.items()
    ]
    head = "".join(parts) + '--cut\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    return head.encode() + content + b"\r\n--cut--\r\n"


def build_line(custom_id: object, **fields: object) -> Json:
    body = {"prompt": f"line {custom_id}", "max_tokens": 2}
    return {"custom_id": str(custom_id), "method": "POST", "url": "/v1/completions", "body": body, **fields}


def build_input(*lines: Json) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def ask(served: Served, method: str, path: str, body: object = None, key: Json | None = None) -> Reply:
    headers = {**(FORM if path == FILES and method == "POST" else {}), **(key or {})}
    return await Call(served.app, method, path, body, headers).reply()


async def get(served: Served, path: str, key: Json | None = None) -> Json:
    reply = await ask(served, "GET", path, None, key)
    assert reply.status == 200, reply.content
    return dict(reply.json())


async def upload(served: Served, content: bytes, key: Json | None = None, **fields: str) -> str:
    reply = await ask(served, "POST", FILES, build_form(content, **fields), key)
    assert reply.status == 200, reply.content
    FileReply.model_validate(reply.json())
    return str(reply.json()["id"])


async def create(served: Served, content: bytes, key: Json | None = None, **fields: object) -> Json:
    body = {"input_file_id": await upload(served, content, key), "endpoint": "/v1/completions"}
    reply = await ask(served, "POST", BATCHES, body | {"completion_window": "24h"} | fields, key)
    assert reply.status == 200, reply.content
    BatchReply.model_validate(reply.json())
    assert reply.json()["status"] == "validating"
    return dict(reply.json())


async def wait_for(served: Served, batch_id: str, *statuses: str, key: Json | None = None) -> Json:
    while True:
        batch = await get(served, f"{BATCHES}/{batch_id}", key)
        if batch["status"] in statuses:
            return batch
        assert batch["status"] in ("validating", "in_progress", "cancelling"), batch
        await asyncio.sleep(0)


async def read_results(served: Served, batch: Json, name: str) -> list[Json]:
    if batch[f"{name}_file_id"] is None:
        return []
    reply = await ask(served, "GET", f"{FILES}/{batch[f'{name}_file_id']}/content")
    return [json.loads(line) for line in reply.content.splitlines()]


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())
