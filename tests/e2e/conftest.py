"""One daemon on the bundled demo model, shared by the tests that only talk to it; what one process answers."""

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
    """What one process answers to `nodes.body()`."""
    with Daemon("demo", *SMALL) as daemon:
        return complete(daemon.wait_until_serving())
