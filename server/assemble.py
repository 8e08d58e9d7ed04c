"""Model, engine and app put together, for whoever has an event loop: the daemon, or a replica of Ray Serve.

The order makes the start short: the engine process first, because its imports take longest; what the app needs is
imported and loaded meanwhile. Knows neither sockets nor signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from serve_llm.engine.hub import resolve_model
from serve_llm.engine.options import Options
from serve_llm.server.process import STOP_SECONDS
from serve_llm.server.supervise import Supervisor

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from serve_llm.server.admission import Gate
    from serve_llm.server.prompt.pool import PromptPool

T = TypeVar("T")


class Assembly(NamedTuple):
    """Ready to serve. Who has it watches the supervisor, and stops it in the end."""

    app: ASGIApp
    gate: Gate
    supervisor: Supervisor
    prompts: PromptPool

    async def stop(self, patience: float = STOP_SECONDS) -> None:
        """End all processes, those of the engine after so many seconds by force. Idempotent."""
        self.prompts.close()
        await self.supervisor.stop(patience)


async def assemble(options: Options) -> Assembly:
    """Start the engine and build the app. Raises the ServeError that it failed with; then, and when cancelled, nothing
    is left running."""
    with_weights = options.load_format == "auto"
    directory = await _in_thread(
        lambda: resolve_model(options.model, options.revision, options.download_dir, weights=with_weights)
    )
    supervisor = Supervisor(options, str(directory))
    try:
        from serve_llm.server.app import create_app  # imported while the engine starts
        from serve_llm.server.prompt.model import ServedModel

        model = await _in_thread(lambda: ServedModel.load(directory, options))
        await supervisor.start()
        app, gate, prompts = create_app(supervisor.replicas, model, options)
        prompts.warm()
        return Assembly(app, gate, supervisor, prompts)
    except BaseException:
        await supervisor.stop()
        raise


async def _in_thread(work: Callable[[], T]) -> T:
    """In a thread that nobody waits for when the program ends, unlike a pool's: a download may take hours."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.done():  # cancelled meanwhile
            outcome()

    def run() -> None:
        try:
            result = work()
            outcome = functools.partial(future.set_result, result)
        except Exception as error:
            outcome = functools.partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, daemon=True).start()
    return await future
