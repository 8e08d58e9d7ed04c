"""One stored batch, from the validation of its input to its end.

Batches of one API key are validated and answered in turn, but a waiting batch can be cancelled, expire or fail like a
running one. The files of results are its state: after kill -9, the next server continues with the requests that have no
result yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from functools import partial

from starlette.types import ASGIApp

from serve_llm.common.options.limits import Limits
from serve_llm.server.batches.files import BatchInput, InvalidLine, InvalidOutput
from serve_llm.server.batches.lines import build_unanswered
from serve_llm.server.batches.objects import BatchProblem, BatchProblems, RequestCounts, StoredBatch
from serve_llm.server.batches.progress import StoredProgress
from serve_llm.server.batches.results import BatchResults
from serve_llm.server.batches.runner import run_requests
from serve_llm.server.batches.slots import BatchSlots
from serve_llm.server.batches.store import BatchPaths, BatchStore
from serve_llm.server.http.auth import IN_BATCH, TENANT
from serve_llm.server.metrics.meter import BatchCounts

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 60.0
UNANSWERED = {
    "expired": ("batch_expired", "the batch expired before this request was answered"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
}


@dataclass(frozen=True)
class BatchContext:
    """What all batches share. app: the app without its check of API keys. owners: one name per key, in the order of the
    keys. concurrency: maximum number of concurrent requests of all batches."""

    store: BatchStore
    app: ASGIApp
    owners: tuple[str, ...]
    limits: Limits
    concurrency: int
    slots: BatchSlots
    counts: BatchCounts


@dataclass(frozen=True)
class OwnerTurns:
    """Held by one batch of an API key at a time, in the order in which the batches were created."""

    validating: asyncio.Lock = field(default_factory=asyncio.Lock)
    answering: asyncio.Lock = field(default_factory=asyncio.Lock)


class BatchJob:
    def __init__(self, batch_id: str, owner: str, turns: OwnerTurns, context: BatchContext) -> None:
        self.progress = StoredProgress()
        self._id = batch_id
        self._owner = owner
        self._turns = turns
        self._context = context
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Notice that the batch has been cancelled, which is already stored."""
        self._woken.set()

    async def run(self) -> None:
        """Process the batch until it has ended. Errors, such as a full disk, are retried."""
        delay = FIRST_RETRY_SECONDS
        while True:
            try:
                await self._process()
                return
            except Exception:
                logger.exception("%s continues in %g s, after an error", self._id, delay)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), delay)
            delay = min(2 * delay, LAST_RETRY_SECONDS)

    async def _process(self) -> None:
        """Raises OSError, ServeError."""
        store = self._context.store
        self._woken.clear()
        batch = await store.get_batch(self._id, self._owner)
        if not batch.is_open:
            return
        paths = store.find_paths(batch)
        requests = BatchInput(paths.input, self._context.limits.body_bytes, batch.endpoint)
        async with self._turns.validating:
            total = await asyncio.to_thread(_count_requests, requests, paths, self._context.limits.batch_lines)
        if isinstance(total, BatchProblem):
            await self._fail(total)
            return
        if self._owner not in self._context.owners:
            await self._fail(BatchProblem("invalid_api_key", "its API key is not valid any more"))
            return
        self.progress = StoredProgress(RequestCounts(total))
        has_begun = batch.in_progress_at is not None
        batch = await store.change_batch(self._id, partial(_begin, total=total))
        outcome = "cancelled"
        try:
            if has_begun:
                await asyncio.to_thread(_read_results, paths, self.progress)
            if batch.status == "in_progress":
                outcome = await self._answer_in_turn(batch, requests, paths)
            if outcome in UNANSWERED:
                await asyncio.to_thread(_write_unanswered, requests, paths, self.progress, *UNANSWERED[outcome])
        except InvalidOutput:
            logger.exception("%s has failed", self._id)
            await self._fail(BatchProblem("invalid_results", "the stored results of the batch cannot be read"))
            return
        await store.change_batch(self._id, lambda stored: _end(stored, outcome, self.progress))

    async def _answer_in_turn(self, batch: StoredBatch, requests: BatchInput, paths: BatchPaths) -> str:
        """Answer the batch when its turn comes. Returns its final status. Raises OSError, ServeError."""
        answering = asyncio.create_task(self._answer(requests, paths))
        waking = asyncio.create_task(self._woken.wait())
        try:
            left = max(0.0, batch.expires_at - time.time())
            await asyncio.wait([answering, waking], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
                return "completed"
            return "cancelled" if waking.done() else "expired"
        finally:
            answering.cancel()
            waking.cancel()
            await asyncio.wait([answering, waking])

    async def _answer(self, requests: BatchInput, paths: BatchPaths) -> None:
        """Answer the requests that have no result. Raises OSError, ServeError."""
        context = self._context
        async with self._turns.answering:
            with contextlib.closing(BatchResults(paths, self.progress)) as results:
                done = await asyncio.to_thread(results.read_ids)

                def write(line: bytes, status: int) -> None:
                    results.write(line, status)
                    context.counts.count_answer(status)

                await run_requests(
                    context.app,
                    requests.read(done),
                    write,
                    min(context.concurrency, max(1, self.progress.counts.total - len(done))),
                    slot=context.slots.take,
                    state={TENANT: context.owners.index(self._owner), IN_BATCH: True},
                )

    async def _fail(self, problem: BatchProblem) -> None:
        def change(stored: StoredBatch) -> None:
            stored.errors = BatchProblems([problem])
            _end(stored, "failed", self.progress)

        await self._context.store.change_batch(self._id, change)


def _count_requests(requests: BatchInput, paths: BatchPaths, max_lines: int) -> int | BatchProblem:
    """Return the number of requests, or what is wrong with the input. Raises OSError, ServeError."""
    if not paths.input.exists():
        return BatchProblem("input_file_not_found", "the input is not stored any more")
    try:
        total = len(requests.read_ids())
    except InvalidLine as error:
        return BatchProblem(error.code, error.reason, error.number)
    if not 0 < total <= max_lines:
        message = f"the input has {total} requests; 1 to {max_lines} are possible"
        return BatchProblem("too_many_tasks" if total else "empty_file", message)
    return total


def _read_results(paths: BatchPaths, progress: StoredProgress) -> None:
    """Count the results, and their tokens, of an earlier run. Raises OptionError."""
    with contextlib.closing(BatchResults(paths, progress)) as results:
        results.read_ids()


def _begin(batch: StoredBatch, total: int) -> None:
    batch.request_counts.total = total
    if batch.status == "validating":
        batch.status = "in_progress"
        batch.in_progress_at = int(time.time())


def _end(batch: StoredBatch, status: str, progress: StoredProgress) -> None:
    now = int(time.time())
    if status != "failed":
        batch.finalizing_at = now
    batch.status = status
    batch.request_counts = progress.counts
    batch.usage = progress.usage
    setattr(batch, f"{status}_at", now)


def _write_unanswered(
    requests: BatchInput, paths: BatchPaths, progress: StoredProgress, code: str, message: str
) -> None:
    """Write a result with the reason for every request without a result. Raises OSError, ServeError."""
    with contextlib.closing(BatchResults(paths, progress)) as results:
        for request in requests.read(results.read_ids()):
            results.write(build_unanswered(request.custom_id, code, message), 500)
