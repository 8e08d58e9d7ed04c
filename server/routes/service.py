"""What the routes of one app share; made once by `create_app`."""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import dataclass, field
from importlib.metadata import version

from serve_llm.server.admission import Gate
from serve_llm.server.errors import ModelNotFound
from serve_llm.server.generate import Generator
from serve_llm.server.metrics import Exposition
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.replicas import Replicas
from serve_llm.server.reply.shape import Head

VERSION = version("serve-llm")


@dataclass(frozen=True)
class Service:
    replicas: Replicas
    model: ServedModel
    gate: Gate
    generator: Generator
    exposition: Exposition
    started: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ModelNotFound. No name means the served model."""
        if name is None:
            return self.model.names[0]
        if name not in self.model.names:
            raise ModelNotFound(
                f"the model {name!r} does not exist; served here: {', '.join(self.model.names)}", "model"
            )
        return name

    def head(self, prefix: str, name: str | None) -> Head:
        """The beginning of a new reply. Raises ModelNotFound."""
        return Head(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self.check_model(name),
            system_fingerprint=self._fingerprint(),
        )

    def _fingerprint(self) -> str:
        """Equal for equal code, model and number type: what a repeated request with a seed depends on."""
        source = f"{VERSION}|{self.model.directory.name}|{self.model.names[0]}|{self.replicas.facts.dtype}"
        return "fp_" + hashlib.sha256(source.encode()).hexdigest()[:12]
