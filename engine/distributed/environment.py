"""Which environment variables of the engine are copied to workers on other nodes.

A node keeps variables that it has set itself. Variables specific to a machine or process are never copied: addresses
and interfaces, devices, ranks in a job, paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

_COPIED = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|UCX|HF|HUGGING_FACE|SERVE_LLM|OMP)_.+"
    r"|MKL_CBWR|TRANSFORMERS_OFFLINE|PYTHONHASHSEED|(https?|no|all)_proxy",
    re.IGNORECASE,
)
_LOCAL = re.compile(
    r".*_VISIBLE_DEVICES|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_.*|RAY_.*|.*_IFNAME|.*_HOST_?IP|.*_HOSTID"
    r"|OMP_NUM_THREADS|SERVE_LLM_API_KEY",  # depends on the host's cores; workers do not need it
    re.IGNORECASE,
)


def select_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to copy. May hold secrets (HF_TOKEN): log the names only."""
    return {name: environ[name] for name in sorted(environ) if _COPIED.fullmatch(name) and not _LOCAL.fullmatch(name)}


def apply_variables(environ: MutableMapping[str, str], copied: Mapping[str, str], initial: Mapping[str, str]) -> None:
    """Set the variables that the node has not set. environ: of this process, changed in place. initial: the environment
    that the process was started with. If OMP_NUM_THREADS is not in it, Ray has set it to one thread, and it is removed:
    the worker chooses its number of threads."""
    if "OMP_NUM_THREADS" not in initial:
        environ.pop("OMP_NUM_THREADS", None)
    for name, value in copied.items():
        environ.setdefault(name, value)


def read_initial_environ() -> dict[str, str]:
    """Read the environment that this process was started with."""
    entries = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries) if name}
