"""Answers the stored batches, in the background and at the lowest priority.

The batches of one API key run one after the other, those of several keys beside each other. The files of results are
the state of a batch that runs: after kill -9 it continues with the requests that have no result yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Sequence

from starlette.types import ASGIApp

from serve_llm.common.errors import ServeError
from serve_llm.common.options.limits import Limits
from serve_llm.server.admission.controller import AdmissionController
from serve_llm.server.batches.files import BatchInput, BatchOutput, InvalidLine
from serve_llm.server.batches.lines import build_unanswered
from serve_llm.server.batches.objects import BatchProblem, BatchProblems, RequestCounts, StoredBatch
from serve_llm.server.batches.runner import run_requests
from serve_llm.server.batches.slots import BatchSlots
from serve_llm.server.batches.store import BatchPaths, BatchStore
from serve_llm.server.http.auth import IN_BATCH, TENANT
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.metrics.meter import BatchCounts

logger = logging.getLogger(__name__)

UNANSWERED = {
    "expired": ("batch_expired", "the batch expired before this request was answered"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
}


class BatchResults:
    """The two files of results of one batch, and how many they hold."""

    def __init__(self, paths: BatchPaths) -> None:
        """Raises OptionError."""
        self._output = BatchOutput(paths.output)
        self._errors = BatchOutput(paths.errors)
        self.counts = RequestCounts()

    def read_ids(self) -> set[str]:
        """The custom_ids of all results. Raises OptionError."""
        answered, failed = self._output.read_ids(), self._errors.read_ids()
        self.counts.completed = len(answered)
        self.counts.failed = len(failed)
        return answered | failed

    def write(self, line: bytes, status: int) -> None:
        """Raises ServeError."""
        if status < 400:
            self._output.append(line)
            self.counts.completed += 1
        else:
            self._errors.append(line)
            self.counts.failed += 1

    def close(self) -> None:
        self._output.close()
        self._errors.close()


class BatchService:
    def __init__(
        self,
        store: BatchStore,
        app: ASGIApp,
        admission: AdmissionController,
        owners: Sequence[str],
        limits: Limits,
        concurrency: int,
        counts: BatchCounts,
    ) -> None:
        """app: without the check of keys. owners: of the API keys, by their number. concurrency: of requests of all
        batches together."""
        self.store = store
        self._app = app
        self._owners = list(owners)
        self._limits = limits
        self._concurrency = concurrency
        self._slots = BatchSlots(admission, concurrency, counts)
        self._counts = counts
        self._waiting = set[str]()  # owners whose batches must be looked at again
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by owner
        self._running: dict[str, tuple[asyncio.Task[None], RequestCounts]] = {}  # by batch

    async def resume(self) -> None:
        """Continue the batches of an earlier server."""
        for owner in await self.store.find_owners():
            self.start(owner)

    def start(self, owner: str) -> None:
        """Answer the batches of an owner until all have ended."""
        self._waiting.add(owner)
        if owner not in self._tasks:
            self._tasks[owner] = asyncio.create_task(self._work(owner))

    async def cancel(self, batch_id: str, owner: str) -> StoredBatch:
        """Raises ObjectNotFound, InvalidRequest."""
        await self.store.get_batch(batch_id, owner)
        batch = await self.store.change_batch(batch_id, _begin_cancelling)
        if batch_id in self._running:
            self._running[batch_id][0].cancel()
        self.start(owner)
        return self.count(batch)

    def count(self, batch: StoredBatch) -> StoredBatch:
        """The batch with its counts of now."""
        if batch.id in self._running:
            batch.request_counts = self._running[batch.id][1]
        return batch

    async def stop(self) -> None:
        """Abort what runs; the next server goes on with it. Idempotent."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _work(self, owner: str) -> None:
        try:
            while owner in self._waiting:
                self._waiting.discard(owner)
                while (batch := await self.store.find_open(owner)) is not None:
                    await self._process(owner, batch)
        except (sqlite3.Error, OSError, ServeError):
            logger.exception("batches wait for the next start of the server")
        finally:
            del self._tasks[owner]

    async def _process(self, owner: str, batch: StoredBatch) -> None:
        """Run one batch to its end. Raises sqlite3.Error, OSError, ServeError."""
        paths = self.store.find_paths(batch)
        requests = BatchInput(paths.input, self._limits.body_bytes, batch.endpoint)
        try:
            ids = await asyncio.to_thread(requests.read_ids)
        except InvalidLine as error:
            await self._fail(batch, BatchProblem("invalid_line", error.reason, error.number))
            return
        if not 0 < len(ids) <= self._limits.batch_lines:
            message = f"the input has {len(ids)} requests; 1 to {self._limits.batch_lines} are possible"
            await self._fail(batch, BatchProblem("invalid_number_of_requests", message))
            return
        if owner not in self._owners:
            await self._fail(batch, BatchProblem("invalid_api_key", "its API key is not valid any more"))
            return
        with contextlib.closing(BatchResults(paths)) as results:
            results.counts.total = len(ids)
            done = await asyncio.to_thread(results.read_ids)
            batch = await self.store.change_batch(batch.id, _begin)
            outcome = "cancelled"
            if batch.status == "in_progress":
                outcome = await self._run(batch, owner, requests, done, results)
            if outcome in UNANSWERED:
                await asyncio.to_thread(_write_unanswered, requests, results, *UNANSWERED[outcome])
            await self.store.change_batch(batch.id, lambda stored: _end(stored, outcome, results.counts))

    async def _run(
        self, batch: StoredBatch, owner: str, requests: BatchInput, done: set[str], results: BatchResults
    ) -> str:
        """Answer what is not done. Returns the status of the batch at its end. Raises ServeError."""

        def write(line: bytes, status: int) -> None:
            results.write(line, status)
            self._counts.count_answer(status)

        task = asyncio.create_task(
            run_requests(
                self._app,
                requests.read(done),
                write,
                min(self._concurrency, max(1, results.counts.total - len(done))),
                slot=self._slots.take,
                state={TENANT: self._owners.index(owner), IN_BATCH: True},
            )
        )
        self._running[batch.id] = (task, results.counts)
        try:
            ended, _ = await asyncio.wait([task], timeout=max(0.0, batch.expires_at - time.time()))
            if not ended:
                return "expired"
            if task.cancelled():
                return "cancelled"
            task.result()
            return "completed"
        finally:
            del self._running[batch.id]
            task.cancel()
            await asyncio.wait([task])

    async def _fail(self, batch: StoredBatch, problem: BatchProblem) -> None:
        def change(stored: StoredBatch) -> None:
            stored.errors = BatchProblems([problem])
            _end(stored, "failed", stored.request_counts)

        await self.store.change_batch(batch.id, change)


def _begin(batch: StoredBatch) -> None:
    if batch.status == "validating":
        batch.status = "in_progress"
        batch.in_progress_at = int(time.time())


def _begin_cancelling(batch: StoredBatch) -> None:
    """Raises InvalidRequest."""
    if not batch.is_open:
        raise InvalidRequest(f"the batch has ended: it is {batch.status}", "batch_id")
    if batch.status != "cancelling":
        batch.status = "cancelling"
        batch.cancelling_at = int(time.time())


def _end(batch: StoredBatch, status: str, counts: RequestCounts) -> None:
    now = int(time.time())
    if status != "failed":
        batch.finalizing_at = now
    batch.status = status
    batch.request_counts = counts
    setattr(batch, f"{status}_at", now)


def _write_unanswered(requests: BatchInput, results: BatchResults, code: str, message: str) -> None:
    """Every request without a result gets one that says why. Raises ServeError."""
    for request in requests.read(results.read_ids()):
        results.write(build_unanswered(request.custom_id, code, message), 500)
