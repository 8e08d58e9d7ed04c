"""POST /scale: an administrator's route that changes the number of engines."""

from __future__ import annotations

from fastapi import APIRouter, Request

from serve_llm.server.engines.scaler import Scaler
from serve_llm.server.routes.app_state import AppState
from serve_llm.server.routes.document import describe_route
from serve_llm.server.schema.common import parse_body
from serve_llm.server.schema.scaling import ScaleRequest, Scaling

PATH = "/scale"
_PROBLEMS = {409: "Another change of the number of engines is in progress."}


def create_scaling_router(state: AppState, scaler: Scaler, drain_timeout: float) -> APIRouter:
    """Build the route. drain_timeout: seconds, for requests that name none."""
    router = APIRouter()

    @router.post(PATH, **describe_route(ScaleRequest, Scaling, needs_administrator=True, problems=_PROBLEMS))
    async def scale(request: Request) -> Scaling:
        """Begin to add or remove engines; the response does not wait for them."""
        state.check_administrator(request)
        async with state.reading_body(request) as content:
            body = parse_body(ScaleRequest, content, state.limits)
        seconds = drain_timeout if body.drain_timeout is None else body.drain_timeout
        scaler.scale(body.data_parallel_size, seconds)
        return describe_scaling(scaler)

    return router


def describe_scaling(scaler: Scaler) -> Scaling:
    return Scaling(
        min_engines=scaler.fewest,
        max_engines=scaler.most,
        num_engines=scaler.num_engines,
        target=scaler.target,
        is_under_way=scaler.is_under_way,
        error=scaler.error,
    )
