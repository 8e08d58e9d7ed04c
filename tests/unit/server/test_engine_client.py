"""The Ray cluster that the client reports to the engine."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from serve_llm.common import messages
from serve_llm.server.engines.client import _ray_cluster


class FakeRay:
    """The parts of the ray module that are used. group: id of the current placement group."""

    def __init__(self, connected: bool, group: bytes | None = None) -> None:
        self.connected = connected
        current = None if group is None else SimpleNamespace(id=SimpleNamespace(hex=group.hex))
        self.util = SimpleNamespace(get_current_placement_group=lambda: current)

    def is_initialized(self) -> bool:
        return self.connected

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(gcs_address="10.0.0.1:6379")


def test_without_ray_there_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert _ray_cluster() is None
    assert "ray" not in sys.modules
    monkeypatch.setitem(sys.modules, "ray", FakeRay(connected=False))  # type: ignore[arg-type]
    assert _ray_cluster() is None


def test_the_cluster_and_placement_group_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay(connected=True))  # type: ignore[arg-type]
    assert _ray_cluster() == messages.RayCluster("10.0.0.1:6379", None)
    monkeypatch.setitem(sys.modules, "ray", FakeRay(connected=True, group=b"\x41\x30"))  # type: ignore[arg-type]
    assert _ray_cluster() == messages.RayCluster("10.0.0.1:6379", "4130")
