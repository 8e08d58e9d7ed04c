"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter

from serve_llm.server.routes.app_state import AppState
from serve_llm.server.routes.document import describe_route
from serve_llm.server.schema.models import ModelCard, ModelList


def build_card(state: AppState, name: str) -> ModelCard:
    """Build the card of the base model under one of its names, or of an adapter."""
    adapter = state.model.find_adapter(name)
    return ModelCard(
        id=name,
        created=state.start_time,
        root=state.model.root if adapter is None else adapter.directory,
        parent=None if adapter is None else state.model.names[0],
        max_model_len=state.dispatcher.model_info.max_model_len,
        display_name=name,
        created_at=datetime.fromtimestamp(state.start_time, UTC).isoformat(),
    )


def create_router(state: AppState) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", **describe_route(None, ModelList))
    async def list_models() -> ModelList:
        """The served model, once for each of its names, and its adapters."""
        names = [*state.model.names, *state.model.adapters]
        return ModelList(data=[build_card(state, name) for name in names], first_id=names[0], last_id=names[-1])

    @router.get("/v1/models/{name:path}", **describe_route(None, ModelCard))
    async def retrieve_model(name: str) -> ModelCard:
        """One served model."""
        return build_card(state, name)

    return router
