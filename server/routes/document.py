"""OpenAPI descriptions of routes that parse their bodies themselves, generated from the pydantic models.

Routes parse bodies themselves because clients (curl -d) send JSON under any content type, and so that every error has
OpenAI's shape.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve_llm.server.schema.common import ErrorBody

_PROBLEMS = {400: "The request is at fault.", 404: "No such model.", 503: "Not ready, or shutting down."}


def describe_route(
    request: type[BaseModel] | None, response: type[BaseModel], event: type[BaseModel] | None = None
) -> dict[str, Any]:
    """Keyword arguments for a route's decorator. event: the data of a stream's events, if the route can stream."""
    success: dict[str, Any] = {"model": response}
    if event is not None:
        success["content"] = {"text/event-stream": {"schema": _reference(event)}}
    problems = {status: {"model": ErrorBody, "description": text} for status, text in _PROBLEMS.items()}
    description: dict[str, Any] = {"responses": {200: success, **problems}}
    if request is not None:
        body = {"required": True, "content": {"application/json": {"schema": _reference(request)}}}
        description["openapi_extra"] = {"requestBody": body}
    return description


def build_openapi(app: FastAPI, models: list[type[BaseModel]]) -> dict[str, Any]:
    """The app's OpenAPI document, with the schemas of the models that `describe_route` refers to."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, schemas = models_json_schema(
            [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        app.openapi_schema = document
    return app.openapi_schema


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
