"""GET, DELETE and cancel of /v1/responses/{id}, and GET /v1/responses/{id}/input_items."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.routes.app_state import AppState
from serve_llm.server.routes.background import BackgroundResponses, split_events
from serve_llm.server.routes.document import STORE_PROBLEMS, describe_page, describe_parameter, describe_route
from serve_llm.server.routes.generation import SSE_HEADERS
from serve_llm.server.routes.page import build_page, read_count, read_flag, read_page
from serve_llm.server.schema.common import ObjectList
from serve_llm.server.schema.responses import DeletedResponse, ResponseEvent, ResponseReply
from serve_llm.server.storage.responses import ResponseStore, StoredResponse

PATH = "/v1/responses/{response_id}"


_FOLLOW = (
    describe_parameter("stream", type="boolean", default=False),
    describe_parameter("starting_after", type="integer", minimum=0, maximum=999_999_999),
)


def add_routes(router: APIRouter, state: AppState, store: ResponseStore, background: BackgroundResponses) -> None:
    @router.get(PATH, **describe_route(None, ResponseReply, ResponseEvent, query=_FOLLOW))
    async def retrieve_response(response_id: str, request: Request) -> Response:
        """A stored response. `stream=true` repeats the events of a background response that was requested as a stream,
        those after the number `starting_after`."""
        stored = await background.get(response_id, state.read_owner(request))
        if not read_flag(request, "stream"):
            return _answer(stored)
        first = read_count(request, "starting_after", -1) + 1
        running = background.find(response_id)
        if running is not None and running.keeps_events:
            return _stream(running.follow(first))
        stored = await store.get(response_id, state.read_owner(request))
        if stored.events is None:
            raise InvalidRequest("stream: only responses made with background and stream keep their events", "stream")
        return _stream(_repeat(stored.events, first))

    @router.delete(PATH, **describe_route(None, DeletedResponse, problems=STORE_PROBLEMS))
    async def delete_response(response_id: str, request: Request) -> DeletedResponse:
        """Delete a stored response, and end it if it is being generated."""
        owner = state.read_owner(request)
        await store.get(response_id, owner)
        await background.cancel(response_id)
        await store.delete(response_id, owner)
        return DeletedResponse(id=response_id)

    @router.post(PATH + "/cancel", **describe_route(None, ResponseReply, problems=STORE_PROBLEMS))
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Cancel a background response. One that has ended is returned unchanged."""
        owner = state.read_owner(request)
        stored = await store.get(response_id, owner)
        if not stored.is_background:
            raise InvalidRequest("only background responses can be cancelled", "response_id")
        await background.cancel(response_id)
        return _answer(await background.get(response_id, owner))

    @router.get(PATH + "/input_items", **describe_route(None, ObjectList, query=describe_page()))
    async def list_input_items(response_id: str, request: Request) -> Response:
        """The input items of the response, without those of the responses that it continues."""
        page = read_page(request)
        found = await store.list_input_items(response_id, state.read_owner(request), page)
        return build_page(found.items, found.has_more)


def _answer(stored: StoredResponse) -> Response:
    return Response(stored.content, media_type="application/json")


def _stream(events: AsyncIterator[bytes]) -> Response:
    response = StreamingResponse(events)
    response.raw_headers = list(SSE_HEADERS)
    return response


async def _repeat(events: bytes, first: int) -> AsyncIterator[bytes]:
    yield b"".join(split_events(events)[first:])
