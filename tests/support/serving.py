"""The app on a scripted engine, called without sockets."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp

from serve_llm.server.admission.controller import AdmissionController
from serve_llm.server.batches.service import BatchService
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.storage.storage import Storage
from support.asgi import Reply, fetch
from support.fakes import ScriptedEngine

TEXT = "def main():\n    print('h\u00e9llo w\u00f6rld \u65e5\u672c\u8a9e \U0001f600')\n"


@dataclass
class Served:
    app: ASGIApp
    admission: AdmissionController
    engines: list[ScriptedEngine]
    model: ServedModel
    storage: Storage
    batches: BatchService | None

    @property
    def engine(self) -> ScriptedEngine:
        return self.engines[0]

    def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return fetch(self.app, "GET", path, None, headers)

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Reply:
        return fetch(self.app, "POST", path, body, headers)

    def delete(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return fetch(self.app, "DELETE", path, None, headers)

    def complete(self, **body: object) -> Reply:
        return self.post("/v1/completions", {"prompt": "x", "temperature": 0} | body)

    def chat(self, **body: object) -> Reply:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]} | body)

    def ids(self, text: str) -> list[int]:
        return self.model.tokenizer.encode(text, add_special_tokens=False)
