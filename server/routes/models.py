"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter

from serve_llm.server.routes.document import described
from serve_llm.server.routes.service import Service
from serve_llm.server.schema.models import ModelCard, ModelList


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=service.started,
            root=service.model.root,
            max_model_len=service.replicas.facts.max_model_len,
        )

    @routes.get("/v1/models", **described(None, ModelList))
    async def list_models() -> ModelList:
        """The served model, once for each of its names."""
        return ModelList(data=[card(name) for name in service.model.names])

    @routes.get("/v1/models/{name:path}", **described(None, ModelCard))
    async def retrieve_model(name: str) -> ModelCard:
        """One served model."""
        return card(service.model.check_name(name))

    return routes
