"""Loops of the server process that must not stop silently."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0  # delay after an error before a loop starts again


async def keep_running(loop: Callable[[], Coroutine[Any, Any, None]], purpose: str) -> None:
    """Run an endless loop until cancelled. An exception is logged with `purpose`, and the loop starts again."""
    while True:
        try:
            await loop()
        except Exception:
            logger.exception("An error stopped the server's loop that %s; it starts again", purpose)
        await asyncio.sleep(PAUSE_SECONDS)
