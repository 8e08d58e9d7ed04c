"""Responses that continue without their client, and how responses are stored when they end."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import ExitStack

from serve_llm.server.generate.generation import Generation
from serve_llm.server.http.errors import GenerationFailed, RequestError, StoreError, TooLarge
from serve_llm.server.prompt.items import StoredItem
from serve_llm.server.response.builder import Json, encode_json
from serve_llm.server.response.responses import ResponsesBuilder, ResponsesEncoder
from serve_llm.server.response.sse import PING
from serve_llm.server.storage.responses import NewResponse, ResponseOutcome, ResponseStore, StoredResponse

logger = logging.getLogger(__name__)

MAX_UNSTORED = 100  # maximum number of responses whose end is kept in memory because it could not be stored

_EVENT_END = b"\n\n"
_TOO_LARGE = {
    "code": "server_error",
    "message": "the response is larger than all that the server stores (--limit stored-response-bytes)",
}


def build_outcome(response: Json, events: bytes | None = None) -> ResponseOutcome:
    """Return a response from `ResponsesBuilder.describe` in the form that is stored."""
    items = [StoredItem(item["id"], encode_json(item)) for item in response["output"]]
    return ResponseOutcome(response["status"], encode_json(response), items, events)


def split_events(events: bytes) -> list[bytes]:
    """Split a part of a stream into events. The number of an event is its position in the whole stream."""
    return [event + _EVENT_END for event in events.split(_EVENT_END) if event]


def replace_end(events: bytes, response: Json) -> bytes:
    """Replace the last events of a stream, the very last of which contains an outdated response."""
    *before, last = split_events(events)
    number = json.loads(last.partition(b"data: ")[2])["sequence_number"]
    kind = f"response.{response['status']}"
    data = encode_json({"type": kind, "sequence_number": number, "response": response})
    return b"".join([*before, b"event: %s\ndata: %s" % (kind.encode(), data), _EVENT_END])


class BackgroundResponse:
    """One response that is being generated. `run` stores its end."""

    def __init__(
        self, store: ResponseStore, builder: ResponsesBuilder, generation: Generation, *, keeps_events: bool
    ) -> None:
        """keeps_events: for `follow`, and to be stored."""
        self._store = store
        self._builder = builder
        self._encoder = ResponsesEncoder(builder)
        self._generation = generation
        self.keeps_events = keeps_events
        self._events: list[bytes] = []
        self._has_ended = False
        self._changed = asyncio.Event()
        self.unstored: ResponseOutcome | None = None  # its end, if it could not be stored

    async def run(self, entered: ExitStack) -> None:
        """entered: exits the generation, which has been entered."""
        try:
            with entered:
                last = await self._generate()
                assert self._builder.final is not None
                events = b"".join([*self._events, last]) if self.keeps_events else None
                problem = await self._save(build_outcome(self._builder.final, events))
                if problem is not None:
                    failed = {**self._builder.final, "status": "failed", "output": [], "error": problem}
                    outcome = build_outcome(failed)
                    if await self._save(outcome) is not None:
                        self.unstored = outcome
                    last = replace_end(last, failed)
                self._append(last)
        finally:
            self._has_ended = True
            self._changed.set()

    def cancel(self) -> None:
        self._generation.close()

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """Yield the events from this number on, with pings during pauses. The last one comes when the end is stored."""
        while True:
            while first < len(self._events):
                yield self._events[first]
                first += 1
            if self._has_ended:
                return
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self._encoder.ping_seconds)
            except TimeoutError:
                yield PING

    async def _generate(self) -> bytes:
        """Returns the last events."""
        generation = self._generation
        has_begun = False
        self._append(self._encoder.encode_queued())
        try:
            while deltas := await generation.next():
                self._append(self._encoder.encode(deltas, None))
                if not has_begun:
                    has_begun = True
                    await self._save(build_outcome(self._builder.describe("in_progress")))
            if generation.closed:
                return self._encoder.encode_cancelled(generation.take_rest(), generation.counts())
            return self._encoder.encode_end(generation.counts())
        except RequestError as error:
            return self._encoder.encode_error(error)
        except Exception:
            logger.exception("background response %s failed", self._builder.id)
            return self._encoder.encode_error(GenerationFailed("internal error; the server's log says more"))

    async def _save(self, outcome: ResponseOutcome) -> Json | None:
        """Store the outcome. Returns the response's error if that fails."""
        try:
            is_stored = await self._store.update(self._builder.id, outcome)
        except StoreError as error:
            logger.warning("response %s cannot be stored", self._builder.id)
            return {"code": "server_error", "message": f"the response could not be stored: {error.message}"}
        return None if is_stored else _TOO_LARGE

    def _append(self, events: bytes) -> None:
        if self.keeps_events:
            self._events += split_events(events)
            self._changed.set()


class BackgroundResponses:
    """All responses that are being generated."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._running: dict[str, tuple[BackgroundResponse, asyncio.Task[None]]] = {}
        self._unstored: OrderedDict[str, ResponseOutcome] = OrderedDict()  # by response id, most recent last

    async def start(
        self, new: NewResponse, builder: ResponsesBuilder, generation: Generation, *, keeps_events: bool
    ) -> BackgroundResponse:
        """Admit and submit the generation, store the response as queued, and generate it in a task. Raises
        RequestError."""
        with ExitStack() as stack:
            stack.enter_context(generation)
            if not await self._store.add(new, build_outcome(builder.describe("queued"))):
                raise TooLarge("the input is larger than all that the server stores", "background")
            response = BackgroundResponse(self._store, builder, generation, keeps_events=keeps_events)
            task = asyncio.create_task(response.run(stack.pop_all()))
        self._running[new.id] = (response, task)
        task.add_done_callback(lambda _: self._end(new.id))
        return response

    def _end(self, response_id: str) -> None:
        response, _ = self._running.pop(response_id)
        if response.unstored is not None:
            self._unstored[response_id] = response.unstored
            if len(self._unstored) > MAX_UNSTORED:
                self._unstored.popitem(last=False)

    async def get(self, response_id: str, owner: str) -> StoredResponse:
        """Like `ResponseStore.get`, but includes the end of a response that could not be stored. Raises
        ObjectNotFound."""
        stored = await self._store.get(response_id, owner)
        outcome = self._unstored.get(response_id)
        if outcome is None:
            return stored
        return stored._replace(status=outcome.status, content=outcome.content)

    def find(self, response_id: str) -> BackgroundResponse | None:
        """Return None if it has ended."""
        running = self._running.get(response_id)
        return None if running is None else running[0]

    async def cancel(self, response_id: str) -> None:
        """Cancel the response. Returns when its end is stored. Does nothing if it has ended."""
        running = self._running.get(response_id)
        if running is not None:
            response, task = running
            response.cancel()
            await asyncio.wait([task])
