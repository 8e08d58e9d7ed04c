"""GET /health, /ready, /version and /metrics: what machines ask about the server itself."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response

from serve_llm.server.routes.document import described
from serve_llm.server.routes.service import VERSION, Service
from serve_llm.server.schema.models import Health, Version


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health", **described(None, Health))
    async def health() -> Health:
        """The process lives."""
        return Health()

    @routes.get("/ready", **described(None, Health))
    async def ready() -> Health:
        """A request would be served now; else 503."""
        service.gate.check()
        return Health()

    @routes.get("/version", **described(None, Version))
    async def show_version() -> Version:
        return Version(version=VERSION)

    @routes.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text form."""
        return Response(service.exposition.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return routes
