"""GET /v1/models, /status and the other routes about the server itself."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from serve_llm.common.types import FinishReason
from serve_llm.server.schema.scaling import Scaling


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["serve-llm"] = "serve-llm"
    root: str = Field(description="The model as the server was started with it, or the directory of an adapter.")
    parent: str | None = Field(description="The base model of an adapter.")
    max_model_len: int = Field(description="Tokens of prompt and generated text together.")
    type: Literal["model"] = "model"
    display_name: str
    lifecycle: Literal["active"] = "active"
    created_at: str = Field(description="The time of `created` in RFC 3339, as Anthropic's clients read it.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: Literal[False] = False


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Load(BaseModel):
    server_load: int = Field(description="Requests that have not finished.")


class StatusKv(BaseModel):
    tokens: int
    blocks: int
    usage: float = Field(description="Share of the blocks in use by running requests, 0 to 1.")


class StatusRank(BaseModel):
    rank: int = Field(description="Ranks of an engine are numbered stage by stage.")
    tp_rank: int
    pp_rank: int = Field(description="The pipeline stage.")
    host: str


class StatusParallel(BaseModel):
    executor: str = Field(description="What runs the ranks of an engine: inprocess, mp or ray.")
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int = Field(description="Engines at present.")


class StatusEngine(BaseModel):
    ready: bool = Field(description="It takes requests.")
    draining: bool = Field(description="It finishes its requests and is then removed.")
    num_ranks: int
    ranks: list[StatusRank]
    device: str
    dtype: str
    num_running: int = Field(description="Choices being computed.")
    num_waiting: int = Field(description="Choices waiting in the engine.")
    kv_cache: StatusKv


class StatusQueue(BaseModel):
    num_open: int = Field(description="Requests that have not finished.")
    waiting_requests: int = Field(description="Choices without a first token.")
    waiting_prompt_tokens: int
    max_requests: int
    max_prompt_tokens: int
    refused: dict[str, int] = Field(description="Requests refused since the start, by reason.")


class StatusFrontEnd(BaseModel):
    pid: int
    host: str | None = Field(description="Of a front end that joined from there. null: the server's own host.")
    phase: Literal["loading", "spare", "serving", "draining"]
    num_open: int = Field(description="Requests that have not finished.")


class StatusRestart(BaseModel):
    time: float = Field(description="Unix seconds.")
    engine: int
    reason: str = Field(description="As in the metric restarts_total.")
    cause: str


class Status(BaseModel):
    phase: Literal["serving", "recovering", "draining"]
    model: str
    uptime_seconds: int
    parallel: StatusParallel
    engines: list[StatusEngine]
    scaling: Scaling | None = Field(description="Null if the number of engines is fixed.")
    queue: StatusQueue
    front_ends: list[StatusFrontEnd] = Field(description="Empty without --front-ends and --front-end-addr.")
    restarts: int = Field(description="Engine restarts since the start.")
    first_cause: str | None = Field(description="Why the last restart was needed.")
    recent_restarts: list[StatusRestart] = Field(description="The newest first, at most 20.")
    versions: dict[str, str]


class ServedRequest(BaseModel):
    """A request for text or vectors that was admitted, without the text of prompts and answers, and without keys."""

    id: str = Field(description="X-Request-Id.")
    route: str
    model: str = Field(description="The model, or the adapter that the request names.")
    key: int = Field(description="The index of its API key in the order of --api-key, 0 without keys.")
    engines: list[int] = Field(description="Indices of those that compute it, or did so last.")
    time: float = Field(description="Unix seconds of its admission.")
    num_choices: int = Field(description="Of all its prompts.")
    prompt_tokens: int
    generated_tokens: int
    queue_time_ms: float = Field(description="Until an engine began with it; without a token, until now or its end.")
    prefill_time_ms: float | None = Field(description="From then until the first token; null without one.")
    decode_time_ms: float | None = Field(description="From the first token until the last, or now.")
    outcome: FinishReason | None = Field(
        description="Null: it is open. stop: also if a stop string or a repetition ended it. abort: the client left, "
        "its time ran out, or it made room for others."
    )
    replays: int = Field(description="Times that its choices continued on another engine process.")


class RecentRequestList(BaseModel):
    num_open: int
    requests: list[ServedRequest] = Field(
        description="The 100 oldest open ones and the 100 that ended last, from all front ends; the newest first."
    )


class Version(BaseModel):
    version: str
