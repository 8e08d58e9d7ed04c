"""serve-llm's API behind Ray Serve, which restarts it, spreads replicas over the cluster, and routes between them.

    pip install 'serve-llm[examples]'
    cd examples  # not the repository's root: Ray lets its workers import from there, where serve_llm is but a folder
    serve run ray_serve:build_app model=demo device=cpu

serves http://127.0.0.1:8000/v1/... Arguments are the options of `serve-llm` with underscores, and num_replicas. A key
comes from the environment (SERVE_LLM_API_KEY): arguments are shown in Ray's dashboard. On Kubernetes
deploy/kuberay/rayservice.yaml runs the same function.

Each replica is one front end with its engine. Without pipeline parallelism the replica itself holds the devices, all on
one node, and its engine starts the ranks there. With it the replica has a placement group with a bundle for each stage,
and the engine places the ranks of a stage in one bundle, through Ray.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from ray import serve

from serve_llm.engine.errors import OptionError
from serve_llm.engine.options import Options
from serve_llm.server.assemble import assemble

MAX_ONGOING = 4096  # the engine queues by itself; Ray Serve's default of 5 would starve it


@serve.deployment(max_ongoing_requests=MAX_ONGOING, health_check_period_s=5, graceful_shutdown_timeout_s=60)
@serve.ingress()
class Replica:
    async def __init__(self, options: dict[str, Any]) -> None:
        key = os.environ.get("SERVE_LLM_API_KEY")
        opened = await assemble(Options.from_kwargs(**{"api_key": key, **options}))
        self._app = opened.app
        self._stop = opened.stop
        self._watching = asyncio.ensure_future(opened.supervisor.watch())

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def check_health(self) -> None:
        """Ray Serve replaces a replica that raises here."""
        if self._watching.done():
            raise RuntimeError(str(self._watching.result()))

    async def __del__(self) -> None:
        await self._stop()


def build_app(arguments: dict[str, Any]) -> serve.Application:
    """The application for `serve run` and for import_path in a Serve config. Raises OptionError (or TypeError, without
    a model) for arguments that cannot work, before anything is placed."""
    options = dict(arguments)
    num_replicas = int(options.pop("num_replicas", 1))
    if Options.from_kwargs(**options).data_parallel_size > 1:
        raise OptionError("data_parallel_size: a replica is one engine here; use num_replicas")
    placement = placed_on_one_node(options) if int(options.get("pipeline_parallel_size", 1)) == 1 else by_stage(options)
    return Replica.options(num_replicas=num_replicas, **placement).bind(options)


def placed_on_one_node(options: dict[str, Any]) -> dict[str, Any]:
    return {"ray_actor_options": devices_of_a_stage(options)}


def by_stage(options: dict[str, Any]) -> dict[str, Any]:
    """The replica's own bundle, then one for each pipeline stage; a bundle is never split over nodes."""
    stages = [devices_of_a_stage(options)] * int(options["pipeline_parallel_size"])
    return {
        "ray_actor_options": {"num_cpus": 1},
        "placement_group_bundles": [
            {"CPU": 1},
            *({"CPU": each["num_cpus"], "GPU": each["num_gpus"]} for each in stages),
        ],
        "placement_group_strategy": "PACK",
    }


def devices_of_a_stage(options: dict[str, Any]) -> dict[str, float]:
    num_ranks = int(options.get("tensor_parallel_size", 1))
    on_cpu = options.get("device") == "cpu"
    return {"num_cpus": num_ranks if on_cpu else 1, "num_gpus": 0 if on_cpu else num_ranks}
