"""Reserves open files for the server itself, which needs more of them to replace an engine or to parse a large prompt,
however many connections clients keep open."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import time
from typing import Literal, NamedTuple

from serve_llm.common.open_files import RESERVE

logger = logging.getLogger(__name__)

WARNING_SECONDS = 60.0  # between two warnings


class ReservedFiles(NamedTuple):
    """Limits of a new connection's file descriptor. The system always assigns the lowest free number, so the number
    says how many files are open."""

    refused_from: float  # from here on, a connection gets an error
    dropped_from: float  # from here on, it is closed without an error, which would keep it open for a moment


def find_reserved_files() -> ReservedFiles:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return ReservedFiles(math.inf, math.inf)
    reserve = min(RESERVE, limit // 4)
    return ReservedFiles(limit - reserve, limit - reserve // 2)


class FileReserve:
    """Decides about new connections. One per HTTP server."""

    def __init__(self) -> None:
        self._warned_at = -math.inf

    def judge(self, transport: asyncio.Transport) -> Literal["accept", "refuse", "drop"]:
        reserved = find_reserved_files()
        descriptor = transport.get_extra_info("socket").fileno()
        if descriptor < reserved.refused_from:
            return "accept"
        now = time.monotonic()
        if now >= self._warned_at + WARNING_SECONDS:
            self._warned_at = now
            logger.warning(
                "Connections are refused: %d files are open, and the server needs the rest itself; raise the hard "
                "limit (ulimit -Hn; LimitNOFILE= in systemd; --ulimit nofile= in Docker)",
                descriptor,
            )
        return "refuse" if descriptor < reserved.dropped_from else "drop"
