"""Requests that schemathesis makes from our own OpenAPI document, right and wrong: each gets an answer that it
describes, and what it forbids is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from support.serving import Served

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", PATHS)
def test_every_answer_is_a_described_one(serve: Callable[..., Served], path: str, mode: GenerationMode) -> None:
    served = serve("abc def")
    document = served.get("/openapi.json").json()
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(mode))
    def check(case: Case) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("n"), int):
            case.body["n"] = min(case.body["n"], 3)
        body = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
        reply = served.post(path, body)
        request = httpx.Request(
            "POST", "http://test" + path, content=body, headers={"Content-Type": "application/json"}
        )
        response = httpx.Response(reply.status, headers=reply.headers, content=reply.content, request=request)
        response.elapsed = timedelta()
        case.validate_response(response, CHECKS)
        if reply.status != 200:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

    check()
    assert served.gate.num_open == 0 and not served.engine.open
