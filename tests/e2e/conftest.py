"""A daemon with the bundled demo model, shared by tests that only send requests; and a single process's answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.daemon import Daemon
from support.nodes import SMALL, complete


@pytest.fixture(scope="session")
def server() -> Iterator[Daemon]:
    with Daemon("demo") as daemon:
        daemon.wait_until_serving()
        yield daemon


@pytest.fixture(scope="session")
def continuations() -> list[str]:
    """A single process's answers to `nodes.body()`."""
    with Daemon("demo", *SMALL) as daemon:
        return complete(daemon.wait_until_serving())
