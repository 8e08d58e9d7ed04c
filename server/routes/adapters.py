"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: administrators' routes, because they read files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request

from serve_llm.server.adapters.registry import AdapterRegistry
from serve_llm.server.routes.app_state import AppState
from serve_llm.server.routes.document import describe_route
from serve_llm.server.routes.models import build_card
from serve_llm.server.schema.adapters import AdapterUnloaded, LoadAdapterRequest, UnloadAdapterRequest
from serve_llm.server.schema.common import parse_body
from serve_llm.server.schema.models import ModelCard


def create_adapter_router(
    state: AppState, registry: AdapterRegistry, share: Callable[[], Awaitable[None]] | None = None
) -> APIRouter:
    """Build the routes. share: tells the front ends about a change, and returns when they know it."""
    router = APIRouter()

    @router.post("/v1/load_lora_adapter", **describe_route(LoadAdapterRequest, ModelCard, needs_administrator=True))
    async def load_lora_adapter(request: Request) -> ModelCard:
        """Serve the adapter in a directory under a name, or load it again."""
        state.check_administrator(request)
        async with state.reading_body(request) as content:
            body = parse_body(LoadAdapterRequest, content, state.limits)
        await registry.load(body.lora_name, body.lora_path, bool(body.load_inplace))
        if share is not None:
            await share()
        return build_card(state, body.lora_name)

    @router.post(
        "/v1/unload_lora_adapter", **describe_route(UnloadAdapterRequest, AdapterUnloaded, needs_administrator=True)
    )
    async def unload_lora_adapter(request: Request) -> AdapterUnloaded:
        """Drop the name of an adapter. Requests that have started continue."""
        state.check_administrator(request)
        async with state.reading_body(request) as content:
            body = parse_body(UnloadAdapterRequest, content, state.limits)
        registry.unload(body.lora_name)
        if share is not None:
            await share()
        return AdapterUnloaded(id=body.lora_name)

    return router
