"""Model, engine and app put together, for whoever has an event loop: the daemon, or a replica of Ray Serve.

The order makes the start short: the engine process first, because its imports take longest; what the app needs is
imported and loaded meanwhile. Knows neither sockets nor signals.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from serve_llm.engine.hub import resolve_model
from serve_llm.engine.options import Options
from serve_llm.server.supervise import Supervisor

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from serve_llm.server.admission import Gate


class Assembly(NamedTuple):
    """Ready to serve. Who has it watches the supervisor, and stops it in the end."""

    app: ASGIApp
    gate: Gate
    supervisor: Supervisor


async def assemble(options: Options) -> Assembly:
    """Start the engine and build the app. Raises the ServeError that it failed with; then, and when cancelled, nothing
    is left running."""
    with_weights = options.load_format == "auto"
    directory = await asyncio.to_thread(
        resolve_model, options.model, options.revision, options.download_dir, weights=with_weights
    )
    supervisor = Supervisor(options, str(directory))
    try:
        from serve_llm.server.app import create_app  # imported while the engine starts
        from serve_llm.server.prompt.model import ServedModel

        model = await asyncio.to_thread(ServedModel.load, directory, options)
        await supervisor.start()
        return Assembly(*create_app(supervisor.replicas, model, options), supervisor)
    except BaseException:
        await supervisor.stop()
        raise
