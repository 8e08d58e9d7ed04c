"""Adapter files are read again only if they may have changed, and what is remembered about them is bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_llm.common.types import Adapter
from serve_llm.engine.lora import adapter_checker
from serve_llm.engine.lora.hashed_files import compute_digest


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = []
    for name in "abcd":
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(name)
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
        adapters.append(Adapter(name, str(tmp_path / name), compute_digest(tmp_path / name)))
    read: list[str] = []

    def watched_digest(directory: Path) -> str:
        read.append(directory.name)
        return compute_digest(directory)

    monkeypatch.setattr(adapter_checker, "MAX_KNOWN", 3)
    monkeypatch.setattr(adapter_checker, "compute_digest", watched_digest)
    checker = adapter_checker.AdapterChecker()
    for name in "aabcadab":
        assert checker.check(adapters["abcd".index(name)]).result() == ""
    assert read == ["a", "b", "c", "d", "b"]
    (tmp_path / "a" / "adapter_config.json").write_text("changed")
    assert "have changed since it was loaded" in checker.check(adapters[0]).result()
