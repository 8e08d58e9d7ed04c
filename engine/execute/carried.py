"""Which environment variables travel from the engine to ranks on other nodes. Pure: mappings in, mappings out.

What a node has set itself wins there. What belongs to one machine or one process never travels: its addresses and
interfaces, its devices, its place in a job, its paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

_CARRIED = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|UCX|HF|HUGGING_FACE|SERVE_LLM|OMP)_.+"
    r"|TRANSFORMERS_OFFLINE|PYTHONHASHSEED|(https?|no|all)_proxy",
    re.IGNORECASE,
)
_LOCAL = re.compile(
    r".*_VISIBLE_DEVICES|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_.*|RAY_.*|.*_IFNAME|.*_HOST_?IP|.*_HOSTID"
    r"|OMP_NUM_THREADS|SERVE_LLM_API_KEY",  # of one host's cores; of no use to a rank
    re.IGNORECASE,
)


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """What ranks elsewhere should have as well. May hold secrets (HF_TOKEN): log the names only."""
    return {name: environ[name] for name in sorted(environ) if _CARRIED.fullmatch(name) and not _LOCAL.fullmatch(name)}


def arrive(environ: MutableMapping[str, str], given: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Fill in what the node has not set. environ: of this process, changed in place. own: what it had when it started;
    OMP_NUM_THREADS that has come since is Ray's guess of one thread, and threads are shared out by us."""
    if "OMP_NUM_THREADS" not in own:
        environ.pop("OMP_NUM_THREADS", None)
    for name, value in given.items():
        environ.setdefault(name, value)
