"""What the routes of one app share; made once by `create_app`."""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import NamedTuple

from starlette.requests import Request

from serve_llm.engine.limits import Limits
from serve_llm.server.admission import Bodies, Gate
from serve_llm.server.auth import TENANT
from serve_llm.server.errors import InvalidRequest
from serve_llm.server.generate import Generator
from serve_llm.server.metrics import Exposition, Meter
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pool import PromptPool
from serve_llm.server.replicas import Replicas
from serve_llm.server.reply.shape import Head

VERSION = version("serve-llm")
TIMEOUT_HEADER = "X-Request-Timeout"  # seconds from arrival to the end that a client allows


class Caller(NamedTuple):
    """What a request says beside its body."""

    tenant: int  # the number of its key
    arrival: float  # in the meter's time, as the deadline
    deadline: float | None


@dataclass(frozen=True)
class Service:
    replicas: Replicas
    model: ServedModel
    gate: Gate
    generator: Generator
    exposition: Exposition
    prompts: PromptPool
    bodies: Bodies
    limits: Limits
    request_timeout: float | None  # seconds
    num_ranks: int  # of each engine
    started: int = field(default_factory=lambda: int(time.time()))

    def caller(self, request: Request) -> Caller:
        """Call it when the request arrives. Raises InvalidRequest for a limit of the client's that is no number."""
        arrival, seconds = Meter.clock(), self.request_timeout
        given = request.headers.get(TIMEOUT_HEADER)
        if given is not None:
            own = float(given) if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", given, re.ASCII) else 0.0
            if own <= 0:
                raise InvalidRequest(f"{TIMEOUT_HEADER} must be seconds, a number above 0", TIMEOUT_HEADER)
            seconds = own if seconds is None else min(own, seconds)
        deadline = None if seconds is None else arrival + seconds
        return Caller(request.scope.get(TENANT) or 0, arrival, deadline)

    def head(self, prefix: str, name: str) -> Head:
        """The beginning of a new reply, with this name of the model."""
        return Head(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=name,
            system_fingerprint=self._fingerprint(),
        )

    def _fingerprint(self) -> str:
        """Equal for equal code, model and number type: what a repeated request with a seed depends on."""
        source = f"{VERSION}|{self.model.directory.name}|{self.model.names[0]}|{self.replicas.facts.dtype}"
        return "fp_" + hashlib.sha256(source.encode()).hexdigest()[:12]
