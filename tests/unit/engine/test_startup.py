"""What an engine takes of its host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serve_llm.common.hub import resolve_model
from serve_llm.engine.worker import worker
from support.engine import make_engine


@pytest.mark.parametrize(("num_engines", "threads"), [(1, 8), (2, 4), (3, 2), (100, 1)])
def test_engines_of_one_host_share_its_threads(monkeypatch: pytest.MonkeyPatch, num_engines: int, threads: int) -> None:
    found: list[int] = []
    monkeypatch.setattr(worker, "usable_cores", lambda: 8)  # a quota, on a machine of more
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    directory = Path(resolve_model("demo"))
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    make_engine(directory, data_parallel_size=num_engines)
    make_engine(directory, data_parallel_size=num_engines, cpu_threads=3)
    monkeypatch.delenv("OMP_NUM_THREADS")
    make_engine(directory, data_parallel_size=num_engines)
    assert found == [64, 3, threads]
