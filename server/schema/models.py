"""GET /v1/models and the small answers about the server itself."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["serve-llm"] = "serve-llm"
    root: str = Field(description="What the server was started with.")
    max_model_len: int = Field(description="Tokens of prompt and generated text together.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class StatusKv(BaseModel):
    tokens: int
    blocks: int
    usage: float = Field(description="Share of the blocks that running requests hold, 0 to 1.")


class StatusEngine(BaseModel):
    ready: bool
    num_ranks: int
    num_running: int = Field(description="Choices that it computes.")
    num_waiting: int = Field(description="Choices that wait in it.")
    kv_cache: StatusKv


class StatusQueue(BaseModel):
    num_open: int = Field(description="Requests that have not ended.")
    waiting_requests: int = Field(description="Choices without a first token.")
    waiting_prompt_tokens: int
    max_requests: int
    max_prompt_tokens: int
    refused: dict[str, int] = Field(description="Requests refused since the start, by reason.")


class Status(BaseModel):
    phase: Literal["serving", "recovering", "draining"]
    model: str
    uptime_seconds: int
    engines: list[StatusEngine]
    queue: StatusQueue
    restarts: int = Field(description="Of engines, since the start.")
    first_cause: str | None = Field(description="Why the newest restart was needed.")
    versions: dict[str, str]


class Version(BaseModel):
    version: str
