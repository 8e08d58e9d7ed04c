"""Change the number of engines while requests are served, as an administrator asks."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from serve_llm.common.errors import ServeError
from serve_llm.server.http.errors import Conflict, InvalidRequest

logger = logging.getLogger(__name__)


class ScalableEngines(Protocol):
    """The part of `server.engines.supervisor.Supervisor` that a scaler uses."""

    @property
    def num_engines(self) -> int: ...

    async def add_engines(self, count: int) -> None: ...

    async def remove_engine(self, seconds: float) -> None: ...


class Scaler:
    """Create it in the event loop, when the engines are ready."""

    def __init__(self, supervisor: ScalableEngines, fewest: int, most: int) -> None:
        """fewest, most: bounds on the number of engines."""
        self.fewest = fewest
        self.most = most
        self.target = supervisor.num_engines
        self.error: str | None = None  # why the last change failed
        self._supervisor = supervisor
        self._task: asyncio.Task[None] | None = None

    @property
    def num_engines(self) -> int:
        """The number of engines, including those being added or drained."""
        return self._supervisor.num_engines

    @property
    def is_under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def scale(self, target: int, drain_seconds: float) -> None:
        """Begin to add or remove engines. A removed engine finishes its requests; those still open after
        `drain_seconds` continue on the others.

        Raises InvalidRequest for a number outside the bounds, Conflict while a change is in progress.
        """
        if not self.fewest <= target <= self.most:
            raise InvalidRequest(
                f"data_parallel_size: {target} is not between {self.fewest} (--data-parallel-min) and {self.most} "
                "(--data-parallel-max)",
                "data_parallel_size",
            )
        if self.is_under_way:
            if target == self.target:
                return
            raise Conflict(f"a change to {self.target} engines is in progress; GET /status shows when it has ended")
        self.target = target
        self.error = None
        self._task = asyncio.create_task(self._run(drain_seconds))

    async def stop(self) -> None:
        """Cancel a change that is in progress. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, drain_seconds: float) -> None:
        supervisor = self._supervisor
        logger.info("Scaling from %d to %d engines", supervisor.num_engines, self.target)
        try:
            if self.target > supervisor.num_engines:
                await supervisor.add_engines(self.target)
            while self.target < supervisor.num_engines:
                await supervisor.remove_engine(drain_seconds)
        except ServeError as error:
            self.error = str(error)
            logger.error("%s; no engine was added, and %d keep running", error, supervisor.num_engines)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            logger.exception("scaling failed")
        else:
            logger.info("%d engines serve", supervisor.num_engines)
        self.target = supervisor.num_engines
