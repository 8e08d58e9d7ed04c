"""Lines of OpenAI's batch format: requests, `{"custom_id", "method", "url", "body"}`, and their results."""

from __future__ import annotations

import uuid
from typing import Annotated

import msgspec

from serve_llm.server.batches.local_call import LocalResponse
from serve_llm.server.http.errors import InvalidRequest

ENDPOINTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
)
RESULT_PREFIX = b'{"id":"batch_req_'  # how every result line begins


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the input. `body` is that of a request to `url`, as it was sent."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1)]
    method: str
    url: str
    body: msgspec.Raw


class BatchResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Why a request has no response: its batch expired or was cancelled."""

    code: str
    message: str


class BatchResult(msgspec.Struct):
    """One line of the output. What went wrong with a request that was answered is in its response."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchError | None = None


def parse_request(content: bytes) -> BatchRequest:
    """Raises InvalidRequest."""
    try:
        line = msgspec.json.decode(content, type=BatchRequest)
        body = msgspec.json.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"it is not a line of a batch: {error}") from None
    if line.method != "POST":
        raise InvalidRequest(f"method must be POST, not {line.method!r}", "method")
    if line.url not in ENDPOINTS:
        raise InvalidRequest(f"url must be one of {', '.join(ENDPOINTS)}, not {line.url!r}", "url")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be an object", "body")
    if body.get("stream"):
        raise InvalidRequest("body: stream is not possible in a batch", "stream")
    if body.get("background"):
        raise InvalidRequest("body: background is not possible in a batch", "background")
    return line


def build_result(custom_id: str, response: LocalResponse) -> bytes:
    """The line of the output, with its newline."""
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
