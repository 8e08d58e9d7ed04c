"""GET /: the page with a chat and the server's status, and the two files that it loads."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

import serve_llm.server.web_ui

PATHS = ("/", "/web_ui.js", "/web_ui.css")

_FOLDER = Path(serve_llm.server.web_ui.__path__[0])
# Only files of this server run and load, nothing else may embed the page, and no text can become HTML.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def create_router() -> APIRouter:
    router = APIRouter()
    page = (_FOLDER / "web_ui.html").read_bytes()
    script = (_FOLDER / "web_ui.js").read_bytes()
    style = (_FOLDER / "web_ui.css").read_bytes()

    @router.get(PATHS[0], include_in_schema=False)
    async def show_page() -> Response:
        return Response(page, headers=_HEADERS, media_type="text/html")

    @router.get(PATHS[1], include_in_schema=False)
    async def load_script() -> Response:
        return Response(script, headers=_HEADERS, media_type="text/javascript")

    @router.get(PATHS[2], include_in_schema=False)
    async def load_style() -> Response:
        return Response(style, headers=_HEADERS, media_type="text/css")

    return router
