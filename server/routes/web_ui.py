"""GET / and the files of its page: a chat and the server's status. GET /docs leads to its list of routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.responses import RedirectResponse, Response

from serve_llm.server.web_ui.files import PAGE_FILES, build_headers


def create_router() -> APIRouter:
    router = APIRouter()
    for path in PAGE_FILES:
        router.get(path, include_in_schema=False)(_create_route(path))

    @router.get("/docs", include_in_schema=False)
    async def show_api() -> Response:
        return RedirectResponse("./#api")  # relative, for proxies that add a path

    return router


def _create_route(path: str) -> Callable[[], Awaitable[Response]]:
    content = PAGE_FILES[path].read_bytes()
    headers = build_headers(path)

    async def send_file() -> Response:
        return Response(content, headers=headers)

    return send_file
