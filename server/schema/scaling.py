"""POST /scale."""

from __future__ import annotations

from pydantic import BaseModel, Field

from serve_llm.server.schema.common import RequestBody


class ScaleRequest(RequestBody):
    data_parallel_size: int = Field(ge=1, description="The number of engines.")
    drain_timeout: float | None = Field(
        default=None,
        ge=0,
        le=86400,
        description="Seconds for the requests of an engine that is removed to finish; then they continue on another "
        "one. Default: --drain-timeout.",
    )


class Scaling(BaseModel):
    min_engines: int
    max_engines: int
    num_engines: int = Field(description="With those that are being added or drained.")
    target: int
    is_under_way: bool
    error: str | None = Field(description="Why the last change failed.")
