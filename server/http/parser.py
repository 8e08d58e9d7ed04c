"""The HTTP parser of a connection, which ignores offers to change the protocol."""

from __future__ import annotations

from typing import Protocol

import httptools

_OFFER_HEADERS = (b"upgrade", b"http2-settings")
_OFFER_TOKENS = {b"upgrade", b"http2-settings"}  # in the header Connection


class ParsedRequest(Protocol):
    """What the callbacks of a connection have kept of the request that is being parsed."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class RequestParser(httptools.HttpRequestParser):
    """Java's HttpClient, for example, offers HTTP/2 with its first request (`Upgrade: h2c`). A server may ignore that,
    but the parser takes such a request for the last one, without a body. So its header is parsed again without the
    offer; `should_upgrade` is true the first time.
    """

    def __init__(self, connection: ParsedRequest) -> None:
        self._connection = connection
        self._start()

    def _start(self) -> None:
        super().__init__(self._connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def feed_data(self, data: bytes | bytearray | memoryview) -> None:  # type: ignore[override]
        """Raises HttpParserError."""
        rest = memoryview(data)
        while True:
            try:
                super().feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            if self.get_method() == b"CONNECT":
                raise httptools.HttpParserError("this server is not a proxy")
            header = self._write_header()
            self._start()  # after the last request of a connection, the parser would drop the header
            super().feed_data(header)

    def _write_header(self) -> bytes:
        connection = self._connection
        version = self.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.get_method(), connection.url, version)]
        for name, value in connection.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in _OFFER_TOKENS)
            if name not in _OFFER_HEADERS:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])
