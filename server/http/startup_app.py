"""What the server answers until it has started."""

from __future__ import annotations

from serve_llm.server.http.connection import AsgiApp, Message, Receive, Send
from serve_llm.server.http.errors import Unavailable, send_error
from serve_llm.server.web_ui.files import PAGE_FILES, build_headers


class StartupApp:
    """An ASGI app that forwards to `app` once it is set. Until then, /health and the page's files get 200 and
    everything else 503, so a browser that is opened early shows that the server is starting."""

    def __init__(self, with_page: bool) -> None:
        self.app: AsgiApp | None = None
        self._with_page = with_page

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"].removesuffix("/") == "/health":
            await _send_ok({"content-type": "application/json"}, b'{"status":"ok"}', send)
        elif scope["type"] == "http" and self._with_page and scope["path"] in PAGE_FILES:
            await _send_ok(build_headers(scope["path"]), PAGE_FILES[scope["path"]].read_bytes(), send)
        elif scope["type"] == "http":
            await send_error(Unavailable("the server is starting"), send)


async def _send_ok(headers: dict[str, str], body: bytes, send: Send) -> None:
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
