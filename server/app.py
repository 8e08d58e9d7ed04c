"""Build the ASGI app: state, routes, error handlers and middleware, all in `create_app`; nothing is global."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from serve_llm.common.errors import ServeError
from serve_llm.common.options.schema import Options
from serve_llm.server.adapters.registry import AdapterRegistry
from serve_llm.server.admission.controller import AdmissionController, BodyBudget
from serve_llm.server.batches.service import BatchService
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.generate.generation import Generator
from serve_llm.server.http.anthropic import AnthropicErrorMiddleware
from serve_llm.server.http.auth import ADMINISTRATOR_PREFIX, ApiKeyMiddleware, name_owner
from serve_llm.server.http.errors import NotFound, RequestError, WrongMethod, answer_for, error_body
from serve_llm.server.http.paths import PathMiddleware
from serve_llm.server.http.request_id import RequestIdMiddleware
from serve_llm.server.metrics.meter import BatchCounts, ServerCounts, StoreUsage
from serve_llm.server.metrics.prometheus import PrometheusExporter
from serve_llm.server.prompt.context import Context
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pool import PromptPool
from serve_llm.server.routes import (
    decisions,
    generation,
    infill,
    invocations,
    messages,
    models,
    pooling,
    responses,
    status,
    tokenize,
    web_ui,
)
from serve_llm.server.routes.adapters import create_adapter_router
from serve_llm.server.routes.app_state import VERSION, AppState
from serve_llm.server.routes.batches import create_batch_router
from serve_llm.server.routes.document import build_openapi
from serve_llm.server.schema.adapters import LoadAdapterRequest, UnloadAdapterRequest
from serve_llm.server.schema.batches import BatchCreation
from serve_llm.server.schema.chat import ChatEvent, ChatRequest
from serve_llm.server.schema.completions import Completion, CompletionRequest
from serve_llm.server.schema.decisions import DecisionRequest
from serve_llm.server.schema.infill import InfillEvent, InfillRequest
from serve_llm.server.schema.messages import CountTokensRequest, MessageEvent, MessagesRequest
from serve_llm.server.schema.pooling import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from serve_llm.server.schema.responses import InputTokensRequest, ResponseEvent, ResponsesRequest
from serve_llm.server.schema.tokenize import DetokenizeRequest, TokenizeRequest
from serve_llm.server.storage.storage import Storage

if TYPE_CHECKING:
    from serve_llm.server.tracing.tracing import Tracing  # imports an optional dependency

_BODIES: list[type[BaseModel]] = [
    CompletionRequest,
    Completion,
    ChatRequest,
    ChatEvent,
    DecisionRequest,
    InfillRequest,
    InfillEvent,
    MessagesRequest,
    MessageEvent,
    CountTokensRequest,
    ResponsesRequest,
    ResponseEvent,
    InputTokensRequest,
    BatchCreation,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    TokenizeRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    ClassificationRequest,
    PoolingRequest,
]

# Beginnings of paths that an option adds.
_OPTIONAL_ROUTES = {
    "/v1/responses/": "--responses-store",
    "/v1/files": "--batches-dir",
    "/v1/batches": "--batches-dir",
    "/v1/load_lora_adapter": "--enable-lora",
    "/v1/unload_lora_adapter": "--enable-lora",
}
_BATCH_CONCURRENCY = 64  # requests per engine


class BuiltApp(NamedTuple):
    """The app with the parts that its owner ends: `admission` drains it, then `batches` is stopped, `prompts` and
    `storage` are closed."""

    app: ASGIApp
    admission: AdmissionController
    prompts: PromptPool
    storage: Storage
    batches: BatchService | None  # None: batches are not stored


def create_app(
    replicas: Replicas,
    model: ServedModel,
    options: Options,
    adapters: AdapterRegistry | None = None,
    tracing: Tracing | None = None,
) -> BuiltApp:
    """The app that serves one model on engines that are ready. adapters: None: there are none yet. tracing: None: there
    are no traces. Raises OptionError if the storage cannot be opened."""
    adapters = adapters or AdapterRegistry(replicas.facts, options.max_lora_rank, model.names)
    model = replace(model, adapters=adapters.adapters)
    limits = options.limits
    storage = Storage.open(options)
    context = Context(
        model,
        replicas.facts,
        limits,
        trusts_templates=options.trust_request_chat_template,
        ignores_unknown_fields=options.unknown_fields == "ignore",
    )
    prompts = PromptPool(context, options)
    admission = AdmissionController(replicas, options.max_queue)
    statuses = Counter({200: 0})  # so that the metric is there from the start
    ignored_fields = Counter(
        dict.fromkeys(decisions.PATHS + generation.PATHS + infill.PATHS + messages.PATHS + responses.PATHS, 0)
    )
    counts = ServerCounts(
        refused=admission.refused,
        ignored_fields=ignored_fields,
        statuses=statuses,
        stored=StoreUsage() if storage.responses is None else storage.responses.usage,
        batches=BatchCounts(),
    )
    state = AppState(
        replicas=replicas,
        model=model,
        admission=admission,
        generator=Generator(replicas, model, options.seed, admission),
        exporter=PrometheusExporter(replicas.engines, counts, model.names[0], options.metrics_prefix),
        ignored_fields=ignored_fields,
        prompts=prompts,
        bodies=BodyBudget(limits.all_bodies_bytes),
        limits=limits,
        request_timeout=options.request_timeout,
        num_ranks=options.tensor_parallel_size * options.pipeline_parallel_size,
        reasoning_field=options.reasoning_field,
        administrators=frozenset(
            index for index, key in enumerate(options.api_key) if key.startswith(ADMINISTRATOR_PREFIX)
        ),
        owners=tuple(map(name_owner, options.api_key)) or ("",),
        response_store=storage.responses,
        tracing=tracing,
    )
    app = FastAPI(title="serve-llm", version=VERSION, redoc_url=None, redirect_slashes=False)
    for routes in (generation, decisions, infill, invocations, messages, responses, pooling, models, tokenize, status):
        app.include_router(routes.create_router(state))
    app.include_router(web_ui.create_router())
    if options.enable_lora:
        app.include_router(create_adapter_router(state, adapters))
    batch_service = None
    if storage.batches is not None:
        inner = RequestIdMiddleware(AnthropicErrorMiddleware(app), Counter())  # lines of batches are not over HTTP
        batch_service = BatchService(
            storage.batches, inner, admission, state.owners, limits, _choose_batch_concurrency(options), counts.batches
        )
        app.include_router(create_batch_router(state, batch_service))
    app.add_exception_handler(ServeError, _answer_serve_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_disconnect)
    app.add_exception_handler(Exception, _answer_unexpected)
    app.openapi = lambda: build_openapi(app, _BODIES)  # type: ignore[method-assign]
    wrapped: ASGIApp = ApiKeyMiddleware(app, options.api_key)
    if options.allowed_origins:  # outside the key check: browsers send preflight requests without the key
        wrapped = CORSMiddleware(
            wrapped,
            allow_origins=options.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("retry-after", "x-request-id", "request-id", "x-ignored-fields", "traceresponse"),
        )
    with_ids = RequestIdMiddleware(AnthropicErrorMiddleware(wrapped), statuses)
    return BuiltApp(PathMiddleware(with_ids), admission, prompts, storage, batch_service)


def _choose_batch_concurrency(options: Options) -> int:
    """Requests of stored batches that run together while nobody else is served. They may not fill the queue."""
    num_running = min(options.max_num_seqs, _BATCH_CONCURRENCY) * options.data_parallel_size
    return max(1, min(num_running, options.max_queue[0] // 2))


def _respond(error: ServeError, headers: Mapping[str, str] | None = None) -> Response:
    answer = answer_for(error)
    return Response(error_body(error), answer.status, {**answer.headers, **(headers or {})}, "application/json")


async def _answer_serve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServeError)
    return _respond(error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, which the router refuses."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return _respond(WrongMethod(f"{request.method} is not allowed on {request.url.path}"), error.headers)
    path = request.url.path
    option = next((option for prefix, option in _OPTIONAL_ROUTES.items() if path.startswith(prefix)), None)
    hint = "" if option is None else f"; it may need the option {option}"
    return _respond(NotFound(f"no such route: {request.method} {path}{hint}"))


async def _answer_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    """A bug. Starlette raises the exception again after this, so the traceback is logged."""
    return _respond(RequestError("internal error; the server's log says more"))
