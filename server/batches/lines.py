"""Lines of OpenAI's batch format: requests, `{"custom_id", "method", "url", "body"}`, and their results."""

from __future__ import annotations

import uuid
from typing import Annotated, NamedTuple

import msgspec

from serve_llm.server.batches.local_call import LocalResponse
from serve_llm.server.http.anthropic_errors import translate_body
from serve_llm.server.http.errors import InvalidRequest, error_body

ENDPOINTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
)
RESULT_PREFIX = b'{"id":"batch_req_'  # the start of every result line


class _Line(msgspec.Struct):
    custom_id: Annotated[str, msgspec.Meta(min_length=1)]
    method: str
    url: str
    body: msgspec.Raw


class BatchRequest(NamedTuple):
    """One line of the input. `body` is that of a request to `url`, as it was sent."""

    custom_id: str
    url: str
    body: bytes
    refusal: InvalidRequest | None = None  # why the request is not passed on


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Why a request has no response: its batch expired or was cancelled."""

    code: str
    message: str


class BatchResult(msgspec.Struct):
    """One line of the output. If a request was answered, any error is in its response."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchError | None = None


def parse_request(content: bytes) -> BatchRequest:
    """Parse a line. A fault of the request alone becomes its `refusal`. Raises InvalidRequest, with no param if the
    line does not have the format of a batch."""
    try:
        line = msgspec.json.decode(content, type=_Line)
        fields = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        body = msgspec.json.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"it is not a line of a batch: {error}") from None
    if line.method != "POST":
        raise InvalidRequest(f"method must be POST, not {line.method!r}", "method")
    if line.url not in ENDPOINTS:
        raise InvalidRequest(f"url must be one of {', '.join(ENDPOINTS)}, not {line.url!r}", "url")
    return BatchRequest(line.custom_id, line.url, bytes(line.body), _find_refusal(fields, body))


def _find_refusal(fields: dict[str, msgspec.Raw], body: object) -> InvalidRequest | None:
    for name in fields:
        if name not in _Line.__struct_fields__:
            return InvalidRequest(f"unknown field {name[:100]!r} in the line of the batch", name[:100])
    if not isinstance(body, dict):
        return InvalidRequest("body must be an object", "body")
    for name in ("stream", "background"):
        if body.get(name):
            return InvalidRequest(f"body: {name} is not possible in a batch", name)
    return None


def build_refusal(request: BatchRequest, refusal: InvalidRequest) -> LocalResponse:
    """Build the answer to a request that is not passed on, as its route would write it."""
    request_id = uuid.uuid4().hex
    body = error_body(refusal)
    if request.url == "/v1/messages":
        body = translate_body(body, 400, request_id)
    return LocalResponse(400, {"x-request-id": request_id}, body)


def build_result(custom_id: str, response: LocalResponse) -> bytes:
    """Build the line of the output, with its newline."""
    answer = BatchResponse(response.status, response.headers.get("x-request-id", ""), msgspec.Raw(response.body))
    return _encode_result(custom_id, answer, None)


def build_unanswered(custom_id: str, code: str, message: str) -> bytes:
    """Build the line of a request that will not be answered."""
    return _encode_result(custom_id, None, BatchError(code, message))


def _encode_result(custom_id: str, response: BatchResponse | None, error: BatchError | None) -> bytes:
    return msgspec.json.encode(BatchResult(f"batch_req_{uuid.uuid4().hex}", custom_id, response, error)) + b"\n"


def parse_result(content: bytes) -> BatchResult:
    """Raises InvalidRequest."""
    try:
        return msgspec.json.decode(content, type=BatchResult)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"it is not a result of a batch: {error}") from None
