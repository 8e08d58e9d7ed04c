"""One daemon on the bundled demo model, shared by the tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.daemon import Daemon


@pytest.fixture(scope="session")
def server() -> Iterator[Daemon]:
    with Daemon("demo") as daemon:
        daemon.wait_until_serving()
        yield daemon
