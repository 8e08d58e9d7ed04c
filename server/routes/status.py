"""GET /health, /ping, /ready, /load, /status, /version and /metrics."""

from __future__ import annotations

import platform
import time
from importlib.metadata import version

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from serve_llm.server.admission.controller import MESSAGES
from serve_llm.server.http.errors import Unavailable
from serve_llm.server.routes.app_state import VERSION, AppState
from serve_llm.server.routes.document import describe_route
from serve_llm.server.schema.models import Health, Load, Status, StatusEngine, StatusKv, StatusQueue, Version

TORCH_VERSION = version("torch")  # from its metadata: only the engine imports torch


def create_router(state: AppState) -> APIRouter:
    router = APIRouter()

    @router.get("/health", **describe_route(None, Health))
    async def health() -> Health:
        """The process lives."""
        return Health()

    @router.get("/ping", **describe_route(None, Health))
    async def ping() -> Health:
        """The same as /health, as SageMaker asks for it."""
        return Health()

    @router.get("/load", **describe_route(None, Load))
    async def show_load() -> Load:
        """The number of open requests, for load balancers."""
        return Load(server_load=state.admission.num_open)

    @router.get("/ready", **describe_route(None, Health))
    async def ready() -> Health:
        """A request would be served now; else 503."""
        reason = state.admission.obstacle
        if reason is not None:
            raise Unavailable(MESSAGES[reason])
        return Health()

    @router.get("/status", **describe_route(None, Status))
    async def show_status() -> Status:
        """What the server is doing, for people and for scripts that watch it."""
        return build_status(state)

    @router.get("/version", **describe_route(None, Version))
    async def show_version() -> Version:
        return Version(version=VERSION)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text form."""
        return Response(state.exporter.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def build_status(state: AppState) -> Status:
    replicas = state.replicas
    admission = state.admission
    return Status(
        phase="draining" if admission.draining else "serving" if replicas.ready else "recovering",
        model=state.model.names[0],
        uptime_seconds=int(time.time()) - state.start_time,
        engines=[
            StatusEngine(
                ready=engine.ready,
                num_ranks=state.num_ranks,
                num_running=engine.stats.num_running,
                num_waiting=engine.stats.num_waiting,
                kv_cache=StatusKv(
                    tokens=engine.facts.kv_cache_tokens,
                    blocks=engine.facts.num_kv_blocks,
                    usage=engine.stats.kv_cache_usage,
                ),
            )
            for engine in replicas.engines
        ],
        queue=StatusQueue(
            num_open=admission.num_open,
            waiting_requests=admission.num_waiting,
            waiting_prompt_tokens=admission.num_waiting_tokens,
            max_requests=admission.max_queue[0],
            max_prompt_tokens=admission.max_queue[1],
            refused=dict(admission.refused),
        ),
        restarts=replicas.num_restarts,
        first_cause=replicas.first_cause,
        versions={"serve-llm": VERSION, "python": platform.python_version(), "torch": TORCH_VERSION},
    )
