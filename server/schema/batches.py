"""/v1/files and /v1/batches: requests and replies."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from serve_llm.server.batches.lines import ENDPOINTS
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.schema.common import RequestBody, check_metadata

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW_SECONDS = 30 * 86400
MIN_FILE_SECONDS, MAX_FILE_SECONDS = 3600, 30 * 86400  # as in OpenAI's API


class ExpiresAfter(RequestBody):
    """When a file is deleted. anchor: the start of the seconds."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_FILE_SECONDS, le=MAX_FILE_SECONDS)


class BatchCreation(RequestBody):
    input_file_id: str
    endpoint: str = Field(description=f"The url of every request: {', '.join(ENDPOINTS)}.")
    completion_window: str = Field(description="How long the batch may take: 24h, 30m, 7d, at most 30 days.")
    metadata: dict[str, str] | None = Field(default=None, description="Up to 16 texts, returned as they are.")
    output_expires_after: ExpiresAfter | None = Field(
        default=None, description="When the files of results are deleted; null keeps them."
    )

    def check(self) -> int:
        """Return the window in seconds. Raises InvalidRequest."""
        if self.endpoint not in ENDPOINTS:
            raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
        found = re.fullmatch(r"([1-9]\d{0,8})([smhd])", self.completion_window, re.ASCII)
        seconds = 0 if found is None else int(found[1]) * _UNIT_SECONDS[found[2]]
        if not 0 < seconds <= _MAX_WINDOW_SECONDS:
            raise InvalidRequest("completion_window must be like 24h, at most 30d", "completion_window")
        check_metadata(self.metadata or {})
        return seconds


class FileReply(BaseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    expires_at: int | None


class BatchReply(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    created_at: int


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
