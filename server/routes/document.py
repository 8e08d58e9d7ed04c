"""The documented shape of a route whose body is parsed by hand: OpenAPI from the same pydantic models.

Bodies are parsed by hand because clients (curl -d) send JSON under any content type, and because every problem is
answered in OpenAI's shape.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve_llm.server.schema.common import ErrorBody

_PROBLEMS = {400: "The request is at fault.", 404: "No such model.", 503: "Not ready, or shutting down."}


def described(
    request: type[BaseModel] | None, reply: type[BaseModel], event: type[BaseModel] | None = None
) -> dict[str, Any]:
    """Keyword arguments for a route's decorator. `event`: what a stream's events hold, where there is one."""
    content: dict[str, Any] = {}
    if event is not None:
        content["text/event-stream"] = {"schema": _reference(event)}
    found: dict[str, Any] = {
        "responses": {
            200: {"model": reply, **({"content": content} if content else {})},
            **{status: {"model": ErrorBody, "description": text} for status, text in _PROBLEMS.items()},
        },
    }
    if request is not None:
        body = {"required": True, "content": {"application/json": {"schema": _reference(request)}}}
        found["openapi_extra"] = {"requestBody": body}
    return found


def document(app: FastAPI, models: list[type[BaseModel]]) -> dict[str, Any]:
    """The app's OpenAPI document with the models that `described` refers to."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, found = models_json_schema(
            [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        app.openapi_schema = schema
    return app.openapi_schema


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
