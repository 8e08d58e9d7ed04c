"""Run serve-llm behind Ray Serve, which restarts replicas, distributes them over the cluster and routes requests.

    pip install '.[examples]'   # in the repository
    cd examples  # not the repository root: Ray workers import from the current folder, and would find serve_llm/ there
    serve run ray_serve:build_app model=demo device=cpu

serves http://127.0.0.1:8000/v1/... Arguments are the options of `serve-llm` with underscores, and num_replicas. Set the
API key in the environment (SERVE_LLM_API_KEY), because Ray's dashboard shows arguments. On Kubernetes,
deploy/kuberay/rayservice.yaml runs the same function.

Each replica is one front end with its engine. Without pipeline parallelism the replica reserves the devices, all on one
node, and its engine starts the ranks there. With pipeline parallelism the replica has a placement group with one bundle
per stage, and the engine places the ranks of a stage in its bundle through Ray.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from ray import serve

from serve_llm.common.errors import OptionError
from serve_llm.common.options.sources import make_options
from serve_llm.server.assemble import assemble

MAX_ONGOING = 4096  # the engine has its own queue; Ray Serve's default of 5 would starve it


@serve.deployment(max_ongoing_requests=MAX_ONGOING, health_check_period_s=5, graceful_shutdown_timeout_s=60)
@serve.ingress()
class Replica:
    async def __init__(self, options: dict[str, Any]) -> None:
        key = os.environ.get("SERVE_LLM_API_KEY")
        assembled = await assemble(make_options(**{"api_key": key, **options}))
        self._app = assembled.app
        self._stop = assembled.stop
        self._watch_task = asyncio.ensure_future(assembled.supervisor.watch())

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def check_health(self) -> None:
        """Ray Serve replaces a replica that raises here."""
        if self._watch_task.done():
            raise RuntimeError(str(self._watch_task.result()))

    async def __del__(self) -> None:
        await self._stop()


def build_app(arguments: dict[str, Any]) -> serve.Application:
    """Build the application for `serve run` and for import_path in a Serve config.

    Raises OptionError for invalid arguments, and TypeError without a model, before any placement."""
    options = dict(arguments)
    num_replicas = int(options.pop("num_replicas", 1))
    if make_options(**options).max_engines > 1:
        raise OptionError("data_parallel_size: each replica has one engine; use num_replicas")
    placement = (
        place_on_one_node(options) if int(options.get("pipeline_parallel_size", 1)) == 1 else place_by_stage(options)
    )
    return Replica.options(num_replicas=num_replicas, **placement).bind(options)


def place_on_one_node(options: dict[str, Any]) -> dict[str, Any]:
    return {"ray_actor_options": stage_resources(options)}


def place_by_stage(options: dict[str, Any]) -> dict[str, Any]:
    """Reserve a bundle for the replica and one for each pipeline stage. A bundle is never split over nodes."""
    stages = [stage_resources(options)] * int(options["pipeline_parallel_size"])
    return {
        "ray_actor_options": {"num_cpus": 1},
        "placement_group_bundles": [
            {"CPU": 1},
            *({"CPU": stage["num_cpus"], "GPU": stage["num_gpus"]} for stage in stages),
        ],
        "placement_group_strategy": "PACK",
    }


def stage_resources(options: dict[str, Any]) -> dict[str, float]:
    num_ranks = int(options.get("tensor_parallel_size", 1))
    on_cpu = options.get("device") == "cpu"
    return {"num_cpus": num_ranks if on_cpu else 1, "num_gpus": 0 if on_cpu else num_ranks}
