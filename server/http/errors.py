"""Errors of requests, and the table that maps them to HTTP statuses.

ServeError (common.errors)
  RequestError               one request cannot be served; `param` names the invalid field, if any
    InvalidRequest     400   a value is missing, of the wrong type, out of range, or does not fit the model or others
      ContextTooLong   400   prompt and output do not fit; code `context_length_exceeded`, as in OpenAI's API
      Unsupported      400   part of OpenAI's API, but not of this server's; code `unsupported`, so clients do not retry
        ThreadUnsupported   400  the server keeps no conversations; Anthropic's clients send them whole after its code
        UnsupportedEncoding 415  the body is compressed in a way that the server does not read
    Unauthorized       401   no valid API key
    NotFound           404   no such route
    ModelNotFound      404   no such model
    ResponseNotFound   404   no such stored response to continue
    ObjectNotFound     404   no such stored response, file or batch
    WrongMethod        405
    RequestStalled     408   the client stopped sending its request
    TooLarge           413   the body exceeds a limit
    HeaderTooLarge     431
    Unavailable        503   starting, draining, full, or without an engine; retry later
      StoreError       503   a store of responses, files or batches cannot be used; the message names it
        StoreFull      507   its disk is full
    DeadlineExceeded   504   the request exceeded --request-timeout or the client's own limit
    GenerationFailed   500   the engine failed this request

Every body has OpenAI's shape: {"error": {"message", "type", "param", "code"}}. The offline `LLM` raises the same
errors, so this module imports no HTTP library.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

import msgspec

from serve_llm.common.errors import AdapterError, ServeError

THREAD_UNSUPPORTED = "thread_unsupported_request"  # Anthropic's code


class RequestError(ServeError):
    """`message` is one clear line for the client."""

    def __init__(self, message: str, param: str | None = None) -> None:
        self.message = _shorten(message, 1000)
        self.param = None if param is None else _shorten(param, 100)
        super().__init__(self.message)


def _shorten(text: str, max_characters: int) -> str:
    """Truncate a message, which may quote megabytes of client input."""
    return text if len(text) <= max_characters else f"{text[:max_characters]}..."


class InvalidRequest(RequestError, ValueError):
    pass


class Unsupported(InvalidRequest):
    pass


class ThreadUnsupported(Unsupported):
    pass


class UnsupportedEncoding(Unsupported):
    pass


class ContextTooLong(InvalidRequest):
    """sizes: the prompt's tokens (or a lower bound) and the limit; None unless the prompt alone is too long."""

    def __init__(self, message: str, param: str | None = None, sizes: tuple[int, int] | None = None) -> None:
        super().__init__(message, param)
        self.sizes = sizes


class Unauthorized(RequestError):
    pass


class Forbidden(RequestError):
    pass


class NotFound(RequestError):
    pass


class ModelNotFound(RequestError):
    pass


class ResponseNotFound(RequestError):
    pass


class ObjectNotFound(RequestError):
    pass


class WrongMethod(RequestError):
    pass


class Conflict(RequestError):
    pass


class RequestStalled(RequestError):
    pass


class TooLarge(RequestError):
    pass


class HeaderTooLarge(RequestError):
    pass


class Unavailable(RequestError):
    """retry_after: seconds after which a retry may succeed."""

    def __init__(self, message: str, param: str | None = None, *, retry_after: int = 1) -> None:
        super().__init__(message, param)
        self.retry_after = retry_after


class StoreError(Unavailable):
    pass


class StoreFull(StoreError):
    pass


class DeadlineExceeded(RequestError):
    pass


class GenerationFailed(RequestError):
    pass


class ErrorResponse(NamedTuple):
    status: int
    type: str
    code: str | None
    headers: dict[str, str]


ANSWERS: dict[type[ServeError], ErrorResponse] = {
    UnsupportedEncoding: ErrorResponse(
        415, "invalid_request_error", "unsupported", {"accept-encoding": "gzip, deflate"}
    ),
    ThreadUnsupported: ErrorResponse(400, "invalid_request_error", THREAD_UNSUPPORTED, {}),
    Unsupported: ErrorResponse(400, "invalid_request_error", "unsupported", {}),
    ContextTooLong: ErrorResponse(400, "invalid_request_error", "context_length_exceeded", {}),
    InvalidRequest: ErrorResponse(400, "invalid_request_error", None, {}),
    Unauthorized: ErrorResponse(401, "invalid_request_error", "invalid_api_key", {"www-authenticate": "Bearer"}),
    Forbidden: ErrorResponse(403, "invalid_request_error", "forbidden", {}),
    ModelNotFound: ErrorResponse(404, "invalid_request_error", "model_not_found", {}),
    ResponseNotFound: ErrorResponse(404, "invalid_request_error", "previous_response_not_found", {}),
    ObjectNotFound: ErrorResponse(404, "invalid_request_error", "not_found", {}),
    NotFound: ErrorResponse(404, "invalid_request_error", "not_found", {}),
    WrongMethod: ErrorResponse(405, "invalid_request_error", "method_not_allowed", {}),
    RequestStalled: ErrorResponse(408, "invalid_request_error", "request_stalled", {}),
    Conflict: ErrorResponse(409, "invalid_request_error", "conflict", {}),
    TooLarge: ErrorResponse(413, "invalid_request_error", "body_too_large", {}),
    HeaderTooLarge: ErrorResponse(431, "invalid_request_error", "header_too_large", {}),
    AdapterError: ErrorResponse(400, "invalid_request_error", "invalid_adapter", {}),
    Unavailable: ErrorResponse(503, "server_error", "unavailable", {}),
    StoreError: ErrorResponse(503, "server_error", "store_unavailable", {}),
    StoreFull: ErrorResponse(507, "server_error", "store_full", {}),
    DeadlineExceeded: ErrorResponse(504, "server_error", "deadline_exceeded", {}),
    GenerationFailed: ErrorResponse(500, "server_error", "generation_failed", {}),
    ServeError: ErrorResponse(500, "server_error", None, {}),
}


def answer_for(error: ServeError) -> ErrorResponse:
    """The entry of the nearest base class in `ANSWERS`."""
    answer = next(ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS)
    if isinstance(error, Unavailable):
        return answer._replace(headers={"retry-after": str(error.retry_after)})
    return answer


def error_body(error: ServeError) -> bytes:
    """The JSON body of the response, on one line."""
    answer = answer_for(error)
    param = error.param if isinstance(error, RequestError) else None
    return msgspec.json.encode(
        {"error": {"message": str(error), "type": answer.type, "param": param, "code": answer.code}}
    )


async def send_error(error: ServeError, send: Callable[[MutableMapping[str, Any]], Awaitable[None]]) -> None:
    """Send the complete response over plain ASGI, for middleware around the app."""
    answer = answer_for(error)
    body = error_body(error)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **answer.headers}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
