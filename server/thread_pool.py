"""Threads for work that would block the event loop, within the limit that the system sets on threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import uvloop

from serve_llm.server.http.errors import Unavailable

T = TypeVar("T")

logger = logging.getLogger(__name__)

MORE_PROCESSES = "raise the limit on processes (ulimit -u; TasksMax= in systemd; --pids-limit in Docker)"
"""The remedy for a limit that counts threads too."""


class ThreadPool(ThreadPoolExecutor):
    """Goes on with the threads it has if the system allows no further one. Without any, `submit` raises Unavailable.

    The base class raises RuntimeError in both cases, although in the first one it runs the job nevertheless."""

    _has_warned = False

    def _adjust_thread_count(self) -> None:
        """Called by `submit` once the job is in the queue."""
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("The system allows no further thread; %s", MORE_PROCESSES)
            if not self._threads:
                self._work_queue.get_nowait()  # nobody would take it
                raise Unavailable("the system allows the server no further thread; try again later") from None


class _Loop(uvloop.Loop):
    async def shutdown_default_executor(self, *arguments: Any) -> None:
        """The base class starts a thread that waits for the others. If it cannot, Python waits for them at its end."""
        with contextlib.suppress(RuntimeError):
            await super().shutdown_default_executor(*arguments)


def run_main(main: Coroutine[Any, Any, T]) -> T:
    """Like `uvloop.run`, with a `ThreadPool` for the jobs of `asyncio.to_thread`."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        runner.get_loop().set_default_executor(ThreadPool())
        return runner.run(main)
