"""Chooses the executor that runs the ranks. Must not import torch, so that workers can be started before it is
imported."""

from __future__ import annotations

import os
from dataclasses import dataclass

from serve_llm.common.engine_placement import EnginePlacement
from serve_llm.common.errors import CapacityError, OptionError
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.engine.devices import VISIBLE_DEVICES, list_gpus


@dataclass(frozen=True)
class ExecutorFacts:
    """The facts that the choice depends on."""

    asked: str | None  # --distributed-executor-backend
    num_ranks: int
    in_placement_group: bool  # whether this runs inside a Ray placement group
    num_gpus: int | None  # visible on this host; None if ranks run on the CPU, which takes any number
    nodes: range = range(1)  # hosts of --nnodes that the ranks are on
    local_ranks: int | None = None  # ranks on this host; None without --nnodes: all


@dataclass(frozen=True)
class ExecutorChoice:
    backend: str  # "inprocess" | "mp" | "ray"
    reason: str
    device: str | None = None  # "cpu" | "cuda"; None if this host decides


def choose_executor(facts: ExecutorFacts) -> ExecutorChoice:
    """Raises OptionError for an executor that cannot run this many ranks, CapacityError if there are too few GPUs."""
    if facts.local_ranks is not None:
        return _choose_for_nodes(facts, facts.local_ranks)
    ranks = facts.num_ranks
    gpus = facts.num_gpus
    if facts.asked == "inprocess" and ranks > 1:
        raise OptionError(f"--distributed-executor-backend: inprocess runs one rank, not {ranks}; use mp or ray")
    if facts.asked == "mp" and gpus is not None and gpus < ranks:
        raise CapacityError(
            f"--distributed-executor-backend: mp needs {ranks} GPUs on this host, which has {gpus}; use fewer ranks "
            "(--tensor-parallel-size, --pipeline-parallel-size), ray, or --device cpu"
        )
    if facts.asked is not None:
        return ExecutorChoice(facts.asked, "it was requested")
    if facts.in_placement_group:
        return ExecutorChoice("ray", "this runs inside a Ray placement group")
    if ranks == 1:
        return ExecutorChoice("inprocess", "there is one rank")
    if gpus is None:
        return ExecutorChoice("mp", f"{ranks} ranks fit on a CPU host")
    if gpus >= ranks:
        return ExecutorChoice("mp", f"this host has {gpus} GPUs for {ranks} ranks")
    return ExecutorChoice("ray", f"{ranks} ranks need more than the {gpus} GPUs of this host")


def _choose_for_nodes(facts: ExecutorFacts, local_ranks: int) -> ExecutorChoice:
    ranks = facts.num_ranks
    if facts.asked == "ray":
        raise OptionError("--nnodes: Ray places ranks by itself; omit --nnodes, or do not choose ray")
    if facts.asked == "inprocess":
        raise OptionError("--distributed-executor-backend: inprocess runs on one host only, not with --nnodes; use mp")
    if facts.num_gpus is not None and facts.num_gpus < local_ranks:
        raise CapacityError(f"--nnodes: {local_ranks} ranks on this host need as many GPUs; it has {facts.num_gpus}")
    if local_ranks == ranks == 1 and facts.asked is None:
        return ExecutorChoice("inprocess", "there is one rank")
    if local_ranks == ranks:
        return ExecutorChoice("mp", f"the engine's {ranks} ranks are on this host")
    if len(facts.nodes) == 1:
        what = f"{ranks} ranks" if ranks > 1 else "one rank"
        return ExecutorChoice("mp", f"--nnodes puts the engine's {what} on node {facts.nodes[0]}")
    return ExecutorChoice("mp", f"--nnodes spreads {ranks} ranks over {len(facts.nodes)} hosts")


def gather_facts(options: EngineOptions, in_placement_group: bool = False, engine: int = 0) -> ExecutorFacts:
    """Gather the facts from the options and this host. engine: index of the data-parallel engine."""
    gpus = len(list_gpus(os.environ.get(VISIBLE_DEVICES))) if options.device != "cpu" else 0
    only_choice = "inprocess" if options.model_impl == "transformers" else None
    placement = EnginePlacement.from_options(options)
    return ExecutorFacts(
        asked=options.distributed_executor_backend or only_choice,
        num_ranks=placement.num_ranks,
        in_placement_group=in_placement_group,
        num_gpus=gpus if gpus or options.device == "cuda" else None,
        nodes=placement.nodes[engine],
        local_ranks=len(placement.local_ranks(engine)) if options.nnodes > 1 else None,
    )
