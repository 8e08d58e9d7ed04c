"""How many threads a rank computes with on a CPU: its share of the cores that this process may use. No torch."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores by affinity, or the whole ones that the cgroup's quota comes to if that is less; at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:  # version 2: "max 100000" or "150000 100000"
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:  # version 1: -1 means none
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return cores
    if not quota.isdigit():
        return cores
    return max(1, min(cores, int(quota) // int(period)))


def threads_per_rank(cores: int, local_ranks: int) -> int:
    """local_ranks: all that share this host's cores. More threads than cores would wait for each other."""
    return max(1, cores // local_ranks)
