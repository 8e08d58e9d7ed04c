"""Valid and invalid requests that schemathesis generates from our own OpenAPI document: each gets a documented
response, and invalid ones are refused. Every operation of the document is tested."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from serve_llm.server.prompt.model import ServedModel
from support.asgi import Call, Reply
from support.fakes import make_model_info
from support.fill_in_middle import FIM, add_tokens
from support.matrix import mostly_slow
from support.serving import Served

STRICT = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
STRICT += ("/infill", "/v1/decisions", "/v1/embeddings", "/rerank", "/score", "/pooling", "/classify")
LENIENT = (
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/compact",
    "/v2/embed",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/invocations",
)
ALIASES = ("/v1/rerank", "/v2/rerank", "/v1/score")  # routes with strict bodies
STORING = ("/v1/files", "/v1/batches", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
PROBES = (
    "/health",
    "/ping",
    "/version",
    "/load",
    "/ready",
    "/status",
    "/requests",
    "/metrics",
    "/tokenizer_info",
    "/v1/models",
)
LISTS = ("/v1/files", "/v1/batches", "/v1/responses/{response_id}/input_items")
OBJECTS = (
    ("GET", "/v1/models/{name}"),
    ("GET", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
    ("GET", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/files/{file_id}"),
)
DESCRIBED = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
EVENTS = "text/event-stream"
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}


class Server:
    """The app with all its stores, in one event loop, so that background work continues between requests."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._loop = asyncio.new_event_loop()
        self.document: dict[str, Any] = json.loads(self.call("GET", "/openapi.json").content)

    def call(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Reply:
        async def reply() -> Reply:
            return await Call(
                self.served.app, method, path, body, {"Authorization": "Bearer admin:x", **(headers or {})}
            ).reply()

        return self._loop.run_until_complete(reply())

    def operation(self, method: str, path: str) -> Any:
        return schemathesis.openapi.from_dict(self.document)[path][method]

    def ask(self, case: Case) -> tuple[Reply, httpx.Response]:
        """Send a request. Returns the response, also in schemathesis' form."""
        prepared = requests.Request(**case.as_transport_kwargs(base_url="http://test")).prepare()
        url = urlsplit(str(prepared.url))
        body = prepared.body or b""
        content = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body)
        headers = {"Content-Type": str(prepared.headers.get("Content-Type", "application/json"))}
        reply = self.call(str(prepared.method), f"{unquote(url.path)}?{url.query}", content, headers)
        request = httpx.Request(str(prepared.method), str(prepared.url), content=content, headers=headers)
        response = httpx.Response(reply.status, headers=reply.headers, content=reply.content, request=request)
        response.elapsed = timedelta()
        return reply, response

    def check(self, case: Case, validated: list[Callable[..., Any]]) -> Reply:
        reply, response = self.ask(case)
        is_stream = reply.headers.get("content-type", "").startswith(EVENTS)
        if is_stream:
            check_events(reply, self.document, case.operation.path)
        case.validate_response(response, validated + [checks.response_schema_conformance] * (not is_stream))
        return reply

    def assert_idle(self) -> None:
        assert self.served.admission.num_open == 0 and not self.served.engine.open

    def close(self) -> None:
        async def stop() -> None:
            if self.served.batches is not None:
                await self.served.batches.stop()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._loop.shutdown_default_executor()

        self._loop.run_until_complete(stop())
        self._loop.close()


@pytest.fixture
def server(serve: Callable[..., Served], tmp_path: Path) -> Iterator[Server]:
    options = {
        "batches_dir": str(tmp_path / "batches"),
        "responses_store": "memory",
        "enable_lora": True,
        "api_key": ("admin:x",),
    }
    server = Server(serve("abc def", options=options))
    yield server
    server.close()


def read_events(reply: Reply) -> list[dict[str, object]]:
    lines = [line for line in reply.content.decode().split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def check_events(reply: Reply, document: dict[str, Any], path: str) -> None:
    """Check that each event matches the document; schemathesis applies the schema to the event around the JSON."""
    (operation,) = (found for found in document["paths"][path].values())
    schema = operation["responses"]["200"]["content"][EVENTS]["schema"]
    validator = jsonschema.Draft202012Validator(schema | {"components": document["components"]})
    events = read_events(reply)
    assert events
    for event in events:
        validator.validate(event)


def test_a_stream_is_checked(serve: Callable[..., Served]) -> None:
    served = serve("abc def")
    document = json.loads(served.get("/openapi.json").content)
    check_events(served.complete(stream=True), document, "/v1/completions")
    with pytest.raises(jsonschema.ValidationError):
        check_events(served.chat(stream=True), document, "/v1/completions")


def test_every_operation_has_its_turn(server: Server) -> None:
    found = {(method.upper(), path) for path, operations in server.document["paths"].items() for method in operations}
    tried = {("POST", path) for path in STRICT + LENIENT + ALIASES + STORING}
    tried |= {("GET", path) for path in PROBES + LISTS} | set(OBJECTS) | {("POST", "/ping")}
    assert found == tried


def check_body(
    server: Server, method: str, path: str, mode: GenerationMode, num_examples: int, strict: bool
) -> Counter[int]:
    """Send requests of one operation, with bodies or query parameters. Returns how often each status occurred."""
    validated = DESCRIBED + [checks.negative_data_rejection] * strict
    statuses: Counter[int] = Counter()

    @settings(max_examples=num_examples, suppress_health_check=list(HealthCheck), deadline=None)
    @given(server.operation(method, path).as_strategy(mode))
    def check(case: Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("n"), int):
            case.body["n"] = min(case.body["n"], 3)
        reply = server.check(case, validated)
        statuses[reply.status] += 1
        if reply.status != 200 and path.startswith("/v1/messages"):
            assert reply.json().keys() == {"type", "error", "request_id"}
        elif reply.status != 200:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}  # type: ignore[call-overload]

    check()
    return statuses


