"""Which executor runs the ranks, and why: a rule over a few facts. No torch, so that ranks can be started first."""

from __future__ import annotations

import os
from dataclasses import dataclass

from serve_llm.engine.devices import VISIBLE, gpu_names
from serve_llm.engine.errors import CapacityError, OptionError
from serve_llm.engine.options import Options
from serve_llm.engine.parallel.layout import shares


@dataclass(frozen=True)
class Facts:
    """What the choice depends on."""

    asked: str | None  # --distributed-executor-backend
    num_ranks: int
    in_placement_group: bool  # of Ray
    num_gpus: int | None  # that this host has for us; None: ranks run on the CPU, which takes any number
    num_nodes: int = 1  # --nnodes


@dataclass(frozen=True)
class Choice:
    backend: str  # "inprocess" | "mp" | "ray"
    reason: str
    device: str | None = None  # "cpu" | "cuda", where others than this host decide on it


def choose(facts: Facts) -> Choice:
    """Raises OptionError for an executor that cannot run so many ranks, CapacityError where GPUs are missing."""
    if facts.num_nodes > 1:
        return _choose_for_nodes(facts)
    ranks, gpus = facts.num_ranks, facts.num_gpus
    if facts.asked == "inprocess" and ranks > 1:
        raise OptionError(f"--distributed-executor-backend: inprocess runs one rank, not {ranks}; use mp or ray")
    if facts.asked == "mp" and gpus is not None and gpus < ranks:
        raise CapacityError(
            f"--distributed-executor-backend: mp needs {ranks} GPUs on this host, which has {gpus}; use fewer ranks "
            "(--tensor-parallel-size, --pipeline-parallel-size), ray, or --device cpu"
        )
    if facts.asked is not None:
        return Choice(facts.asked, "it was asked for")
    if facts.in_placement_group:
        return Choice("ray", "this runs inside a Ray placement group")
    if ranks == 1:
        return Choice("inprocess", "there is one rank")
    if gpus is None:
        return Choice("mp", f"{ranks} ranks fit on a CPU host")
    if gpus >= ranks:
        return Choice("mp", f"this host has {gpus} GPUs for {ranks} ranks")
    return Choice("ray", f"{ranks} ranks need more than the {gpus} GPUs of this host")


def _choose_for_nodes(facts: Facts) -> Choice:
    ranks_here = len(shares(facts.num_ranks, facts.num_nodes)[0])
    if facts.asked == "ray":
        raise OptionError("--nnodes: Ray places ranks by itself; leave --nnodes away, or ray")
    if facts.asked == "inprocess":
        raise OptionError(f"--distributed-executor-backend: inprocess runs on one host, not {facts.num_nodes}; use mp")
    if facts.num_gpus is not None and facts.num_gpus < ranks_here:
        raise CapacityError(f"--nnodes: {ranks_here} ranks on this host need as many GPUs; it has {facts.num_gpus}")
    return Choice("mp", f"--nnodes spreads {facts.num_ranks} ranks over {facts.num_nodes} hosts")


def look_around(options: Options, in_placement_group: bool = False) -> Facts:
    """The facts, for what the user asked for on this host."""
    gpus = len(gpu_names(os.environ.get(VISIBLE))) if options.device != "cpu" else 0
    alone = "inprocess" if options.model_impl == "transformers" else None
    return Facts(
        asked=options.distributed_executor_backend or alone,
        num_ranks=options.tensor_parallel_size * options.pipeline_parallel_size,
        in_placement_group=in_placement_group,
        num_gpus=gpus if gpus or options.device == "cuda" else None,
        num_nodes=options.nnodes,
    )
