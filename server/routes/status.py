"""GET /health, /ready, /status, /version and /metrics: what machines ask about the server itself."""

from __future__ import annotations

import platform
import time
from importlib.metadata import version

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from serve_llm.server.admission import MESSAGES
from serve_llm.server.errors import Unavailable
from serve_llm.server.routes.document import described
from serve_llm.server.routes.service import VERSION, Service
from serve_llm.server.schema.models import Health, Status, StatusEngine, StatusKv, StatusQueue, Version

TORCH_VERSION = version("torch")  # which only the engine imports


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health", **described(None, Health))
    async def health() -> Health:
        """The process lives."""
        return Health()

    @routes.get("/ready", **described(None, Health))
    async def ready() -> Health:
        """A request would be served now; else 503."""
        if (reason := service.gate.obstacle) is not None:
            raise Unavailable(MESSAGES[reason])
        return Health()

    @routes.get("/status", **described(None, Status))
    async def show_status() -> Status:
        """What the server is doing, for people and for scripts that watch it."""
        return status_of(service)

    @routes.get("/version", **described(None, Version))
    async def show_version() -> Version:
        return Version(version=VERSION)

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text form."""
        return Response(service.exposition.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return routes


def status_of(service: Service) -> Status:
    replicas, gate = service.replicas, service.gate
    return Status(
        phase="draining" if gate.draining else "serving" if replicas.ready else "recovering",
        model=service.model.names[0],
        uptime_seconds=int(time.time()) - service.started,
        engines=[
            StatusEngine(
                ready=engine.ready,
                num_ranks=service.num_ranks,
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
            num_open=gate.num_open,
            waiting_requests=gate.num_requests,
            waiting_prompt_tokens=gate.num_tokens,
            max_requests=gate.max_queue[0],
            max_prompt_tokens=gate.max_queue[1],
            refused=dict(gate.refused),
        ),
        restarts=replicas.num_restarts,
        first_cause=replicas.first_cause,
        versions={"serve-llm": VERSION, "python": platform.python_version(), "torch": TORCH_VERSION},
    )
