"""State and steps that the routes of one app share; `create_app` creates it."""

from __future__ import annotations

import functools
import hashlib
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request

from serve_llm.common.logs import CURRENT_REQUEST
from serve_llm.common.options.limits import Limits
from serve_llm.common.types import LOWEST_PRIORITY
from serve_llm.server.admission.controller import BodyBudget
from serve_llm.server.generate.dispatcher import Dispatcher
from serve_llm.server.generate.generation import Generation, Generator
from serve_llm.server.http.auth import IN_BATCH, TENANT
from serve_llm.server.http.content_encoding import read_decoded
from serve_llm.server.http.errors import Forbidden, InvalidRequest, TooLarge
from serve_llm.server.http.request_id import REQUEST_ID
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pool import PromptPool
from serve_llm.server.prompt.validate import TextRequest
from serve_llm.server.response.builder import ResponseMeta
from serve_llm.server.routes.request_log import RequestLog
from serve_llm.server.schema.json_text import drop_mark
from serve_llm.server.storage.responses import ResponseStore

if TYPE_CHECKING:
    from serve_llm.server.tracing.request_trace import RequestTrace  # imports an optional dependency
    from serve_llm.server.tracing.tracing import Tracing

VERSION = version("serve-llm")
TIMEOUT_HEADER = "X-Request-Timeout"  # seconds from arrival after which the client no longer needs the response
LONGEST_TIMEOUT = 1e9  # seconds; timers overflow far above it
_NUMBER = re.compile(r"\d+(\.\d*)?([eE][+-]?\d+)?", re.ASCII)

MAX_HEADER_CHARACTERS = 1000

Result = TypeVar("Result", bound=msgspec.Struct)


class Caller(NamedTuple):
    """What a request states outside its body."""

    tenant: int  # the number of its API key
    arrival: float  # clock time
    deadline: float | None  # clock time
    priority: int | None  # instead of that of the body


