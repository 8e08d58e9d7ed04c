"""Query parameters of routes that list stored objects, page by page."""

from __future__ import annotations

import re

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.storage.page import Page

DEFAULT_LIMIT = 20


def read_page(request: Request, max_limit: int = 100) -> Page:
    """Raises InvalidRequest."""
    limit = read_count(request, "limit", DEFAULT_LIMIT)
    if not 1 <= limit <= max_limit:
        raise InvalidRequest(f"limit must be from 1 to {max_limit}", "limit")
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", "order")
    return Page(limit, order == "asc", request.query_params.get("after"))


def build_page(objects: list[bytes], has_more: bool) -> Response:
    """Build a page. objects: the JSON of each, with an id."""
    items = [from_json(content) for content in objects]
    return JSONResponse(
        {
            "object": "list",
            "data": items,
            "first_id": items[0]["id"] if items else None,
            "last_id": items[-1]["id"] if items else None,
            "has_more": has_more,
        }
    )


def read_count(request: Request, name: str, default: int) -> int:
    """Read a whole number from the query. Raises InvalidRequest."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise InvalidRequest(f"{name} must be a whole number", name)
    return int(text)


def read_flag(request: Request, name: str) -> bool:
    """Raises InvalidRequest."""
    text = request.query_params.get(name, "false").lower()  # Python's HTTP libraries may write True
    if text not in ("true", "false"):
        raise InvalidRequest(f"{name} must be true or false", name)
    return text == "true"
