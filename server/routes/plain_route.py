"""Routes without FastAPI's work on each request: its middleware, its search through the routes, its dependencies."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send


class PlainRoute(APIRoute):
    """A route whose function takes only the request and returns the response; FastAPI only describes it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


def add_routes(app: FastAPI, router: APIRouter) -> None:
    """Add the routes themselves. `include_router` adds the router, which each request then searches twice."""
    app.router.routes += router.routes


class PlainRouteApp:
    """ASGI app: calls the functions of an app's plain routes without path parameters directly, and answers their errors
    as the app does. All other requests go to the app."""

    def __init__(self, app: FastAPI) -> None:
        """app: has all its routes and handlers."""
        self.app = app
        self._routes = {
            (method, route.path): route
            for route in app.router.routes
            if isinstance(route, PlainRoute) and not route.param_convertors
            for method in route.methods or ()
        }
        handlers = dict(app.exception_handlers)
        handle_unexpected = handlers.pop(Exception)
        self._plain: ASGIApp = ServerErrorMiddleware(ExceptionMiddleware(_call_route, handlers), handle_unexpected)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if route is None:
            await self.app(scope, receive, send)
            return
        scope["route"] = route  # as FastAPI does, for those who count requests by route
        await self._plain(scope, receive, send)


async def _call_route(scope: Scope, receive: Receive, send: Send) -> None:
    response = await scope["route"].endpoint(Request(scope, receive, send))
    await response(scope, receive, send)
