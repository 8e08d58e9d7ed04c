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


class Version(BaseModel):
    version: str