@dataclass(frozen=True)
class AppState:
    dispatcher: Dispatcher
    model: ServedModel
    generator: Generator
    prompts: PromptPool
    bodies: BodyBudget
    limits: Limits
    request_timeout: float | None  # seconds
    reasoning_field: str  # name of the reasoning in messages
    ignored_fields: Counter[str]  # fields of requests without effect, by route
    owners: tuple[str, ...] = ("",)  # those of stored objects, one per API key
    administrators: frozenset[int] = frozenset()  # indices of API keys
    response_store: ResponseStore | None = None  # None: responses are not stored
    ignores_unknown_fields: bool = False  # in bodies that `schema.common.parse_by_policy` reads
    tracing: Tracing | None = None  # None: there are no traces
    request_log: RequestLog | None = None  # None: requests are not logged
    start_time: int = field(default_factory=lambda: int(time.time()))  # Unix seconds

    def read_caller(self, request: Request, arrival: float) -> Caller:
        """arrival: clock time. Raises InvalidRequest if the timeout header is not a positive number."""
        if request.scope.get(IN_BATCH):
            return Caller(request.scope.get(TENANT) or 0, arrival, None, LOWEST_PRIORITY)
        timeout = self.request_timeout
        header = request.headers.get(TIMEOUT_HEADER)
        if header is not None:
            seconds = float(header) if _NUMBER.fullmatch(header) else 0.0
            if seconds <= 0:
                raise InvalidRequest(
                    f"{TIMEOUT_HEADER} must be a number of seconds above 0, such as 2.5, not {header[:100]!r}",
                    TIMEOUT_HEADER,
                )
            seconds = min(seconds, LONGEST_TIMEOUT)
            timeout = seconds if timeout is None else min(seconds, timeout)
        deadline = None if timeout is None else arrival + timeout
        return Caller(request.scope.get(TENANT) or 0, arrival, deadline, None)

    def open(self, request: TextRequest, caller: Caller) -> Generation:
        """Create a generation for the caller's request, which is not submitted yet."""
        return self.generator.open(
            request,
            caller.arrival,
            tenant=caller.tenant,
            deadline=caller.deadline,
            priority=caller.priority,
        )

    def check_administrator(self, request: Request) -> None:
        """Raise Forbidden unless the request came with a key that may change what the server serves."""
        if request.scope.get(TENANT) not in self.administrators:
            raise Forbidden("this route needs an API key that begins with admin:")

    def read_owner(self, request: Request) -> str:
        """Return the owner of the objects that the request stores."""
        return self.owners[request.scope.get(TENANT) or 0]

    @contextmanager
    def trace(self, request: Request, job: str, arrival: float) -> Iterator[RequestTrace | None]:
        """Start the trace of a request, which ends with an error that leaves the context, otherwise with its
        generation. None without tracing. job: one of `server.prompt.jobs.JOBS`. arrival: clock time."""
        if self.tracing is None:
            yield None
            return
        attributes = {"http.route": request.scope["path"], "gen_ai.request.id": request.scope[REQUEST_ID]}
        trace = self.tracing.start(request.headers, job, attributes, arrival, self.dispatcher.clock)
        current = CURRENT_REQUEST.get()
        if current is not None:
            current.traceparent = trace.format_traceparent()
        try:
            yield trace
        except BaseException as error:
            trace.fail(error)
            raise

    async def run_prompt_job(
        self, request: Request, kind: str, result: type[Result], deadline: float | None = None
    ) -> Result:
        """Read the body and run the job of this kind (`server.prompt.jobs`) on it. Raises RequestError."""
        async with self.reading_body(request) as body:
            return await self.prompts.run(kind, body, result, deadline)

    @asynccontextmanager
    async def reading_body(self, request: Request) -> AsyncIterator[bytes]:
        """Read the body, which counts as being read until the context ends. Raises RequestError."""
        self.dispatcher.check()
        too_large = TooLarge(f"the body is longer than {self.limits.body_bytes} bytes")
        if int(request.headers.get("content-length", 0)) > self.limits.body_bytes:
            raise too_large  # before it is sent, to a client that waits for 100 Continue
        with self.bodies.reading() as take:
            chunks = []
            size = 0
            async for chunk in read_decoded(request):
                size += len(chunk)
                if size > self.limits.body_bytes:
                    raise too_large
                take(len(chunk))
                chunks.append(chunk)
            yield drop_mark(b"".join(chunks))

    def describe_ignored(self, request: Request, names: list[str]) -> dict[str, str]:
        """Count the fields of a request that have no effect. Returns the header that names them."""
        if not names:
            return {}
        self.ignored_fields[request.scope["path"]] += len(names)
        value = ", ".join(name for name in names if name.isascii() and name.isprintable())
        return {"x-ignored-fields": value[:MAX_HEADER_CHARACTERS]}

    def build_meta(self, id_prefix: str, name: str, response_id: str | None = None) -> ResponseMeta:
        """Build the identity of a new response under this name of the model. response_id: without prefix; None: a new
        one."""
        return ResponseMeta(
            id=f"{id_prefix}-{response_id or uuid.uuid4().hex}",
            created=int(time.time()),
            model=name,
            system_fingerprint=self._fingerprint(name),
            reasoning_field=self.reasoning_field,
        )

    def _fingerprint(self, name: str) -> str:
        """Return a value that changes with the code, the model and its dtype: with a seed, equal fingerprints mean
        equal responses."""
        source = f"{VERSION}|{self.model.directory.name}|{self.model.names[0]}|{self.dispatcher.model_info.dtype}"
        adapter = self.model.adapters.get(name)
        if adapter is not None:
            source += f"|{adapter.digest}"
        return _hash_source(source)


@functools.lru_cache(maxsize=64)  # one for each served name
def _hash_source(source: str) -> str:
    return "fp_" + hashlib.sha256(source.encode()).hexdigest()[:12]
