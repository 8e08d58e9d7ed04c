"""POST /invocations: one route for all requests, as SageMaker sends them. The fields of the body distinguish them."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message, Receive

from serve_llm.server.prompt.text_jobs import RouteName
from serve_llm.server.routes import generation, pooling
from serve_llm.server.routes.app_state import AppState
from serve_llm.server.routes.document import describe_problems
from serve_llm.server.routes.plain_route import PlainRoute

RESPONSES: dict[str, Callable[[AppState, Request], Response]] = {
    "chat": generation.chat,
    "completion": generation.complete,
    "embed": pooling.embed,
    "classify": pooling.classify,
    "rerank": pooling.rerank,
    "score": pooling.score,
    "pool": pooling.pool,
}
"""By the names that the job `find_route` returns."""


def create_router(state: AppState) -> APIRouter:
    router = APIRouter(route_class=PlainRoute)

    any_object = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}

    @router.post("/invocations", openapi_extra={"requestBody": any_object}, responses=describe_problems(has_body=True))
    async def invoke(request: Request) -> Response:
        """The response to a body with messages, prompt, input, two sides to score, or query and documents."""
        async with state.reading_body(request) as content:
            route = await state.prompts.run("find_route", content, RouteName)
        return RESPONSES[route.name](state, Request(request.scope, _replay(content, request.receive)))

    return router


def _replay(content: bytes, receive: Receive) -> Receive:
    """Receives a body again that was already read, then what follows it."""
    pending: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive_again() -> Message:
        return pending.pop() if pending else await receive()

    return receive_again
