"""/v1/files and /v1/batches."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import FileResponse, Response

from serve_llm.server.batches.objects import FileExpiry, StoredBatch, StoredFile
from serve_llm.server.batches.service import BatchService
from serve_llm.server.http.content_encoding import read_decoded
from serve_llm.server.http.errors import InvalidRequest, TooLarge, Unsupported
from serve_llm.server.routes.app_state import AppState
from serve_llm.server.routes.document import (
    STORE_PROBLEMS,
    describe_page,
    describe_parameter,
    describe_problems,
    describe_route,
)
from serve_llm.server.routes.page import build_page, read_page
from serve_llm.server.schema.batches import (
    MAX_FILE_SECONDS,
    MIN_FILE_SECONDS,
    BatchCreation,
    BatchReply,
    DeletedFile,
    FileReply,
)
from serve_llm.server.schema.common import ObjectList, parse_by_policy
from serve_llm.server.storage.database import describe_failure

MAX_FORM_BYTES = 2**16  # for all of an upload except its file
MAX_CREATION_BYTES = 2**16
MAX_FILE_LIMIT = 10_000
_ANCHOR = "expires_after[anchor]"
_SECONDS = "expires_after[seconds]"

_UPLOAD: dict[str, Any] = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["file", "purpose"],
            "additionalProperties": False,
            "properties": {
                "file": {"type": "string", "format": "binary"},
                "purpose": {"type": "string", "enum": ["batch"]},
                _ANCHOR: {"type": "string", "enum": ["created_at"]},
                _SECONDS: {
                    "type": "integer",
                    "minimum": MIN_FILE_SECONDS,
                    "maximum": MAX_FILE_SECONDS,
                },
            },
        }
    }
}
_BYTES: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


def create_batch_router(state: AppState, service: BatchService) -> APIRouter:
    router = APIRouter()
    store = service.store

    @router.post("/v1/files", **describe_route(None, FileReply, body=_UPLOAD, problems=STORE_PROBLEMS))
    async def upload_file(request: Request) -> Response:
        """Store the input of a batch."""
        state.dispatcher.check()
        owner = state.read_owner(request)
        form = await _read_form(request, state.limits.file_bytes)
        try:
            file, lifetime = _check_form(form)
            return _answer(await store.add_file(owner, file.filename or "", file.file, lifetime))
        finally:
            await form.close()

    purpose = describe_parameter("purpose", type="string")

    @router.get("/v1/files", **describe_route(None, ObjectList, query=(*describe_page(MAX_FILE_LIMIT), purpose)))
    async def list_files(request: Request) -> Response:
        """Uploaded files, and those of results; `purpose` selects one of batch and batch_output."""
        page = read_page(request, MAX_FILE_LIMIT)
        found = await store.list_files(state.read_owner(request), page, request.query_params.get("purpose"))
        return build_page(found.objects, found.has_more)

    @router.get("/v1/files/{file_id}", **describe_route(None, FileReply))
    async def retrieve_file(file_id: str, request: Request) -> Response:
        return _answer(await store.get_file(file_id, state.read_owner(request)))

    @router.get(
        "/v1/files/{file_id}/content",
        response_class=FileResponse,
        responses={200: {"content": _BYTES}, **describe_problems()},
    )
    async def retrieve_content(file_id: str, request: Request) -> Response:
        """The bytes of a file."""
        path = await store.find_content(file_id, state.read_owner(request))
        return FileResponse(path, media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}", **describe_route(None, DeletedFile, problems=STORE_PROBLEMS))
    async def delete_file(file_id: str, request: Request) -> DeletedFile:
        """Delete a file that no open batch reads."""
        await store.delete_file(file_id, state.read_owner(request))
        return DeletedFile(id=file_id)

    @router.post("/v1/batches", **describe_route(BatchCreation, BatchReply, problems=STORE_PROBLEMS))
    async def create_batch(request: Request) -> Response:
        """Answer the requests of a file in the background."""
        async with state.reading_body(request) as content:
            if len(content) > MAX_CREATION_BYTES:
                raise TooLarge(f"the body is longer than {MAX_CREATION_BYTES} bytes")
            body, ignored = parse_by_policy(
                BatchCreation, content, state.limits, ignores_unknown=state.ignores_unknown_fields
            )
        seconds = body.check()
        now = int(time.time())
        batch = StoredBatch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + seconds,
            metadata=body.metadata,
        )
        if body.output_expires_after is not None:
            batch.output_expires_after = FileExpiry(**body.output_expires_after.model_dump())
        owner = state.read_owner(request)
        await store.add_batch(owner, batch)
        service.start(batch.id, owner)
        return _answer(batch, state.describe_ignored(request, ignored))

    @router.get("/v1/batches", **describe_route(None, ObjectList, query=describe_page()))
    async def list_batches(request: Request) -> Response:
        found = await store.list_batches(state.read_owner(request), read_page(request))
        return build_page(found.objects, found.has_more)

    @router.get("/v1/batches/{batch_id}", **describe_route(None, BatchReply))
    async def retrieve_batch(batch_id: str, request: Request) -> Response:
        return _answer(service.count(await store.get_batch(batch_id, state.read_owner(request))))

    @router.post("/v1/batches/{batch_id}/cancel", **describe_route(None, BatchReply, problems=STORE_PROBLEMS))
    async def cancel_batch(batch_id: str, request: Request) -> Response:
        """End a batch; its unanswered requests get an error that says so."""
        return _answer(await service.cancel(batch_id, state.read_owner(request)))

    return router


async def _read_form(request: Request, max_file_bytes: int) -> FormData:
    """Read the form of an upload, whose file is put into a temporary file. Raises InvalidRequest, TooLarge,
    StoreError."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise InvalidRequest("the body must be multipart/form-data with file and purpose", "Content-Type")

    async def read_limited() -> AsyncGenerator[bytes, None]:
        size = 0
        async for chunk in read_decoded(request):
            size += len(chunk)
            if size > max_file_bytes + MAX_FORM_BYTES:
                raise TooLarge(f"the file is longer than {max_file_bytes} bytes", "file")
            yield chunk

    parser = MultiPartParser(request.headers, read_limited(), max_files=1, max_fields=8, max_part_size=MAX_FORM_BYTES)
    try:
        return await parser.parse()
    except OSError as error:
        raise describe_failure("the server's directory of temporary files", error) from None
    except MultiPartException as error:
        raise InvalidRequest(f"the body is not a valid form: {error.message}") from None


