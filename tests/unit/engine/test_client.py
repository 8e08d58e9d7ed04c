"""What the client tells the engine of the process that it is in."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from serve_llm.engine import wire
from serve_llm.engine.client import _ray_cluster


class FakeRay:
    """The little of Ray's module that is asked. group: id of the placement group that this runs in."""

    def __init__(self, connected: bool, group: bytes | None = None) -> None:
        self.connected = connected
        current = None if group is None else SimpleNamespace(id=SimpleNamespace(hex=group.hex))
        self.util = SimpleNamespace(get_current_placement_group=lambda: current)

    def is_initialized(self) -> bool:
        return self.connected

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(gcs_address="10.0.0.1:6379")


def test_without_ray_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert _ray_cluster() is None
    assert "ray" not in sys.modules
    monkeypatch.setitem(sys.modules, "ray", FakeRay(connected=False))  # type: ignore[arg-type]
    assert _ray_cluster() is None


def test_the_cluster_and_its_placement_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay(connected=True))  # type: ignore[arg-type]
    assert _ray_cluster() == wire.RayCluster("10.0.0.1:6379", None)
    monkeypatch.setitem(sys.modules, "ray", FakeRay(connected=True, group=b"\x41\x30"))  # type: ignore[arg-type]
    assert _ray_cluster() == wire.RayCluster("10.0.0.1:6379", "4130")
