"""The options that `serve-llm plan` has beside the daemon's: which machines it plans for."""

from __future__ import annotations

from dataclasses import dataclass

from serve_llm.engine import values
from serve_llm.engine.fields import option
from serve_llm.engine.gpus import GPUS


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What `serve-llm plan` plans for; its other options are the daemon's."""

    gpu: str | None = option(None, values.choice(*GPUS), f"kind of GPU: {', '.join(GPUS)}", shown="NAME")
    gpus_per_node: int | None = option(None, values.whole(1, 1024), "GPUs in one machine (default: 8)")
    nodes: int = option(1, values.whole(1, 1024), "machines")
    nvlink: bool = option(
        True,
        values.boolean,
        "whether the GPUs of a machine are joined by NVLink; of kinds known to lack it they are not",
    )
    memory: int | None = option(
        None,
        values.positive(values.parse_bytes),
        "memory of one GPU, instead of --gpu; with --device cpu, of one machine (default: what is free on this one)",
        shown="BYTES",
    )
