"""Chooses the executor that runs the ranks. No torch, so that workers can be started before it is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass

from serve_llm.common.errors import CapacityError, OptionError
from serve_llm.common.options.schema import EngineOptions
from serve_llm.engine.devices import VISIBLE_DEVICES, list_gpus
from serve_llm.engine.parallel.layout import split_range


@dataclass(frozen=True)
class ExecutorFacts:
    """The facts that the choice depends on."""

    asked: str | None  # --distributed-executor-backend
    num_ranks: int
    in_placement_group: bool  # whether this runs inside a Ray placement group
    num_gpus: int | None  # visible on this host; None if ranks run on the CPU, which takes any number
    num_nodes: int = 1  # --nnodes


@dataclass(frozen=True)
class ExecutorChoice:
    backend: str  # "inprocess" | "mp" | "ray"
    reason: str
    device: str | None = None  # "cpu" | "cuda"; None if this host decides


def choose_executor(facts: ExecutorFacts) -> ExecutorChoice:
    """Raises OptionError for an executor that cannot run this many ranks, CapacityError if there are too few GPUs."""
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
        return ExecutorChoice(facts.asked, "it was asked for")
    if facts.in_placement_group:
        return ExecutorChoice("ray", "this runs inside a Ray placement group")
    if ranks == 1:
        return ExecutorChoice("inprocess", "there is one rank")
    if gpus is None:
        return ExecutorChoice("mp", f"{ranks} ranks fit on a CPU host")
    if gpus >= ranks:
        return ExecutorChoice("mp", f"this host has {gpus} GPUs for {ranks} ranks")
    return ExecutorChoice("ray", f"{ranks} ranks need more than the {gpus} GPUs of this host")


def _choose_for_nodes(facts: ExecutorFacts) -> ExecutorChoice:
    ranks_here = len(split_range(facts.num_ranks, facts.num_nodes)[0])
    if facts.asked == "ray":
        raise OptionError("--nnodes: Ray places ranks by itself; omit --nnodes, or do not choose ray")
    if facts.asked == "inprocess":
        raise OptionError(f"--distributed-executor-backend: inprocess runs on one host, not {facts.num_nodes}; use mp")
    if facts.num_gpus is not None and facts.num_gpus < ranks_here:
        raise CapacityError(f"--nnodes: {ranks_here} ranks on this host need as many GPUs; it has {facts.num_gpus}")
    return ExecutorChoice("mp", f"--nnodes spreads {facts.num_ranks} ranks over {facts.num_nodes} hosts")


def gather_facts(options: EngineOptions, in_placement_group: bool = False) -> ExecutorFacts:
    """Find the facts from the options and from this host."""
    gpus = len(list_gpus(os.environ.get(VISIBLE_DEVICES))) if options.device != "cpu" else 0
    only_choice = "inprocess" if options.model_impl == "transformers" else None
    return ExecutorFacts(
        asked=options.distributed_executor_backend or only_choice,
        num_ranks=options.tensor_parallel_size * options.pipeline_parallel_size,
        in_placement_group=in_placement_group,
        num_gpus=gpus if gpus or options.device == "cuda" else None,
        num_nodes=options.nnodes,
    )
