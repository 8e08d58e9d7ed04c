"""Requests that schemathesis makes from our own OpenAPI document, right and wrong: each gets an answer that it
describes, and what it forbids is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from support.asgi import Reply
from support.serving import Served

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
PATHS += ("/infill", "/v1/decisions", "/v1/embeddings", "/rerank", "/score", "/pooling", "/classify")
LENIENT_PATHS = ("/v1/responses", "/v1/responses/input_tokens")
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.negative_data_rejection,
]
EVENTS = "text/event-stream"


def check_events(reply: Reply, document: dict[str, Any], path: str) -> None:
    """Each event holds what the document says; schemathesis takes its schema for that of the event around the JSON."""
    schema = document["paths"][path]["post"]["responses"]["200"]["content"][EVENTS]["schema"]
    validator = jsonschema.Draft202012Validator(schema | {"components": document["components"]})
    for event in reply.events():
        validator.validate(event)


def ask(served: Served, path: str, content: object) -> tuple[Reply, httpx.Response]:
    """The answer, and the same for schemathesis."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    reply = served.post(path, body)
    request = httpx.Request("POST", "http://test" + path, content=body, headers={"Content-Type": "application/json"})
    response = httpx.Response(reply.status, headers=reply.headers, content=reply.content, request=request)
    response.elapsed = timedelta()
    return reply, response


def test_a_stream_is_checked(serve: Callable[..., Served]) -> None:
    served = serve("abc def")
    document = served.get("/openapi.json").json()
    check_events(served.complete(stream=True), document, "/v1/completions")
    with pytest.raises(jsonschema.ValidationError):
        check_events(served.chat(stream=True), document, "/v1/completions")


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", PATHS)
def test_every_answer_is_a_described_one(serve: Callable[..., Served], path: str, mode: GenerationMode) -> None:
    served = serve("abc def")
    document = served.get("/openapi.json").json()
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(mode))
    def check(case: Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("n"), int):
            case.body["n"] = min(case.body["n"], 3)
        reply, response = ask(served, path, case.body)
        streamed = reply.headers["content-type"].startswith(EVENTS)
        if streamed:
            check_events(reply, document, path)
        case.validate_response(response, CHECKS + [checks.response_schema_conformance] * (not streamed))
        if reply.status != 200:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

    check()
    assert served.admission.num_open == 0 and not served.engine.open


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", LENIENT_PATHS)
def test_routes_that_ignore_what_they_do_not_know(
    serve: Callable[..., Served], path: str, mode: GenerationMode
) -> None:
    served = serve("abc def")
    operation = schemathesis.openapi.from_dict(served.get("/openapi.json").json())[path]["POST"]

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(mode))
    def check(case: Case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("stream", None)
        _, response = ask(served, path, case.body)
        case.validate_response(
            response, [not_a_server_error, checks.status_code_conformance, checks.response_schema_conformance]
        )

    check()
    assert served.admission.num_open == 0 and not served.engine.open
