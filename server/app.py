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
from serve_llm.common.options.limits import Limits
from serve_llm.common.options.schema import Options
from serve_llm.server.adapters.registry import AdapterRegistry
from serve_llm.server.admission.controller import AdmissionController, BodyBudget
from serve_llm.server.batches.service import BatchService
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.engines.scaler import Scaler
from serve_llm.server.generate.dispatcher import Dispatcher, LocalDispatcher
from serve_llm.server.generate.generation import Generator
from serve_llm.server.http.anthropic import AnthropicErrorMiddleware
from serve_llm.server.http.auth import ADMINISTRATOR_PREFIX, ApiKeyMiddleware, name_owner
from serve_llm.server.http.errors import NotFound, RequestError, WrongMethod, answer_for, error_body
from serve_llm.server.http.paths import PathMiddleware
from serve_llm.server.http.request_id import RequestIdMiddleware
from serve_llm.server.metrics.http_meter import HttpMeter
from serve_llm.server.metrics.meter import BatchCounts, FrontEndCounts, ServerCounts, StoreUsage
from serve_llm.server.metrics.prometheus import PrometheusExporter
from serve_llm.server.metrics.vllm_names import choose_collector
from serve_llm.server.prompt.context import JobContext
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
from serve_llm.server.routes.missing_routes import explain_missing
from serve_llm.server.routes.plain_route import PlainRouteApp, add_routes
from serve_llm.server.routes.request_log import RequestLog
from serve_llm.server.routes.scaling import create_scaling_router
from serve_llm.server.schema.adapters import LoadAdapterRequest, UnloadAdapterRequest
from serve_llm.server.schema.batches import BatchCreation
from serve_llm.server.schema.chat import ChatEvent, ChatRequest
from serve_llm.server.schema.cohere import CohereEmbedRequest
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
from serve_llm.server.schema.responses import CompactRequest, InputTokensRequest, ResponseEvent, ResponsesRequest
from serve_llm.server.schema.scaling import ScaleRequest
from serve_llm.server.schema.tokenize import DetokenizeRequest, TokenizeRequest
from serve_llm.server.storage.responses import ResponseStore
from serve_llm.server.storage.storage import Storage

if TYPE_CHECKING:
    from serve_llm.server.front_ends.group import FrontEndGroup
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
    CompactRequest,
    BatchCreation,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    ScaleRequest,
    TokenizeRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    CohereEmbedRequest,
    RerankRequest,
    ScoreRequest,
    ClassificationRequest,
    PoolingRequest,
]

_BATCH_CONCURRENCY = 64  # requests per engine


class BuiltApp(NamedTuple):
    """The app, with parts to stop at the end: `admission` drains it, then `batches` is stopped and `prompts` is
    closed."""

    app: ASGIApp
    admission: AdmissionController
    prompts: PromptPool
    batches: BatchService | None  # None: no batches are stored


def create_app(
    replicas: Replicas,
    model: ServedModel,
    options: Options,
    storage: Storage,
    adapters: AdapterRegistry | None = None,
    tracing: Tracing | None = None,
    front_ends: FrontEndGroup | None = None,
    scaler: Scaler | None = None,
) -> BuiltApp:
    """Create the app that serves one model on engines that are ready. storage: the caller closes it. adapters: None:
    there are none yet. tracing: None: no traces. front_ends: processes that answer clients instead of this one and
    forward some requests to it. scaler: None: the number of engines is fixed."""
    adapters = adapters or AdapterRegistry(
        replicas.model_info, options.max_lora_rank, model.names, options.download_dir
    )
    replicas.usage.watch_adapters(adapters.adapters)
    admission = AdmissionController(replicas, options.max_queue)
    counts = _create_counts(
        admission.refused,
        StoreUsage() if storage.responses is None else storage.responses.usage,
        FrontEndCounts(1) if front_ends is None else front_ends.counts,
    )
    dispatcher = LocalDispatcher(replicas, admission)
    state = _create_state(dispatcher, model, options, adapters, counts, tracing, storage.responses)
    if front_ends is not None:
        front_ends.connect(str(model.directory), replicas, admission, adapters, counts, state.start_time)
    app = _create_fastapi(state, options.page)
    collector = choose_collector(options)(replicas, counts, model.names[0], options)
    num_ranks = options.tensor_parallel_size * options.pipeline_parallel_size
    sources = status.StatusSources(replicas, admission, PrometheusExporter(collector), num_ranks, front_ends, scaler)
    add_routes(app, status.create_server_router(state, sources))
    if scaler is not None:
        add_routes(app, create_scaling_router(state, scaler, options.drain_timeout))
    if options.enable_lora:
        share = None if front_ends is None else front_ends.share_adapters
        add_routes(app, create_adapter_router(state, adapters, share))
    batch_service = None
    if storage.batches is not None:
        inner = RequestIdMiddleware(AnthropicErrorMiddleware(app), HttpMeter())  # batch lines do not come over HTTP
        batch_service = BatchService(
            storage.batches,
            inner,
            admission,
            state.owners,
            state.limits,
            _choose_batch_concurrency(options),
            counts.batches,
        )
        add_routes(app, create_batch_router(state, batch_service))
    return BuiltApp(_wrap(app, options, counts.http), admission, state.prompts, batch_service)


class BuiltFrontEndApp(NamedTuple):
    """The app of a front end process. Its owner closes `prompts` at the end."""

    app: ASGIApp
    prompts: PromptPool
    counts: ServerCounts


