"""How many cores and threads are used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serve_llm.engine.worker.cpu_threads import CpuThreads, choose_threads, count_usable_cores, log_threads

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, ALL),
        ({"cpu.max": "max 100000\n"}, ALL),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": f"{(ALL + 5) * 100000} 100000\n"}, ALL),
        ({"own": "0::/a/b\n", "a/cpu.max": "100000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1),
        ({"own": "0::/a/b\n", "c/cpu.max": "100000 100000\n"}, ALL),
        (
            {
                "own": "3:cpu,cpuacct:/a/b\n",
                "cpu/a/b/cpu.cfs_quota_us": "100000\n",
                "cpu/a/b/cpu.cfs_period_us": "1000\n",
            },
            ALL,
        ),
        ({"own": "3:cpu,cpuacct:/a/b\n", "cpu/a/cpu.cfs_quota_us": "9000\n", "cpu/a/cpu.cfs_period_us": "9000\n"}, 1),
        ({"own": "9:memory:/a\n0::/\n", "cpu/a/cpu.cfs_quota_us": "9000\n", "cpu/a/cpu.cfs_period_us": "9000\n"}, ALL),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, ALL),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_cores_by_affinity_and_quota(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert count_usable_cores(tmp_path, tmp_path / "own") == cores


def test_who_says_how_many_threads() -> None:
    assert [choose_threads(None, None, 8, ranks).count for ranks in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert choose_threads(None, 3, 8, 2) == CpuThreads(3, "OMP_NUM_THREADS", 8, 2)
    assert choose_threads(5, 3, 8, 2) == CpuThreads(5, "--cpu-threads", 8, 2)
    assert choose_threads(None, None, 1, 1).text == "1 thread (1 core for 1 rank)"
    assert choose_threads(None, None, 8, 4).text == "2 threads per rank (8 cores for 4 ranks)"


@pytest.mark.parametrize(
    ("threads", "warned"),
    [((2, 2, 1), False), ((3, 2, 1), True), ((2, 4, 2), False), ((2, 3, 2), True), ((1, 2, 5), False)],
)
def test_more_threads_than_cores_are_warned_of(
    caplog: pytest.LogCaptureFixture, threads: tuple[int, int, int], warned: bool
) -> None:
    count, cores, ranks = threads
    with caplog.at_level("INFO"):
        log_threads([choose_threads(count, None, cores, ranks)] * ranks)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"][: 1 + warned]


def test_hosts_that_differ_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        log_threads([choose_threads(None, None, cores, 2) for cores in (8, 4, 8)])
    assert caplog.messages == [
        "Rank 0, 2: computing with 4 threads per rank (8 cores for 2 ranks)",
        "Rank 1: computing with 2 threads per rank (4 cores for 2 ranks)",
    ]
