"""The files and batches of /v1/files and /v1/batches, as the API shows them."""

from __future__ import annotations

import msgspec

Metadata = dict[str, str]
OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")


class StoredFile(msgspec.Struct, kw_only=True):
    id: str
    object: str = "file"
    bytes: int
    created_at: int  # Unix seconds, like all times here
    filename: str
    purpose: str  # batch, or batch_output for the files of results
    status: str = "processed"
    expires_at: int | None = None


class BatchProblem(msgspec.Struct):
    """Why a batch failed. line: of its input, counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchProblems(msgspec.Struct):
    data: list[BatchProblem]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokens(msgspec.Struct):
    cached_tokens: int = 0


class OutputTokens(msgspec.Struct):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """Sums over the requests that were answered."""

    input_tokens: int = 0
    input_tokens_details: InputTokens = msgspec.field(default_factory=InputTokens)
    output_tokens: int = 0
    output_tokens_details: OutputTokens = msgspec.field(default_factory=OutputTokens)
    total_tokens: int = 0


class FileExpiry(msgspec.Struct):
    anchor: str
    seconds: int


class StoredBatch(msgspec.Struct, kw_only=True):
    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchProblems | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage | None = None  # None: an older version stored the batch
    metadata: Metadata | None = None
    output_expires_after: FileExpiry | None = None

    @property
    def is_open(self) -> bool:
        return self.status in OPEN_STATUSES