def _check_form(form: FormData) -> tuple[UploadFile, int | None]:
    """Return the file, and the seconds for which it is kept; None: until it is deleted. Raises InvalidRequest,
    Unsupported."""
    for name in form:
        if name not in ("file", "purpose", _ANCHOR, _SECONDS):
            raise Unsupported(f"the field {name[:100]!r} is not supported", name)
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidRequest("file is required, with a filename", "file")
    purpose = form.get("purpose")
    if purpose != "batch":
        raise Unsupported("purpose must be batch", "purpose")
    return file, _read_lifetime(form)


def _read_lifetime(form: FormData) -> int | None:
    """Raises InvalidRequest."""
    anchor = form.get(_ANCHOR)
    seconds = form.get(_SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(f"{_ANCHOR} must be created_at", _ANCHOR)
    is_number = isinstance(seconds, str) and re.fullmatch(r"\d{1,9}", seconds, re.ASCII)
    if not is_number or not MIN_FILE_SECONDS <= int(str(seconds)) <= MAX_FILE_SECONDS:
        message = f"{_SECONDS} must be an integer from {MIN_FILE_SECONDS} to {MAX_FILE_SECONDS}"
        raise InvalidRequest(message, _SECONDS)
    return int(str(seconds))


def _answer(stored: StoredFile | StoredBatch, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(stored), headers=headers, media_type="application/json")
