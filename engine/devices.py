"""Which GPUs of this host an engine process may use. Torch-free: it is decided before CUDA is touched.

Called at the very start of an engine process, by `engine.__main__` only; knows nothing of ranks.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from pathlib import Path

from serve_llm.engine.errors import CapacityError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def claim_gpus(
    environ: MutableMapping[str, str], engine: int, num_engines: int, per_engine: int, devices: Path = Path("/dev")
) -> None:
    """Leave in CUDA_VISIBLE_DEVICES the GPUs of this engine: each of several takes the next `per_engine` of the visible
    ones. A single engine sees them all, and a host without GPUs is left alone.

    Raises CapacityError if there are too few for all engines.
    """
    names = gpu_names(environ.get(VISIBLE), devices)
    if num_engines == 1 or not names:
        return
    if len(names) < num_engines * per_engine:
        raise CapacityError(
            f"--data-parallel-size: {num_engines} engines need {num_engines * per_engine} GPUs, but {len(names)} can "
            "be seen; use fewer engines, --distributed-executor-backend ray, or --device cpu"
        )
    environ[VISIBLE] = ",".join(names[engine * per_engine : (engine + 1) * per_engine])


def gpu_names(visible: str | None, devices: Path = Path("/dev")) -> list[str]:
    """What CUDA calls the GPUs that a process sees. visible: its CUDA_VISIBLE_DEVICES, whose list ends, as CUDA reads
    it, at the first entry that cannot be one."""
    count = sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    if visible is None or count == 0:
        return [str(number) for number in range(count)]
    names = [name.strip() for name in visible.split(",")]
    wrong = next((place for place, name in enumerate(names) if not name or name.startswith("-")), len(names))
    return names[:wrong]
