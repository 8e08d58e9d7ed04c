"""A blocking client for OpenAI-compatible servers, for commands that a person runs. Standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

from serve_llm.common.errors import OptionError, ServeError

SECONDS = 600.0  # seconds without a byte from the server
DEFAULT_URL = "http://127.0.0.1:8000"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class ApiError(ServeError):
    """The server refused a request, or could not be reached."""


class ApiClient:
    """url: with or without a trailing /v1. api_key: sent as a bearer token if there is one."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = normalize_url(url)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # A proxy from the environment cannot reach this host's own ports.
        proxies: list[urllib.request.BaseHandler] = []
        if urlsplit(self.url).hostname in _LOOPBACK:
            proxies.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*proxies)

    def get_text(self, path: str) -> str:
        """Raises ApiError."""
        with self._open(path) as response, _translate_losses(self.url):
            return cast(bytes, response.read()).decode(errors="replace")

    def get_json(self, path: str) -> Any:
        """Raises ApiError."""
        return _parse_json(self.get_text(path), self.url + path)

    def post_json(self, path: str, body: Mapping[str, object]) -> Any:
        """Raises ApiError."""
        with self._open(path, body) as response, _translate_losses(self.url):
            text = cast(bytes, response.read()).decode(errors="replace")
        return _parse_json(text, self.url + path)

    def stream(self, path: str, body: Mapping[str, object]) -> Generator[dict[str, Any]]:
        """Yield the objects of a stream of server-sent events, up to [DONE]; closing the iterator ends the request.

        Raises ApiError, also for an error inside the stream and for a stream that ends too early.
        """
        with self._open(path, body) as response, _translate_losses(self.url):
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = _parse_json(data.decode(errors="replace"), self.url + path)
                if error := event.get("error"):
                    raise ApiError(_describe(error))
                yield event
        raise ApiError(f"{self.url} ended its answer too early")

    def find_model(self) -> str:
        """Return the first model that the server lists. Raises ApiError."""
        models = self.get_json("/v1/models").get("data") or []
        if not models:
            raise ApiError(f"{self.url} lists no model; give one with --model")
        return str(models[0]["id"])

    def _open(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            return self._opener.open(request, timeout=SECONDS)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(10_000).decode(errors="replace")
            raise ApiError(_describe_status(error.code, text, path)) from None
        except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ApiError(f"no answer from {self.url}: {reason}; is a server running there?") from None


def normalize_url(url: str) -> str:
    """Return the URL without a trailing slash or /v1. Raises OptionError."""
    url = complete_url(url)
    parts = urlsplit(url)
    try:
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise OptionError(f"{url!r} is not a URL such as {DEFAULT_URL}")
    return url.rstrip("/").removesuffix("/v1")


def complete_url(text: str) -> str:
    """Turn HOST:PORT into a URL. Return anything else, such as the name of a model, unchanged."""
    is_address = re.fullmatch(r"([\w.-]+|\[[0-9a-fA-F:]+\]):\d+(/.*)?", text) is not None
    return f"http://{text}" if is_address and not os.path.exists(text) else text


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


@contextlib.contextmanager
def _translate_losses(url: str) -> Iterator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise ApiError(f"{url} closed the connection in the middle of a response: {error}") from None


def _parse_json(text: str, url: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ApiError(f"{url} answered something that is not JSON: {text[:100]!r}") from None


def _describe_status(status: int, text: str, path: str) -> str:
    try:
        body = json.loads(text)
        error = body.get("error", body)
    except (ValueError, AttributeError):
        error = text.strip()[:200]
    return f"{_describe(error) or 'no reason given'} (status {status} of {path})"


def _describe(error: object) -> str:
    """Return the message of an error in OpenAI's, vLLM's or llama.cpp's format."""
    if isinstance(error, Mapping):
        return str(error.get("message") or error.get("detail") or error)
    return str(error)
