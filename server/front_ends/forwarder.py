"""Forward requests about the whole server and its stored objects to the server process, over HTTP on a Unix socket."""

from __future__ import annotations

import asyncio

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_llm.common.options.schema import Options
from serve_llm.server.http.errors import Unavailable, send_error
from serve_llm.server.routes import scaling
from serve_llm.server.routes.status import SERVER_PATHS

CHUNK_BYTES = 2**16
# Headers that concern only one connection, and those that describe how the body is framed.
_HOP_HEADERS = frozenset({b"connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"expect", b"transfer-encoding"})


def list_forwarded_paths(options: Options) -> tuple[str, ...]:
    """List the paths that a front end forwards, including everything below them."""
    paths = [*SERVER_PATHS, "/openapi.json"]
    if options.responses_store != "off":
        paths.append("/v1/responses")
    if options.batches_dir is not None:
        paths += ["/v1/files", "/v1/batches"]
    if options.is_scalable:
        paths.append(scaling.PATH)
    if options.enable_lora:
        paths += ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
    return tuple(paths)


class Forwarder:
    """ASGI middleware. A client that disconnects also ends its request in the server process."""

    def __init__(self, app: ASGIApp, paths: tuple[str, ...], socket_path: str) -> None:
        self.app = app
        self._paths = frozenset(paths)
        self._prefixes = tuple(f"{path}/" for path in paths)
        self._socket_path = socket_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_forwarded = scope["type"] == "http" and (
            scope["path"] in self._paths or scope["path"].startswith(self._prefixes)
        )
        if not is_forwarded:
            await self.app(scope, receive, send)
            return
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket_path)
        except OSError:
            await send_error(Unavailable("the server is shutting down"), send)
            return
        sending = asyncio.create_task(_send_request(scope, receive, writer))
        try:
            has_begun = await _read_response(reader, send)
        except ConnectionError:
            if not _has_left(sending):
                raise
        else:
            if not has_begun and not _has_left(sending):
                await send_error(Unavailable("the server ended before it answered"), send)
        finally:
            sending.cancel()
            writer.close()


def _has_left(sending: asyncio.Task[bool]) -> bool:
    """Whether the client has disconnected, and so ended the request in the server process."""
    return sending.done() and sending.exception() is None and sending.result()


async def _send_request(scope: Scope, receive: Receive, writer: asyncio.StreamWriter) -> bool:
    """Send the request, then wait for the client to disconnect, and close the connection. Returns whether it has
    disconnected."""
    target = scope.get("raw_path") or scope["path"].encode()
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in scope["headers"] if name not in _HOP_HEADERS]
    names = {name for name, _ in scope["headers"]}
    is_chunked = b"transfer-encoding" in names
    if is_chunked:
        lines.append(b"transfer-encoding: chunked")
    writer.write(b"\r\n".join([*lines, b"connection: close", b"", b""]))
    try:
        while (message := await receive())["type"] == "http.request":
            body = message.get("body", b"")
            if body:
                writer.write(b"%x\r\n%b\r\n" % (len(body), body) if is_chunked else body)
            if is_chunked and not message.get("more_body"):
                writer.write(b"0\r\n\r\n")
            await writer.drain()
    except ConnectionError:
        return False  # it answered and closed the connection before the end of the body
    writer.close()
    return True


async def _read_response(reader: asyncio.StreamReader, send: Send) -> bool:
    """Pass the response on. Returns whether there is any. Raises ConnectionError if the connection closes before it is
    complete."""
    parsed = _Response()
    has_begun = False
    while not parsed.is_complete:
        try:
            data = await reader.read(CHUNK_BYTES)
        except ConnectionError:  # such as a reset, if the server process was killed before it had read the request
            if has_begun:
                raise
            return False
        if not data:
            if has_begun:
                raise ConnectionResetError("the server process closed the connection")
            return False
        parsed.feed(data)
        for message in parsed.take():
            has_begun = True
            await send(message)
    return True


class _Response:
    """A response as ASGI messages."""

    def __init__(self) -> None:
        self.is_complete = False
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._messages: list[Message] = []

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def take(self) -> list[Message]:
        """Return the messages since the last call."""
        taken = self._messages
        self._messages = []
        return taken

    def on_header(self, name: bytes, value: bytes) -> None:
        lowered = name.lower()
        if lowered not in _HOP_HEADERS and lowered != b"date":  # the front end's own HTTP server sends these
            self._headers.append((lowered, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._messages.append({"type": "http.response.start", "status": status, "headers": self._headers})
        self._headers = []

    def on_body(self, body: bytes) -> None:
        self._messages.append({"type": "http.response.body", "body": body, "more_body": True})

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self.is_complete = True
            self._messages.append({"type": "http.response.body", "body": b""})
