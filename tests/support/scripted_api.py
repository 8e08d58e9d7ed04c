"""An OpenAI-compatible server that replies with predefined events and keeps the bodies that it received."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedApi(ThreadingHTTPServer):
    """answers: for each POST, the deltas of a streamed chat completion, or (status, body)."""

    def __init__(self, answers: list[Any], texts: dict[str, str] | None = None) -> None:
        """texts: answers to other GET routes."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.texts = {"/v1/models": json.dumps({"data": [{"id": "scripted"}]})} | (texts or {})
        self.bodies: list[Any] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedApi

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        text = self.server.texts.get(self.path)
        self._send(404 if text is None else 200, text or json.dumps({"detail": "Not Found"}))

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = self.server.answers.pop(0)
        if isinstance(answer, tuple):
            self._send(answer[0], json.dumps(answer[1]))
            return
        self.send_response(200)
        self.end_headers()
        for delta in answer:
            event = delta if "error" in delta else {"choices": [{"index": 0, "delta": delta}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serve_script(answers: list[Any], texts: dict[str, str] | None = None) -> Iterator[ScriptedApi]:
    with ScriptedApi(answers, texts) as api:
        thread = threading.Thread(target=api.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield api
        finally:
            api.shutdown()
            thread.join()
