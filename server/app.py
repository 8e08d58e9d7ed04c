"""The ASGI app: routes, errors, key, request ids. `create_app` is the only way to one; nothing is global."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from serve_llm.engine.errors import ServeError
from serve_llm.engine.limits import Limits
from serve_llm.engine.options import Options
from serve_llm.server.admission import Bodies, Gate
from serve_llm.server.auth import KeyCheck
from serve_llm.server.errors import NotFound, RequestError, WrongMethod, answer_for, error_body
from serve_llm.server.generate import Generator
from serve_llm.server.logs import RequestIds
from serve_llm.server.metrics import Exposition
from serve_llm.server.prompt.jobs import Context
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pool import PromptPool
from serve_llm.server.replicas import Replicas
from serve_llm.server.routes import chat, completions, models, status, tokenize
from serve_llm.server.routes.document import document
from serve_llm.server.routes.service import VERSION, Service
from serve_llm.server.schema.chat import ChatEvent, ChatRequest
from serve_llm.server.schema.completions import Completion, CompletionRequest
from serve_llm.server.schema.tokenize import DetokenizeRequest, TokenizeRequest
from serve_llm.server.statistics import Statistics

_BODIES: list[type[BaseModel]] = [
    CompletionRequest,
    Completion,
    ChatRequest,
    ChatEvent,
    TokenizeRequest,
    DetokenizeRequest,
]


def create_app(replicas: Replicas, model: ServedModel, options: Options) -> tuple[ASGIApp, Gate, PromptPool]:
    """The app that serves one model on engines that are started already, the gate that drains it, and the pool that is
    to be closed in the end."""
    limits = Limits.read(options.limit)
    prompts = PromptPool(Context(model, replicas.facts, limits, options.trust_request_chat_template), options)
    replicas.on_step = Statistics(replicas.engines).count_step
    gate = Gate(replicas, options.max_queue)
    service = Service(
        replicas=replicas,
        model=model,
        gate=gate,
        generator=Generator(replicas, model, options.seed),
        exposition=Exposition(replicas.engines, gate, model.names[0], options.metrics_prefix),
        prompts=prompts,
        bodies=Bodies(limits.all_bodies_bytes),
        limits=limits,
        request_timeout=options.request_timeout,
        num_ranks=options.tensor_parallel_size * options.pipeline_parallel_size,
    )
    app = FastAPI(title="serve-llm", version=VERSION, redoc_url=None, redirect_slashes=False)
    for routes in (completions, chat, models, tokenize, status):
        app.include_router(routes.router(service))
    app.add_exception_handler(ServeError, _serve_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_exception_handler(Exception, _unexpected)
    app.openapi = lambda: document(app, _BODIES)  # type: ignore[method-assign]
    secured: ASGIApp = KeyCheck(app, options.api_key)
    if options.allowed_origins:  # in front of the key check: a browser asks first, without the key
        shown = ("retry-after", "x-request-id")
        secured = CORSMiddleware(secured, options.allowed_origins, ("GET", "POST"), ("*",), expose_headers=shown)
    return RequestIds(secured), gate, prompts


def _respond(error: ServeError, headers: Mapping[str, str] | None = None) -> Response:
    answer = answer_for(error)
    return Response(error_body(error), answer.status, {**answer.headers, **(headers or {})}, "application/json")


async def _serve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServeError)
    return _respond(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses: unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return _respond(WrongMethod(f"{request.method} is not allowed on {request.url.path}"), error.headers)
    return _respond(NotFound(f"no such route: {request.method} {request.url.path}"))


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _unexpected(request: Request, error: Exception) -> Response:
    """A bug of ours; the log has the traceback (the server prints what is raised again after this)."""
    return _respond(RequestError("internal error; the server's log says more"))
