"""A daemon with the bundled demo model, shared by tests that only send requests; and the answers of a single
process."""

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
    """Return the answers of a single process to `nodes.body()`."""
    with Daemon("demo", *SMALL) as daemon:
        return complete(daemon.wait_until_serving())
