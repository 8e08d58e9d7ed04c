"""Cores and threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve_llm.engine.execute.threads import threads_per_rank, usable_cores

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, ALL),
        ({"cpu.max": "max 100000\n"}, ALL),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": f"{(ALL + 5) * 100000} 100000\n"}, ALL),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, ALL),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_cores_by_affinity_and_quota(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores


def test_threads_are_shared_out() -> None:
    assert [threads_per_rank(8, ranks) for ranks in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
