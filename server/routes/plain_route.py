"""Routes without FastAPI's work on each request: its search through routers within routers, and its dependencies."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute


class PlainRoute(APIRoute):
    """A route whose function takes only the request and returns the response; FastAPI only describes it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


def add_routes(app: FastAPI, router: APIRouter) -> None:
    """Add the routes themselves. `include_router` adds the router, which each request then searches twice."""
    app.router.routes += router.routes
