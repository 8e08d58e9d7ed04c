"""What a request can be answered with instead of text, and the one table from error to HTTP status.

ServeError (engine.errors)
  RequestError               one request cannot be served; `param` names the field at fault, if one is
    InvalidRequest     400   a value is missing, of the wrong type, out of range, or does not fit the model
      ContextTooLong   400   prompt and generated text do not fit; code `context_length_exceeded`, as clients know it
      Unsupported      400   OpenAI's API has it, this server does not; code `unsupported`, so that clients do not retry
    Unauthorized       401   no key, or a wrong one
    NotFound           404   no such route
    ModelNotFound      404   no such model
    WrongMethod        405
    RequestStalled     408   the client stopped in the middle of its request
    TooLarge           413   the body is longer than the server reads
    HeaderTooLarge     431
    Unavailable        503   starting, draining, full, or the engine is gone; retry later
    DeadlineExceeded   504   it took longer than --request-timeout, or than the client's own limit
    GenerationFailed   500   the engine gave up on this request

Every body has OpenAI's shape: {"error": {"message", "type", "param", "code"}}. Knows no HTTP library: the offline `LLM`
raises the same errors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

import msgspec

from serve_llm.engine.errors import ServeError


class RequestError(ServeError):
    """`message` is one clear line for whoever sent the request."""

    def __init__(self, message: str, param: str | None = None) -> None:
        self.message = _short(message, 1000)
        self.param = None if param is None else _short(param, 100)
        super().__init__(self.message)


def _short(text: str, most: int) -> str:
    """A message may quote what a client sent, which may be megabytes."""
    return text if len(text) <= most else f"{text[:most]}..."


class InvalidRequest(RequestError, ValueError):
    pass


class Unsupported(InvalidRequest):
    pass


class ContextTooLong(InvalidRequest):
    pass


class Unauthorized(RequestError):
    pass


class NotFound(RequestError):
    pass


class ModelNotFound(RequestError):
    pass


class WrongMethod(RequestError):
    pass


class RequestStalled(RequestError):
    pass


class TooLarge(RequestError):
    pass


class HeaderTooLarge(RequestError):
    pass


class Unavailable(RequestError):
    """`retry_after`: seconds after which it may be otherwise."""

    def __init__(self, message: str, param: str | None = None, *, retry_after: int = 1) -> None:
        super().__init__(message, param)
        self.retry_after = retry_after


class DeadlineExceeded(RequestError):
    pass


class GenerationFailed(RequestError):
    pass


class Answer(NamedTuple):
    status: int
    type: str
    code: str | None
    headers: dict[str, str]


ANSWERS: dict[type[ServeError], Answer] = {
    Unsupported: Answer(400, "invalid_request_error", "unsupported", {}),
    ContextTooLong: Answer(400, "invalid_request_error", "context_length_exceeded", {}),
    InvalidRequest: Answer(400, "invalid_request_error", None, {}),
    Unauthorized: Answer(401, "invalid_request_error", "invalid_api_key", {"www-authenticate": "Bearer"}),
    ModelNotFound: Answer(404, "invalid_request_error", "model_not_found", {}),
    NotFound: Answer(404, "invalid_request_error", "not_found", {}),
    WrongMethod: Answer(405, "invalid_request_error", "method_not_allowed", {}),
    RequestStalled: Answer(408, "invalid_request_error", "request_stalled", {}),
    TooLarge: Answer(413, "invalid_request_error", "body_too_large", {}),
    HeaderTooLarge: Answer(431, "invalid_request_error", "header_too_large", {}),
    Unavailable: Answer(503, "server_error", "unavailable", {}),
    DeadlineExceeded: Answer(504, "server_error", "deadline_exceeded", {}),
    GenerationFailed: Answer(500, "server_error", "generation_failed", {}),
    ServeError: Answer(500, "server_error", None, {}),
}


def answer_for(error: ServeError) -> Answer:
    """The table's row of the nearest class that has one."""
    answer = next(ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS)
    if isinstance(error, Unavailable):
        return answer._replace(headers={"retry-after": str(error.retry_after)})
    return answer


def error_body(error: ServeError) -> bytes:
    """The JSON object that a client gets, as one line."""
    answer = answer_for(error)
    param = error.param if isinstance(error, RequestError) else None
    return msgspec.json.encode(
        {"error": {"message": str(error), "type": answer.type, "param": param, "code": answer.code}}
    )


async def send_error(error: ServeError, send: Callable[[MutableMapping[str, Any]], Awaitable[None]]) -> None:
    """The whole answer on plain ASGI, for what stands in front of the app."""
    answer = answer_for(error)
    body = error_body(error)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **answer.headers}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
