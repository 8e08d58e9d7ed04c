"""The server process's side of one front end: its open generations, in the admission controller and on the engines.

Requests are tracked here, so that the engines, routing, admission and the recovery from a crash do not depend on the
number of front ends. The requests of a lost front end are aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest
from serve_llm.server.admission.controller import AdmissionRequest
from serve_llm.server.engines.tracked_request import TrackedRequest
from serve_llm.server.front_ends.messages import (
    AbortRequests,
    Close,
    Open,
    Rejected,
    RelayedOutputs,
    Replays,
    ToFrontEnd,
)
from serve_llm.server.generate.dispatcher import LocalDispatcher
from serve_llm.server.http.errors import RequestError


class Relay:
    """Create it in the event loop."""

    def __init__(self, dispatcher: LocalDispatcher, num_engines: int, send: Callable[[ToFrontEnd], None]) -> None:
        self._dispatcher = dispatcher
        self._send = send
        self._open: dict[int, tuple[AdmissionRequest, list[int]]] = {}  # generation -> its admission and request ids
        # Outputs of this step, by engine
        self._pending: list[list[EngineCoreOutput]] = [[] for _ in range(num_engines)]
        self._is_flushing = False
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Generations that have not ended."""
        return len(self._open)

    def open(self, message: Open) -> None:
        requests = _restore_prompts(message.requests)
        prompts = [request.prompt_ids for request in requests if not request.sampling.choice]
        admission = AdmissionRequest(
            tenant=message.tenant,
            priority=message.priority,
            max_tokens=message.max_tokens,
            deadline=message.deadline,
            label=message.label,
            fail=partial(self._reject, message.generation, was_admitted=True),
            num_waiting=len(requests),
            num_waiting_tokens=sum(map(len, prompts)),
        )
        sinks = [_Sink(self, admission, request) for request in requests]
        refuse = partial(self._reject, message.generation, was_admitted=False)
        try:
            submitted = self._dispatcher.submit(admission, list(zip(requests, sinks, strict=True)), refuse)
        except RequestError as error:
            refuse(error)
            return
        for sink, tracked in zip(sinks, submitted, strict=True):
            sink.tracked = tracked
        self._open[message.generation] = (admission, [request.id for request in requests])

    def abort(self, message: AbortRequests) -> None:
        self._dispatcher.abort(message.ids)

    def close_generation(self, message: Close) -> None:
        admission, request_ids = self._open.pop(message.generation, (None, ()))
        if admission is not None:
            self._dispatcher.abort(request_ids)
            self._dispatcher.release(admission, message.num_generated, is_whole=message.is_whole)

    def close(self) -> None:
        """Abort all open requests, because the front end is gone. Idempotent."""
        self._is_closed = True
        for generation in list(self._open):
            self.close_generation(Close(generation, 0, is_whole=False))

    def begin(self, admission: AdmissionRequest, num_prompt_tokens: int) -> None:
        self._dispatcher.begin(admission, num_prompt_tokens)

    def forward(self, tracked: TrackedRequest, output: EngineCoreOutput) -> None:
        """Send an output together with the others of its step."""
        if output.finish_reason is not None and tracked.replays:
            self._send(Replays(tracked.id, tracked.replays))
        self._pending[tracked.engine].append(output)
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        for engine, outputs in enumerate(self._pending):
            if outputs:
                self._pending[engine] = []
                self._send(RelayedOutputs(engine, outputs))

    def _reject(self, generation: int, error: RequestError, *, was_admitted: bool) -> None:
        if not self._is_closed:
            self._send(Rejected.from_exception(generation, error, was_admitted=was_admitted))


class _Sink:
    """Receives the outputs of one request."""

    __slots__ = ("_admission", "_has_begun", "_id", "_num_prompt_tokens", "_relay", "tracked")

    tracked: TrackedRequest  # set when the request is submitted

    def __init__(self, relay: Relay, admission: AdmissionRequest, request: EngineCoreRequest) -> None:
        self._relay = relay
        self._admission = admission
        self._id = request.id
        self._num_prompt_tokens = 0 if request.sampling.choice else len(request.prompt_ids)
        self._has_begun = False

    def __call__(self, output: EngineCoreOutput) -> None:
        if not self._has_begun and output.error is None:
            self._has_begun = True
            self._relay.begin(self._admission, self._num_prompt_tokens)
        output.id = self._id  # each engine that computes the request assigns it another id
        self._relay.forward(self.tracked, output)


def _restore_prompts(requests: list[EngineCoreRequest]) -> list[EngineCoreRequest]:
    """Give later choices of a prompt the same list object as the first one, because `Replicas` groups them by it."""
    restored = []
    prompt_ids: list[int] = []
    for request in requests:
        if request.sampling.choice:
            request = msgspec.structs.replace(request, prompt_ids=prompt_ids)
        prompt_ids = request.prompt_ids
        restored.append(request)
    return restored
