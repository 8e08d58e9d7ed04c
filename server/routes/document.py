"""OpenAPI descriptions of routes that parse their bodies themselves, generated from the pydantic models.

Routes parse bodies themselves because clients (curl -d) send JSON under any content type, and so that every error has
OpenAI's shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve_llm.server.http.anthropic_errors import OVERLOADED
from serve_llm.server.schema.common import ErrorBody
from serve_llm.server.schema.messages import MessageErrorBody

Json = dict[str, Any]

STORE_PROBLEMS = {507: "The disk of the store is full."}

_PROBLEMS = {
    400: "The request is at fault.",
    401: "No valid API key.",
    404: "No such model or object.",
    500: "The server or an engine failed.",
    503: "Not ready, overloaded, or shutting down, or a store cannot be used.",
}
_ADMINISTRATOR_PROBLEMS = {403: "The route needs the API key of an administrator."}
_BODY_PROBLEMS = {
    408: "The client stopped sending its request.",
    413: "The body, or what is stored already, is too large.",
    415: "The body's Content-Encoding is not supported.",
    504: "The request exceeded its time limit.",
}


def describe_route(
    request: type[BaseModel] | None,
    response: type[BaseModel],
    *events: type[BaseModel],
    body: Json | None = None,
    query: tuple[Json, ...] = (),
    is_anthropic: bool = False,
    needs_administrator: bool = False,
    problems: Mapping[int, str] | None = None,
) -> Json:
    """Build keyword arguments for a route's decorator.

    events: forms of the data of a stream's events, if the route can stream. body: the content of the request's body, if
    it is not JSON of `request`. query: made by `describe_parameter`. is_anthropic: errors have Anthropic's shape.
    problems: additional error statuses.
    """
    success: Json = {"model": response}
    if events:
        forms = [_reference(event) for event in events]
        success["content"] = {"text/event-stream": {"schema": forms[0] if len(forms) == 1 else {"oneOf": forms}}}
    extra: Json = {"parameters": list(query)} if query else {}
    if request is not None:
        body = {"application/json": {"schema": _reference(request)}}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": body}
    answers = describe_problems(body is not None, is_anthropic, needs_administrator, problems)
    return {"responses": {200: success, **answers}, "openapi_extra": extra}


def describe_problems(
    has_body: bool = False,
    is_anthropic: bool = False,
    needs_administrator: bool = False,
    problems: Mapping[int, str] | None = None,
) -> dict[int | str, Json]:
    """Describe the errors of a route, for its `responses`. problems: see `describe_route`."""
    statuses = {**_PROBLEMS, **(problems or {})}
    if needs_administrator:
        statuses |= _ADMINISTRATOR_PROBLEMS
    if has_body:
        statuses |= _BODY_PROBLEMS
    if is_anthropic:
        statuses[OVERLOADED] = statuses.pop(503)
    shape = MessageErrorBody if is_anthropic else ErrorBody
    return {status: {"model": shape, "description": text} for status, text in statuses.items()}


def describe_parameter(name: str, **schema: object) -> Json:
    """Describe a query parameter, which may be omitted."""
    return {"in": "query", "name": name, "required": False, "schema": schema}


def describe_page(max_limit: int = 100) -> tuple[Json, ...]:
    """Describe the query parameters that `routes.page.read_page` reads."""
    return (
        describe_parameter("limit", type="integer", minimum=1, maximum=max_limit, default=20),
        describe_parameter("order", type="string", enum=["asc", "desc"], default="desc"),
        describe_parameter("after", type="string"),
    )


def build_openapi(app: FastAPI, models: list[type[BaseModel]]) -> Json:
    """Build the app's OpenAPI document, with the schemas of the models that `describe_route` refers to."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        _, schemas = models_json_schema(
            [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        _remove_unprocessable(document)
        app.openapi_schema = document
    return app.openapi_schema


def _remove_unprocessable(document: Json) -> None:
    """Remove the 422 that FastAPI describes for every route with a parameter. Ours accept any text."""
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
