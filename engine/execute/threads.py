"""How many threads a rank computes with on a CPU: its share of the cores that this process may use. No torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Threads:
    """Of one rank. Fits on the wire."""

    count: int
    source: str  # who says so, for people
    cores: int  # that the processes of this host may use
    local_ranks: int  # that share them, those of other engines included

    @property
    def text(self) -> str:
        unit = "thread" if self.count == 1 else "threads"
        return f"{self.count} {unit}{' per rank' if self.local_ranks > 1 else ''} ({self.source})"


def choose_threads(asked: int | None, omp: int | None, cores: int, local_ranks: int) -> Threads:
    """asked: --cpu-threads. omp: what OMP_NUM_THREADS comes to, None if it is not set. Else the rank's share of the
    cores: more threads than cores would wait for each other."""
    if asked is not None:
        return Threads(asked, "--cpu-threads", cores, local_ranks)
    if omp is not None:
        return Threads(omp, "OMP_NUM_THREADS", cores, local_ranks)
    source = f"{cores} {'core' if cores == 1 else 'cores'} for {local_ranks} {'rank' if local_ranks == 1 else 'ranks'}"
    return Threads(max(1, cores // local_ranks), source, cores, local_ranks)


def announce(by_rank: Sequence[Threads]) -> None:
    """One line in the log, or one for each kind of host, and a warning where there are more threads than cores."""
    for threads in dict.fromkeys(by_rank):
        own = [str(rank) for rank, other in enumerate(by_rank) if other == threads]
        who = "Computing" if len(own) == len(by_rank) else f"Rank {', '.join(own)}: computing"
        logger.info("%s with %s", who, threads.text)
        if threads.count > max(1, threads.cores // threads.local_ranks):
            logger.warning(
                "%s: more than the %d cores that may be used, so that threads wait for each other",
                threads.text,
                threads.cores,
            )


def usable_cores(mount: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Cores by affinity, or the whole ones that the smallest quota of this process's cgroups comes to if that is less;
    at least 1. mount: where cgroups are. own: which of them this process is in."""
    cores = len(os.sched_getaffinity(0))
    quotas = [quota for folder in _folders(mount, own) if (quota := _quota(folder)) is not None]
    return max(1, min([cores, *quotas]))


def _folders(mount: Path, own: Path) -> Iterator[Path]:
    """The process's cgroups for CPUs, of version 2 and 1, and all those around them. In a container the own one may be
    mounted as the outermost, and its path name nothing."""
    yield from (mount, mount / "cpu")
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:  # "0::/a/b" or "4:cpu,cpuacct:/a/b"
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            folder = (mount / "cpu" if controllers else mount) / path.strip("/")
            yield from (parent for parent in (folder, *folder.parents) if mount in parent.parents)


def _quota(folder: Path) -> int | None:
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
