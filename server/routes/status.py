"""GET /health, /ping and /version; and /ready, /load, /status, /requests and /metrics, which describe the whole
server."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import PlainTextResponse, Response

from serve_llm.common.types import ModelInfo
from serve_llm.server.admission.controller import MESSAGES, AdmissionController
from serve_llm.server.admission.recent_requests import RequestRecord
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.engines.scaler import Scaler
from serve_llm.server.http.errors import Unavailable
from serve_llm.server.metrics.prometheus import PrometheusExporter
from serve_llm.server.routes.app_state import VERSION, AppState
from serve_llm.server.routes.document import describe_route
from serve_llm.server.routes.scaling import describe_scaling
from serve_llm.server.schema.models import (
    Health,
    Load,
    RecentRequestList,
    ServedRequest,
    Status,
    StatusEngine,
    StatusFrontEnd,
    StatusKv,
    StatusParallel,
    StatusQueue,
    StatusRank,
    StatusRestart,
    Version,
)

if TYPE_CHECKING:
    from serve_llm.server.front_ends.group import FrontEndGroup  # which forwards to these routes

TORCH_VERSION = version("torch")  # from its metadata: only the engine imports torch


# Routes that describe the whole server. Front ends forward them to the process that owns the engines.
SERVER_PATHS = ("/load", "/ready", "/status", "/requests", "/metrics")


@dataclass(frozen=True)
class StatusSources:
    """The parts of the server that the routes describe."""

    replicas: Replicas
    admission: AdmissionController
    exporter: PrometheusExporter
    num_ranks: int  # per engine
    front_ends: FrontEndGroup | None  # None: this process answers clients
    scaler: Scaler | None = None  # None: the number of engines is fixed
    began: float = field(default_factory=time.monotonic)  # not the time of day, which may be set back


def create_router() -> APIRouter:
    router = APIRouter()

    @router.get("/health", **describe_route(None, Health))
    async def health() -> Health:
        """The process is alive."""
        return Health()

    @router.get("/ping", **describe_route(None, Health))
    @router.post("/ping", **describe_route(None, Health))
    async def ping() -> Health:
        """The same as /health, as SageMaker requests it; as in vLLM, also with POST."""
        return Health()

    @router.get("/version", **describe_route(None, Version))
    async def show_version() -> Version:
        return Version(version=VERSION)

    return router


def create_server_router(state: AppState, sources: StatusSources) -> APIRouter:
    router = APIRouter()
    admission = sources.admission

    @router.get("/load", **describe_route(None, Load))
    async def show_load() -> Load:
        """The number of open requests, for load balancers."""
        return Load(server_load=admission.num_open)

    @router.get("/ready", **describe_route(None, Health))
    async def ready() -> Health:
        """200 if a request would be served now; else 503."""
        reason = admission.obstacle
        if reason is not None:
            raise Unavailable(MESSAGES[reason])
        return Health()

    @router.get("/status", **describe_route(None, Status))
    async def show_status() -> Status:
        """What the server is doing, for people and for scripts that watch it."""
        return build_status(state, sources)

    @router.get("/requests", **describe_route(None, RecentRequestList))
    async def list_requests() -> RecentRequestList:
        """Open requests and the latest ended ones, of all clients, with their times."""
        recent = admission.recent
        requests = [describe_request(record, state.model.names[0]) for record in recent.list_records()]
        return RecentRequestList(num_open=recent.num_open, requests=requests)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus' text form."""
        if sources.front_ends is not None:
            await sources.front_ends.collect_counts()
        return Response(sources.exporter.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def build_status(state: AppState, sources: StatusSources) -> Status:
    replicas = sources.replicas
    admission = sources.admission
    return Status(
        phase="draining" if admission.draining else "serving" if replicas.ready else "recovering",
        model=state.model.names[0],
        uptime_seconds=int(time.monotonic() - sources.began),
        parallel=describe_parallel(replicas),
        engines=[
            StatusEngine(
                ready=engine.ready,
                draining=engine.is_draining,
                num_ranks=sources.num_ranks,
                ranks=list_ranks(engine.model_info),
                device=engine.model_info.device,
                dtype=engine.model_info.dtype,
                num_running=engine.stats.num_running,
                num_waiting=engine.stats.num_waiting,
                kv_cache=StatusKv(
                    tokens=engine.model_info.kv_cache_tokens,
                    blocks=engine.model_info.num_kv_blocks,
                    usage=engine.stats.kv_cache_usage,
                ),
            )
            for engine in replicas.active
        ],
        scaling=None if sources.scaler is None else describe_scaling(sources.scaler),
        queue=StatusQueue(
            num_open=admission.num_open,
            waiting_requests=admission.num_waiting,
            waiting_prompt_tokens=admission.num_waiting_tokens,
            max_requests=admission.max_queue[0],
            max_prompt_tokens=admission.max_queue[1],
            refused=dict(admission.refused),
        ),
        front_ends=[] if sources.front_ends is None else describe_front_ends(sources.front_ends),
        restarts=replicas.num_restarts,
        first_cause=replicas.first_cause,
        recent_restarts=[
            StatusRestart(time=record.time, engine=record.engine, reason=record.reason, cause=record.cause)
            for record in reversed(replicas.restarts)
        ],
        versions={"serve-llm": VERSION, "python": platform.python_version(), "torch": TORCH_VERSION},
    )


def describe_parallel(replicas: Replicas) -> StatusParallel:
    engines = replicas.active
    model_info = engines[0].model_info
    return StatusParallel(
        executor=model_info.executor,
        tensor_parallel_size=model_info.tensor_parallel_size,
        pipeline_parallel_size=model_info.pipeline_parallel_size,
        data_parallel_size=len(engines),
    )


def describe_request(record: RequestRecord, base_model: str) -> ServedRequest:
    def to_milliseconds(seconds: float) -> float:
        return round(1000 * seconds, 3)

    return ServedRequest(
        id=record.label.id,
        route=record.label.route,
        model=record.adapter or base_model,
        key=record.tenant,
        engines=list(record.engines),
        time=round(record.time, 3),
        num_choices=record.num_choices,
        prompt_tokens=record.prompt_tokens,
        generated_tokens=record.generated_tokens,
        queue_time_ms=to_milliseconds(record.queued),
        prefill_time_ms=None if record.prefill is None else to_milliseconds(record.prefill),
        decode_time_ms=None if record.decode is None else to_milliseconds(record.decode),
        outcome=record.outcome,
        replays=record.num_replays,
    )


def describe_front_ends(group: FrontEndGroup) -> list[StatusFrontEnd]:
    return [
        StatusFrontEnd(pid=process.pid, host=host.name, phase=process.phase, num_open=process.num_open)
        for host, process in group.processes
    ]


def list_ranks(model_info: ModelInfo) -> list[StatusRank]:
    """List the ranks of one engine, with their hosts."""
    size = model_info.tensor_parallel_size
    return [
        StatusRank(rank=rank, tp_rank=rank % size, pp_rank=rank // size, host=host)
        for rank, host in enumerate(model_info.rank_hosts)
    ]
