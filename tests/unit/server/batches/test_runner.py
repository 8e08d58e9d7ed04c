"""Requests of a batch pass through the app's own routes, each of them once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from serve_llm.server.batches.lines import ENDPOINTS, BatchRequest, parse_result
from serve_llm.server.batches.runner import run_requests
from serve_llm.server.http.errors import Unavailable, send_error
from support.serving import TEXT, Served


def request(custom_id: str, url: str = "/v1/completions", **body: object) -> BatchRequest:
    return BatchRequest(custom_id, url, msgspec.json.encode({"prompt": "x"} | body))


def run(app: Callable[..., object], *requests: BatchRequest, concurrency: int = 4) -> dict[str, tuple[int, object]]:
    """Run a batch. Returns custom_id -> status and body."""
    found: dict[str, tuple[int, object]] = {}

    def write(line: bytes, status: int) -> None:
        assert line.count(b"\n") == 1 and line.endswith(b"\n")
        result = parse_result(line)
        assert result.custom_id not in found
        assert result.response.request_id
        assert result.response.status_code == status
        found[result.custom_id] = (status, msgspec.json.decode(result.response.body))

    asyncio.run(run_requests(app, iter(requests), write, concurrency))  # type: ignore[arg-type]
    return found


def test_every_request_is_answered_as_its_route_answers(served: Served) -> None:
    chat = {"prompt": None, "messages": [{"role": "user", "content": "hi"}]}
    count = len(served.ids(TEXT))
    requests = [request(str(number), max_tokens=count) for number in range(20)]
    requests.append(request("wrong", max_tokens=-1))
    requests.append(BatchRequest("chat", ENDPOINTS[1], msgspec.json.encode({"messages": chat["messages"]})))
    found = run(served.app, *requests)
    assert len(found) == 22
    for number in range(20):
        status, body = found[str(number)]
        assert status == 200
        assert body["choices"][0]["text"] == TEXT  # type: ignore[index]
    assert found["wrong"][0] == 400
    assert found["wrong"][1]["error"]["param"] == "max_tokens"  # type: ignore[index]
    assert found["chat"][1]["object"] == "chat.completion"  # type: ignore[index]


def test_threads_read_the_lines_one_at_a_time(served: Served) -> None:
    readers = set[int]()

    def read() -> Iterator[BatchRequest]:
        for number in range(20):
            readers.add(threading.get_ident())
            yield request(str(number), max_tokens=1)

    found: list[int] = []
    asyncio.run(run_requests(served.app, read(), lambda _, status: found.append(status), 4))
    assert found == [200] * 20 and readers and threading.get_ident() not in readers


def test_every_endpoint_is_a_route(served: Served) -> None:
    paths = served.get("/openapi.json").json()["paths"]
    assert all("post" in paths[url] for url in ENDPOINTS)  # type: ignore[index]


class Flaky:
    """An app that is unavailable at first."""

    def __init__(self, app: Callable[..., object], num_refusals: int) -> None:
        self.app = app
        self.num_left = num_refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.num_left:
            self.num_left -= 1
            await send_error(Unavailable("busy", retry_after=0), send)
        else:
            await self.app(scope, receive, send)  # type: ignore[misc]


def test_a_request_waits_while_the_server_is_unavailable(served: Served) -> None:
    app = Flaky(served.app, 5)
    found = run(app, *[request(str(number)) for number in range(3)])
    assert [status for status, _ in found.values()] == [200] * 3
    assert app.num_left == 0


def test_a_result_that_cannot_be_written_ends_the_run(served: Served) -> None:
    def write(line: bytes, status: int) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        asyncio.run(run_requests(served.app, iter([request(str(number)) for number in range(9)]), write, 3))
    assert served.admission.num_open == 0


def test_requests_of_other_apis(served: Served) -> None:
    fields = {
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
        "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    }
    found = run(
        served.app,
        *[BatchRequest(url, url, msgspec.json.encode(body)) for url, body in fields.items()],
    )
    assert found["/v1/messages"][1]["type"] == "message"  # type: ignore[index]
    assert found["/v1/responses"][1]["object"] == "response"  # type: ignore[index]
