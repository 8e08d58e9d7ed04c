"""The processes of ranks: a warning if more start than the host has cores for."""

from __future__ import annotations

import logging
import subprocess

import pytest

from serve_llm.engine.distributed import launcher


@pytest.mark.parametrize(("count", "warns"), [(8, False), (9, True)])
def test_many_ranks_on_few_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, count: int, warns: bool
) -> None:
    started = []
    monkeypatch.setattr(launcher, "count_usable_cores", lambda: 2)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    caplog.set_level(logging.WARNING)
    launcher.WorkerLauncher(range(count), "ipc:///nowhere")
    assert len(started) == count
    expected = "9 ranks on 2 cores wait for each other from loading on; fewer are faster "
    assert [text.startswith(expected) for text in caplog.messages] == [True] * warns
