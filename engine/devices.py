"""Assigns GPUs of this host to engine processes. Torch-free: call it before CUDA is initialised."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from pathlib import Path

from serve_llm.common.errors import CapacityError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def claim_gpus(
    environ: MutableMapping[str, str], engine: int, num_engines: int, per_engine: int, devices: Path = Path("/dev")
) -> None:
    """Restrict CUDA_VISIBLE_DEVICES to this engine's GPUs: each engine takes the next `per_engine` visible ones. Does
    nothing for a single engine or on a host without GPUs.

    Raises CapacityError if there are too few GPUs for all engines.
    """
    names = list_gpus(environ.get(VISIBLE_DEVICES), devices)
    if num_engines == 1 or not names:
        return
    if len(names) < num_engines * per_engine:
        raise CapacityError(
            f"--data-parallel-size: {num_engines} engines need {num_engines * per_engine} GPUs, but {len(names)} can "
            "be seen; use fewer engines (or a smaller --data-parallel-max), --distributed-executor-backend ray, or "
            "--device cpu"
        )
    environ[VISIBLE_DEVICES] = ",".join(names[engine * per_engine : (engine + 1) * per_engine])


def list_gpus(visible: str | None, devices: Path = Path("/dev")) -> list[str]:
    """List CUDA's names of the GPUs that a process sees. visible: its CUDA_VISIBLE_DEVICES, which ends at the first
    invalid entry, as in CUDA."""
    count = sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    if visible is None or count == 0:
        return [str(number) for number in range(count)]
    names = [name.strip() for name in visible.split(",")]
    first_invalid = next((n for n, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return names[:first_invalid]
