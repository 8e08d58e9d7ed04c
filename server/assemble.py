"""Start the engine and build the app, for the daemon or for a replica of Ray Serve. Opens no socket, handles no signal.

The engine process starts first, because its imports take longest; the app's imports and the tokenizer load in parallel.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from serve_llm.common.errors import CapacityError, OptionError
from serve_llm.common.hub import resolve_draft_checkpoint, resolve_model
from serve_llm.common.options.schema import Options
from serve_llm.server.engines.process import STOP_SECONDS
from serve_llm.server.engines.supervisor import Supervisor
from serve_llm.server.thread_pool import MORE_PROCESSES
from serve_llm.server.tracing.start import EXPORT_SECONDS, start_tracing

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from serve_llm.server.admission.controller import AdmissionController
    from serve_llm.server.batches.service import BatchService
    from serve_llm.server.engines.scaler import Scaler
    from serve_llm.server.front_ends.group import FrontEndGroup
    from serve_llm.server.prompt.pool import PromptPool
    from serve_llm.server.storage.storage import Storage
    from serve_llm.server.tracing.tracing import Tracing

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Assembly(NamedTuple):
    """All parts of a running server. The owner watches the supervisor and calls `stop` at the end."""

    app: ASGIApp
    admission: AdmissionController
    supervisor: Supervisor
    scaler: Scaler | None  # None: the number of engines is fixed
    prompts: PromptPool
    storage: Storage
    batches: BatchService | None
    tracing: Tracing | None  # None: no traces

    async def stop_batches(self) -> None:
        """Stop the batches; the next server continues them. Idempotent."""
        if self.batches is not None:
            await self.batches.stop()

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Stop all processes; kill those of the engines after `seconds`. Idempotent."""
        await self.stop_batches()
        self.prompts.close()
        if self.scaler is not None:
            await self.scaler.stop()
        await self.supervisor.stop(seconds)
        self.storage.close()
        if self.tracing is not None:
            await asyncio.wait([asyncio.ensure_future(_in_thread(self.tracing.stop))], timeout=EXPORT_SECONDS)


async def assemble(options: Options, front_ends: FrontEndGroup | None = None) -> Assembly:
    """Raises the ServeError with which the start failed. Leaves no engine process behind on failure or cancellation.

    front_ends: processes that answer clients; the caller starts and stops them.
    """
    if options.has_front_ends and front_ends is None:
        name = "--front-ends" if options.front_ends > 1 else "--front-end-addr"
        raise OptionError(f"{name}: only the server that `serve-llm MODEL` starts has other processes answer clients")
    tracing = start_tracing(options.otlp_traces_endpoint)
    with_weights = options.load_format == "auto"
    directory = await _in_thread(
        lambda: resolve_model(options.model, options.revision, options.download_dir, weights=with_weights)
    )
    speculation = options.speculation
    draft_model = None if speculation is None else speculation.model
    if speculation is not None and draft_model is not None:  # engines find it in the cache
        revision = speculation.revision
        await _in_thread(
            lambda: resolve_draft_checkpoint(draft_model, revision, options.download_dir, weights=with_weights)
        )
    supervisor = Supervisor(options, str(directory))
    async with contextlib.AsyncExitStack() as on_failure:
        on_failure.push_async_callback(supervisor.stop)
        from serve_llm.server.adapters.registry import AdapterRegistry
        from serve_llm.server.app import create_app  # imported while the engine starts
        from serve_llm.server.engines.scaler import Scaler
        from serve_llm.server.prompt.model import ServedModel
        from serve_llm.server.storage.storage import Storage

        storage = Storage.open(options)  # before waiting for the engine: an unwritable folder fails early
        on_failure.callback(storage.close)
        model = await _in_thread(lambda: ServedModel.load(directory, options))
        await _in_thread(model.log_findings)
        await supervisor.start()
        adapters = AdapterRegistry(
            supervisor.replicas.model_info, options.max_lora_rank, model.names, options.download_dir
        )
        await adapters.load_all(options.lora_modules)
        scaler = Scaler(supervisor, options.min_engines, options.max_engines) if options.is_scalable else None
        app, admission, prompts, batches = create_app(
            supervisor.replicas, model, options, storage, adapters, tracing, front_ends, scaler
        )
        prompts.start_first_worker()
        if batches is not None:
            await batches.resume()
        on_failure.pop_all()
    return Assembly(app, admission, supervisor, scaler, prompts, storage, batches, tracing)


async def _in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread, which does not keep the program alive: a download may take hours. Raises
    CapacityError if the system allows no thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.done():  # unless it was cancelled
            outcome()

    def run() -> None:
        try:
            result = work()
            outcome = functools.partial(future.set_result, result)
        except Exception as error:
            outcome = functools.partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing awaits the result
            loop.call_soon_threadsafe(settle, outcome)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:
        raise CapacityError(f"the system allows the server no further thread; {MORE_PROCESSES}") from None
    return await future
