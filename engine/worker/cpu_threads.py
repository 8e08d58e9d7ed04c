"""Chooses the number of threads of a rank on a CPU: its share of the cores that the process may use. Torch-free."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CpuThreads:
    """The threads of one rank. Serialisable."""

    count: int
    source: str  # what decided the count, for the log
    cores: int  # usable by the processes of this host
    local_ranks: int  # ranks that share them, including those of other engines

    @property
    def text(self) -> str:
        unit = "thread" if self.count == 1 else "threads"
        return f"{self.count} {unit}{' per rank' if self.local_ranks > 1 else ''} ({self.source})"


def choose_threads(requested: int | None, omp: int | None, cores: int, local_ranks: int) -> CpuThreads:
    """requested: --cpu-threads. omp: the value of OMP_NUM_THREADS, None if not set. The default is the rank's share of
    the cores, because more threads than cores would wait for each other."""
    if requested is not None:
        return CpuThreads(requested, "--cpu-threads", cores, local_ranks)
    if omp is not None:
        return CpuThreads(omp, "OMP_NUM_THREADS", cores, local_ranks)
    source = f"{cores} {'core' if cores == 1 else 'cores'} for {local_ranks} {'rank' if local_ranks == 1 else 'ranks'}"
    return CpuThreads(max(1, cores // local_ranks), source, cores, local_ranks)


def log_threads(by_rank: Sequence[CpuThreads]) -> None:
    """Log the threads, in one line if they are the same on all ranks, and warn if there are more threads than cores."""
    for threads in dict.fromkeys(by_rank):
        ranks = [str(rank) for rank, other in enumerate(by_rank) if other == threads]
        subject = "Computing" if len(ranks) == len(by_rank) else f"Rank {', '.join(ranks)}: computing"
        logger.info("%s with %s", subject, threads.text)
        if threads.count > max(1, threads.cores // threads.local_ranks):
            logger.warning(
                "%s: more than the %d usable cores, so threads wait for each other",
                threads.text,
                threads.cores,
            )


def count_usable_cores(mount: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Cores by affinity or by the smallest CPU quota of this process's cgroups, rounded down; at least 1.

    mount: where cgroups are mounted. membership: the file that lists the cgroups of this process.
    """
    cores = len(os.sched_getaffinity(0))
    quotas = [quota for folder in _find_cgroups(mount, membership) if (quota := _read_quota(folder)) is not None]
    return max(1, min([cores, *quotas]))


def _find_cgroups(mount: Path, membership: Path) -> Iterator[Path]:
    """The process's CPU cgroups, version 2 and 1, and their parents. In a container the process's own cgroup may be
    mounted as the root, so that its path does not exist."""
    yield from (mount, mount / "cpu")
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:  # "0::/a/b" or "4:cpu,cpuacct:/a/b"
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            folder = (mount / "cpu" if controllers else mount) / path.strip("/")
            yield from (parent for parent in (folder, *folder.parents) if mount in parent.parents)


def _read_quota(folder: Path) -> int | None:
    """Whole cores; None if there is no limit."""
    try:  # version 2: "max 100000" or "150000 100000"
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:  # version 1: -1 means none
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return int(quota) // int(period) if quota.isdigit() else None
