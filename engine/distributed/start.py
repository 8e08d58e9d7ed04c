"""Chooses the executor and starts its worker processes early, so that they import torch while the engine starts.

Must not import torch, nor Ray unless it is chosen.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from serve_llm.common.errors import CapacityError, OptionError
from serve_llm.common.messages import RayCluster
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.engine.devices import claim_gpus
from serve_llm.engine.distributed import mp
from serve_llm.engine.distributed.choose import ExecutorChoice, choose_executor, gather_facts
from serve_llm.engine.distributed.multihost.leader import listening_address, start_on_nodes
from serve_llm.engine.distributed.ray.discovery import LOCAL, find_cluster
from serve_llm.engine.distributed.worker_group import WorkerGroup
from serve_llm.engine.worker import kv_cache


def start_workers(
    options: EngineOptions,
    server_cluster: RayCluster | None = None,
    engine: int = 0,
    *,
    replaces: bool = False,
    directory: Path | None = None,
) -> tuple[ExecutorChoice, WorkerGroup | None]:
    """Choose the executor and start its workers. There is no worker group if the one rank runs in this process.

    server_cluster: the Ray cluster that the server is part of. engine: index of the data-parallel engine. replaces: an
    engine has served before. directory: see `ControlSocket`. Raises OptionError if the executor cannot run this many
    ranks, CapacityError if devices or memory are missing.
    """
    in_placement_group = server_cluster is not None and server_cluster.placement_group is not None
    facts = gather_facts(options, in_placement_group, engine)
    choice = choose_executor(facts)
    if choice.backend == "inprocess":
        return choice, None
    if choice.backend == "mp":
        local_ranks = facts.num_ranks if facts.local_ranks is None else facts.local_ranks
        kv_cache.check_ranks(local_ranks, kv_cache.find_free_memory())
        if local_ranks == 0 and options.device != "auto":  # this host needs no device
            choice = replace(choice, device=options.device)
        if local_ranks < facts.num_ranks:
            return choice, start_on_nodes(options, engine, replaces=replaces)
        address = find_group_address(options, None) if options.experts_span_engines else ""
        return choice, mp.launch_workers(facts.num_ranks, address, directory)
    try:
        worker_group, device = _start_on_ray(options, server_cluster, engine, replaces)
    except (OptionError, CapacityError) as error:
        raise type(error)(f"--distributed-executor-backend: ray, because {choice.reason}: {error}") from None
    return replace(choice, device=device), worker_group


def find_group_address(options: EngineOptions, worker_group: WorkerGroup | None) -> str:
    """Find this host's address for ranks of any engine on other hosts; "" if there are none. worker_group: this
    engine's. Raises OptionError."""
    if worker_group is not None and worker_group.endpoint is not None:
        return worker_group.endpoint.address
    return listening_address(options) if options.nnodes > 1 else ""


def _start_on_ray(
    options: EngineOptions, server_cluster: RayCluster | None, engine: int, replaces: bool
) -> tuple[WorkerGroup, str]:
    """Find the cluster and start workers on it; see `actors.start_on_ray`."""
    if find_spec("ray") is None:
        raise OptionError(
            "Ray is not installed: pip install '.[ray]' in the repository, or use mp with as many ranks as this host "
            "has devices for (--tensor-parallel-size, --pipeline-parallel-size)"
        )
    is_requested = options.distributed_executor_backend == "ray"
    address = server_cluster.address if server_cluster is not None else os.environ.get("RAY_ADDRESS")
    cluster = find_cluster(address, is_requested, os.environ)
    if cluster.address == LOCAL and options.device != "cpu":  # each engine starts its own cluster, on its own GPUs
        gpus_per_engine = options.tensor_parallel_size * options.pipeline_parallel_size
        claim_gpus(os.environ, engine, options.max_engines, gpus_per_engine)
    os.environ.update(cluster.settings)  # Ray reads them at import
    from serve_llm.engine.distributed.ray.actors import start_on_ray

    placement_group = server_cluster.placement_group if server_cluster is not None else None
    is_replaced_alone = replaces and not options.experts_span_engines
    starts_alone = is_replaced_alone or cluster.address == LOCAL
    num_engines = 1 if starts_alone else options.data_parallel_size
    return start_on_ray(options, cluster.address, placement_group, num_engines, replaces=replaces)
