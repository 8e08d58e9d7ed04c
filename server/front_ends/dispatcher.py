"""A front end's access to the engines: messages to the server process. See `server.generate.dispatcher.Dispatcher`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

import msgspec

from serve_llm.common.types import EngineCoreOutput, ModelInfo
from serve_llm.server.admission.controller import MESSAGES, AdmissionRequest
from serve_llm.server.admission.throughput import Pace
from serve_llm.server.engines.tracked_request import Replay
from serve_llm.server.front_ends.messages import (
    AbortRequests,
    Close,
    EngineState,
    FromFrontEnd,
    Open,
    Rejected,
    RelayedOutputs,
    Replays,
)
from serve_llm.server.generate.dispatcher import Pairs
from serve_llm.server.http.errors import RequestError, Unavailable
from serve_llm.server.metrics.meter import Clock, Meter

ID_BITS = 40  # request ids hold a front end's number above these bits, 0 for the server process's own


class RelayedRequest:
    """One engine request of a front end."""

    __slots__ = ("engine", "meter", "replays", "sink")

    def __init__(self, sink: Callable[[EngineCoreOutput], None], meter: Meter) -> None:
        """meter: that of engine 0, until the first output."""
        self.sink = sink
        self.meter = meter
        self.engine = 0  # index of the engine that computed the newest output
        self.replays: list[Replay] = []


class _OpenGeneration(NamedTuple):
    admission: AdmissionRequest
    refuse: Callable[[RequestError], None]  # see `Dispatcher.submit`
    request_ids: list[int]


class RemoteDispatcher:
    """See `server.generate.dispatcher.Dispatcher`."""

    def __init__(
        self,
        model_info: ModelInfo,
        num_engines: int,
        number: int,
        send: Callable[[FromFrontEnd], None],
        clock: Clock,
    ) -> None:
        """number: of the front end, unique while the server runs. clock: reads about the same time as the server
        process's."""
        self.model_info = model_info
        self.clock = clock
        self.meters = [Meter(self.clock) for _ in range(num_engines)]
        self.refused = Counter[str]()
        self._send = send
        self._state = EngineState(None, None, Pace())
        self._ids = count(number << ID_BITS)
        self._requests: dict[int, RelayedRequest] = {}  # open requests, by id
        self._generations: dict[int, _OpenGeneration] = {}
        self._numbers: dict[AdmissionRequest, int] = {}  # numbers of open generations

    @property
    def num_open(self) -> int:
        """Generations that have not ended."""
        return len(self._generations)

    @property
    def outage(self) -> str | None:
        return self._state.outage

    def check(self) -> None:
        obstacle = self._state.obstacle
        if obstacle is not None:
            self.refused[obstacle] += 1
            raise Unavailable(MESSAGES[obstacle])

    def next_id(self) -> int:
        return next(self._ids)

    def submit(
        self, admission: AdmissionRequest, pairs: Pairs, refuse: Callable[[RequestError], None]
    ) -> list[RelayedRequest]:
        number = self.next_id()
        self._generations[number] = _OpenGeneration(admission, refuse, [request.id for request, _ in pairs])
        self._numbers[admission] = number
        submitted = [RelayedRequest(sink, self.meters[0]) for _, sink in pairs]
        for (request, _), relayed in zip(pairs, submitted, strict=True):
            self._requests[request.id] = relayed
        requests = [
            msgspec.structs.replace(request, prompt_ids=[]) if request.sampling.choice else request
            for request, _ in pairs
        ]
        self._send(
            Open(
                number,
                admission.tenant,
                admission.priority,
                admission.max_tokens,
                admission.deadline,
                admission.label,
                requests,
            )
        )
        return submitted

    def begin(self, admission: AdmissionRequest, num_prompt_tokens: int) -> None:
        """Do nothing: the server process notices the first token by itself."""

    def release(self, admission: AdmissionRequest, num_generated: int, *, is_whole: bool) -> None:
        number = self._numbers.pop(admission, None)
        if number is not None:  # not refused
            del self._generations[number]
            self._send(Close(number, num_generated, is_whole))

    def abort(self, ids: Sequence[int]) -> None:
        open_ids = [request_id for request_id in ids if self._requests.pop(request_id, None) is not None]
        if open_ids:
            self._send(AbortRequests(open_ids))

    def seconds_to_begin(self, admission: AdmissionRequest, deadline: float) -> float:
        return max(0.0, deadline - self.clock.read() - self._state.pace.seconds_for(admission.max_tokens))

    def end_open(self) -> None:
        """End every open generation with an error that names the reason."""
        for generation in list(self._generations.values()):
            generation.admission.fail(Unavailable(MESSAGES["draining"]))

    # Messages of the server process

    def update(self, state: EngineState) -> None:
        self._state = state

    def deliver(self, message: RelayedOutputs) -> None:
        self.clock.advance()
        meter = self.meters[message.engine]
        for output in message.outputs:
            is_final = output.finish_reason is not None
            request = self._requests.pop(output.id, None) if is_final else self._requests.get(output.id)
            if request is not None:
                request.meter = meter
                request.engine = message.engine
                request.sink(output)

    def note_replays(self, message: Replays) -> None:
        request = self._requests.get(message.request_id)
        if request is not None:
            request.replays = message.replays

    def reject(self, message: Rejected) -> None:
        generation = self._generations.get(message.generation)
        if generation is None:
            return
        error = message.to_exception()
        if message.was_admitted:
            generation.admission.fail(error)
            return
        del self._generations[message.generation]
        del self._numbers[generation.admission]
        for request_id in generation.request_ids:
            self._requests.pop(request_id, None)
        generation.refuse(error)