VALID: dict[str, dict[str, object]] = {  # few of the bodies that schemathesis generates are valid
    "/v1/embeddings": {"input": "abc"},
    "/rerank": {"query": "abc", "documents": ["def", "abc"]},
    "/pooling": {"input": "abc"},
    "/classify": {"input": "abc"},
}


def make_case(server: Server, path: str, body: dict[str, object]) -> Case:
    case: Case = server.operation("POST", path).Case(body=body, media_type="application/json")
    return case


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "task"),
    [
        ("/v1/embeddings", "embed"),
        ("/rerank", "embed"),
        ("/pooling", "embed"),
        ("/classify", "classify"),
        ("/pooling", "classify"),
        ("/rerank", "classify"),
    ],
)
def test_routes_of_models_that_return_vectors(serve: Callable[..., Served], path: str, task: str) -> None:
    size = 3 if path != "/rerank" or task == "embed" else 1
    known = make_model_info(generates=False, pooling_task=task, vector_size=size)
    server = Server(serve(script=lambda request: (1.0, *[0.0] * (size - 1)), model_info=known))
    try:
        assert server.check(make_case(server, path, VALID[path]), []).status == 200
        check_body(server, "POST", path, GenerationMode.POSITIVE, 60, strict=True)
        server.assert_idle()
    finally:
        server.close()


@pytest.mark.slow
def test_infill_of_a_model_that_fills_in(serve: Callable[..., Served], model: ServedModel) -> None:
    served = serve("pass", served_model=add_tokens(model, *FIM), model_info=make_model_info(vocab_size=4200))
    server = Server(served)
    try:
        case = make_case(server, "/infill", {"input_prefix": "def f():", "input_suffix": "return", "n_predict": 2})
        assert server.check(case, []).status == 200
        check_body(server, "POST", "/infill", GenerationMode.POSITIVE, 60, strict=True)
        server.assert_idle()
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", STRICT)
def test_routes_that_refuse_what_they_do_not_know(server: Server, path: str, mode: GenerationMode) -> None:
    check_body(server, "POST", path, mode, 30, strict=True)
    server.assert_idle()


@pytest.mark.slow
@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", LENIENT)
def test_routes_that_ignore_what_they_do_not_know(server: Server, path: str, mode: GenerationMode) -> None:
    check_body(server, "POST", path, mode, 30, strict=False)
    server.assert_idle()


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize(
    "path", mostly_slow([*ALIASES, *STORING], ["/v1/rerank", "/v1/files", "/v1/load_lora_adapter"])
)
def test_routes_of_small_bodies(server: Server, path: str, mode: GenerationMode) -> None:
    check_body(server, "POST", path, mode, 10, strict=True)


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", mostly_slow(LISTS, ["/v1/files"]))
def test_lists(server: Server, path: str, mode: GenerationMode) -> None:
    make_objects(server)
    check_body(server, "GET", path, mode, 20, strict="{" not in path)


def test_probes(server: Server) -> None:
    for method, path in [*(("GET", path) for path in PROBES), ("POST", "/ping")]:
        check_body(server, method, path, GenerationMode.POSITIVE, 1, strict=True)


def make_objects(server: Server) -> dict[str, str]:
    """Create a file, a batch that has ended, a response and a model. Returns their ids, by path parameter."""

    def make(path: str, body: bytes, kind: str = "application/json") -> str:
        reply = server.call("POST", path, body, {"content-type": kind})
        assert reply.status == 200, reply.content
        return str(reply.json()["id"])

    form = b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--cut\r\n'
    form += b'Content-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    file_id = make(
        "/v1/files", form + json.dumps(LINE).encode() + b"\r\n--cut--\r\n", "multipart/form-data; boundary=cut"
    )
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = make("/v1/batches", json.dumps(asked).encode())
    while json.loads(server.call("GET", f"/v1/batches/{batch_id}").content)["status"] != "completed":
        pass
    response_id = make("/v1/responses", b'{"input": "x"}')
    return {"file_id": file_id, "batch_id": batch_id, "response_id": response_id, "name": "demo"}


def test_stored_objects(server: Server) -> None:
    """Existing and missing objects. Deleting operations come last."""
    ids = make_objects(server)
    for method, path in OBJECTS:
        statuses: set[int] = set()
        check_objects(server, method, path, ids, statuses)
        assert statuses <= {200, 400, 404} and 404 in statuses, (method, path, statuses)
        assert 200 in statuses or path.endswith("/cancel"), (method, path)  # only running ones can be cancelled


def check_objects(server: Server, method: str, path: str, ids: dict[str, str], statuses: set[int]) -> None:

    @settings(max_examples=5, suppress_health_check=list(HealthCheck), deadline=None)
    @given(server.operation(method, path).as_strategy(GenerationMode.POSITIVE))
    def check(case: Case) -> None:
        statuses.add(server.check(case, DESCRIBED).status)
        case.path_parameters = {name: ids[name] for name in case.path_parameters}
        statuses.add(server.check(case, DESCRIBED).status)

    check()
