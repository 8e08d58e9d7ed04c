"""Starts the ranks that are processes of their own, by the executor that the rule chooses: early, so that they import
what they need while the engine does the same. No torch, and no Ray unless it is chosen.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec

from serve_llm.engine.devices import claim_gpus
from serve_llm.engine.errors import CapacityError, OptionError
from serve_llm.engine.execute import memory
from serve_llm.engine.execute.choose import Choice, choose, look_around
from serve_llm.engine.execute.discovery import LOCAL, find_cluster
from serve_llm.engine.execute.executors import mp
from serve_llm.engine.execute.nodes import start_on_nodes
from serve_llm.engine.execute.roster import Roster
from serve_llm.engine.options import Options
from serve_llm.engine.parallel.layout import shares
from serve_llm.engine.wire import RayCluster


def start_ranks(
    options: Options, given: RayCluster | None = None, engine: int = 0, *, replaces: bool = False
) -> tuple[Choice, Roster | None]:
    """The executor, and its ranks; None if they run inside the engine's process.

    given: the Ray cluster that the server is part of. engine: index among the data-parallel ones.
    replaces: an engine has served before. Raises OptionError if the executor cannot run so many ranks, CapacityError
    if devices or memory are missing.
    """
    choice = choose(facts := look_around(options, given is not None and given.placement_group is not None))
    if choice.backend == "inprocess":
        return choice, None
    if choice.backend == "ray" and options.experts_span_engines:
        raise OptionError(
            f"--enable-expert-parallel: several engines (--data-parallel-size) share out experts on one host only, and "
            f"not on Ray, which was chosen because {choice.reason}; take --distributed-executor-backend mp"
        )
    if choice.backend == "mp":
        memory.check_ranks(len(shares(facts.num_ranks, facts.num_nodes)[0]), memory.free_memory())
        if facts.num_nodes > 1:
            return choice, start_on_nodes(options, replaces=replaces)
        return choice, mp.start_ranks(facts.num_ranks)
    try:
        roster, device = _start_on_ray(options, given, engine)
    except (OptionError, CapacityError) as error:
        raise type(error)(f"--distributed-executor-backend: ray, because {choice.reason}: {error}") from None
    return replace(choice, device=device), roster


def _start_on_ray(options: Options, given: RayCluster | None, engine: int) -> tuple[Roster, str]:
    """See `start_on_ray`."""
    if find_spec("ray") is None:
        raise OptionError(
            "Ray is not installed: install serve-llm[ray], or use mp with as many ranks as this host has devices for "
            "(--tensor-parallel-size, --pipeline-parallel-size)"
        )
    asked = options.distributed_executor_backend == "ray"
    found = find_cluster(given.address if given is not None else os.environ.get("RAY_ADDRESS"), asked, os.environ)
    if (
        found.address == LOCAL and options.device != "cpu"
    ):  # each engine has a Ray of its own, which must see its GPUs only
        claim_gpus(
            os.environ,
            engine,
            options.data_parallel_size,
            options.tensor_parallel_size * options.pipeline_parallel_size,
        )
    os.environ.update(found.settings)  # Ray reads them when it is imported
    from serve_llm.engine.execute.executors.ray import start_on_ray

    return start_on_ray(options, found.address, given.placement_group if given is not None else None)
