"""The limit on a process's open files, of which each connection is one. Linux only."""

from __future__ import annotations

import resource

from serve_llm.common.errors import CapacityError

WANTED = 65536  # the usual soft limit is 1,024, fewer than the streams of a busy server
RESERVE = 256  # files of a process besides the connections that are counted


def raise_limit() -> None:
    """Allow this process, and those that it starts later, as many open files as the system lets it, up to WANTED."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_limit(count: int, purpose: str) -> None:
    """Raise CapacityError if this process cannot open `count` files in addition to the usual ones. purpose: who needs
    them, such as "1024 ranks". Without this check, connections beyond the limit would wait without a word."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and allowed < count + RESERVE:
        raise CapacityError(
            f"{purpose} need {count + RESERVE} open files in one process, but only {allowed} are allowed: raise the "
            "hard limit (ulimit -Hn; LimitNOFILE= in systemd; --ulimit nofile= in Docker)"
        )