def create_front_end_app(
    dispatcher: Dispatcher,
    model: ServedModel,
    options: Options,
    adapters: AdapterRegistry,
    refused: Counter[str],
    tracing: Tracing | None,
    start_time: int,
) -> BuiltFrontEndApp:
    """Create the app of a front end process: the routes that need nothing but the engines. Other routes are forwarded.

    refused: requests that the dispatcher refused itself, by reason. start_time: of the server, in Unix seconds.
    """
    counts = _create_counts(refused, StoreUsage(), FrontEndCounts(1))
    state = replace(_create_state(dispatcher, model, options, adapters, counts, tracing, None), start_time=start_time)
    app = _wrap(_create_fastapi(state, options.page), options, counts.http)
    return BuiltFrontEndApp(app, state.prompts, counts)


def _create_counts(refused: Counter[str], stored: StoreUsage, front_ends: FrontEndCounts) -> ServerCounts:
    paths = decisions.PATHS + generation.PATHS + infill.PATHS + messages.PATHS + responses.PATHS
    return ServerCounts(
        refused=refused,
        ignored_fields=Counter(dict.fromkeys(paths, 0)),
        http=HttpMeter(),
        stored=stored,
        batches=BatchCounts(),
        front_ends=front_ends,
    )


def _create_state(
    dispatcher: Dispatcher,
    model: ServedModel,
    options: Options,
    adapters: AdapterRegistry,
    counts: ServerCounts,
    tracing: Tracing | None,
    response_store: ResponseStore | None,
) -> AppState:
    model = replace(model, adapters=adapters.adapters)
    limits = options.limits
    context = JobContext(
        model,
        dispatcher.model_info,
        limits,
        trusts_templates=options.trust_request_chat_template,
        ignores_unknown_fields=options.unknown_fields == "ignore",
    )
    owners = tuple(map(name_owner, options.api_key))
    return AppState(
        dispatcher=dispatcher,
        model=model,
        generator=Generator(dispatcher, model, options.seed),
        ignored_fields=counts.ignored_fields,
        prompts=PromptPool(context, options),
        bodies=BodyBudget(_find_body_budget(limits, options.front_ends)),
        limits=limits,
        request_timeout=options.request_timeout,
        reasoning_field=options.reasoning_field,
        administrators=frozenset(
            index for index, key in enumerate(options.api_key) if key.startswith(ADMINISTRATOR_PREFIX)
        ),
        owners=owners or ("",),
        response_store=response_store,
        ignores_unknown_fields=context.ignores_unknown_fields,
        tracing=tracing,
        request_log=RequestLog(model.tokenizer, owners, options.max_log_len) if options.enable_log_requests else None,
    )


def _find_body_budget(limits: Limits, num_front_ends: int) -> int:
    """Return the total bytes of bodies being read. Front ends share them, but each can read one body of the maximum
    size."""
    share = max(limits.all_bodies_bytes // num_front_ends, limits.body_bytes)
    return min(share, limits.all_bodies_bytes)


def _create_fastapi(state: AppState, with_page: bool) -> FastAPI:
    app = FastAPI(title="serve-llm", version=VERSION, docs_url=None, redoc_url=None, redirect_slashes=False)
    for routes in (generation, decisions, infill, invocations, messages, responses, pooling, models, tokenize):
        add_routes(app, routes.create_router(state))
    add_routes(app, status.create_router())
    if with_page:
        add_routes(app, web_ui.create_router())
    app.add_exception_handler(ServeError, _answer_serve_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ClientDisconnect, _answer_disconnect)
    app.add_exception_handler(Exception, _answer_unexpected)
    app.openapi = lambda: build_openapi(app, _BODIES)  # type: ignore[method-assign]
    return app


def _wrap(app: FastAPI, options: Options, meter: HttpMeter) -> ASGIApp:
    """Add the middleware."""
    wrapped: ASGIApp = ApiKeyMiddleware(PlainRouteApp(app), options.api_key)
    if options.allowed_origins:  # outside the key check: browsers send preflight requests without the key
        wrapped = CORSMiddleware(
            wrapped,
            allow_origins=options.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("retry-after", "x-request-id", "request-id", "x-ignored-fields", "traceresponse"),
        )
    return PathMiddleware(RequestIdMiddleware(AnthropicErrorMiddleware(wrapped), meter))


def _choose_batch_concurrency(options: Options) -> int:
    """Return how many requests of stored batches run together while there are no other requests. They may not fill the
    queue."""
    num_running = min(options.max_num_seqs, _BATCH_CONCURRENCY) * options.max_engines
    return max(1, min(num_running, options.max_queue[0] // 2))


def _respond(error: ServeError, headers: Mapping[str, str] | None = None) -> Response:
    answer = answer_for(error)
    return Response(error_body(error), answer.status, {**answer.headers, **(headers or {})}, "application/json")


async def _answer_serve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServeError)
    return _respond(error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer requests with unknown paths or wrong methods, which the router refuses."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        return _respond(WrongMethod(f"{request.method} is not allowed on {path}"), error.headers)
    return _respond(NotFound(f"no such route: {request.method} {path}{explain_missing(request)}"))


async def _answer_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client has disconnected


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    """Answer after a bug. Starlette raises the exception again after this, so the traceback is logged."""
    return _respond(RequestError("internal error; the server's log says more"))
