"""The shape of errors in Anthropic's API, with its types and its status of an overloaded server."""

from __future__ import annotations

import msgspec

from serve_llm.common.errors import ServeError
from serve_llm.server.http.errors import THREAD_UNSUPPORTED, ContextTooLong, Unavailable, answer_for

OVERLOADED = 529
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_CODES = {THREAD_UNSUPPORTED}  # that Anthropic's API has too


def describe_error(error: ServeError) -> dict[str, object]:
    """The error as an event of a stream."""
    status = 503 if isinstance(error, Unavailable) else answer_for(error).status
    return _describe(status, str(error))


def translate_body(body: bytes, status: int, request_id: str) -> bytes:
    """body: as `http.errors.error_body` writes it."""
    if not body:
        return body
    error = msgspec.json.decode(body)["error"]
    details = {"error_code": error["code"]} if error["code"] in _CODES else None
    return msgspec.json.encode({**_describe(status, error["message"], details), "request_id": request_id})


def reword_long_prompt(error: ContextTooLong) -> ContextTooLong:
    """The error with the two numbers where Anthropic's clients look for them."""
    if error.sizes is None:
        return error
    num_tokens, most = error.sizes
    return ContextTooLong(f"prompt is too long: {num_tokens} tokens > {most} maximum", error.param)


def translate_status(status: int) -> int:
    return OVERLOADED if status == 503 else status


def _describe(status: int, message: str, details: dict[str, str] | None = None) -> dict[str, object]:
    kind = _TYPES.get(translate_status(status), "api_error")
    error = {"type": kind, "message": message} | ({"details": details} if details else {})
    return {"type": "error", "error": error}
