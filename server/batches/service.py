"""Answers the stored batches, in the background and at the lowest priority."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence

from starlette.types import ASGIApp

from serve_llm.common.options.limits import Limits
from serve_llm.server.admission.controller import AdmissionController
from serve_llm.server.batches.job import BatchContext, BatchJob, OwnerTurns
from serve_llm.server.batches.objects import StoredBatch
from serve_llm.server.batches.slots import BatchSlots
from serve_llm.server.batches.store import BatchStore
from serve_llm.server.http.errors import InvalidRequest, StoreError
from serve_llm.server.metrics.meter import BatchCounts

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 60.0


class BatchService:
    """Has a job for each batch that has not ended."""

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
        """The arguments are those of `BatchContext`."""
        self.store = store
        slots = BatchSlots(admission, concurrency, counts)
        self._context = BatchContext(store, app, tuple(owners), limits, concurrency, slots, counts)
        self._turns = defaultdict[str, OwnerTurns](OwnerTurns)  # by owner
        self._jobs: dict[str, tuple[BatchJob, asyncio.Task[None]]] = {}  # by batch
        self._sweeping: asyncio.Task[None] | None = None

    async def resume(self) -> None:
        """Continue the batches of an earlier server, and remove files when they expire."""
        self._sweeping = asyncio.create_task(self._sweep())
        for batch_id, owner in await self.store.find_open():
            self.start(batch_id, owner)

    def start(self, batch_id: str, owner: str) -> None:
        """Start to answer a stored batch, unless that has begun."""
        if batch_id in self._jobs:
            return
        job = BatchJob(batch_id, owner, self._turns[owner], self._context)
        task = asyncio.create_task(job.run())
        self._jobs[batch_id] = (job, task)
        task.add_done_callback(lambda _: self._jobs.pop(batch_id))

    async def cancel(self, batch_id: str, owner: str) -> StoredBatch:
        """Raises ObjectNotFound, InvalidRequest."""
        await self.store.get_batch(batch_id, owner)
        batch = await self.store.change_batch(batch_id, begin_cancelling)
        self.start(batch_id, owner)
        self._jobs[batch_id][0].wake()
        return self.count(batch)

    def count(self, batch: StoredBatch) -> StoredBatch:
        """Return the batch with its current counts and usage."""
        if batch.is_open and batch.id in self._jobs:
            progress = self._jobs[batch.id][0].progress
            batch.request_counts = progress.counts
            batch.usage = progress.usage
        return batch

    async def stop(self) -> None:
        """Abort running requests; the next server continues. Idempotent."""
        tasks = [task for _, task in self._jobs.values()]
        if self._sweeping is not None:
            tasks.append(self._sweeping)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _sweep(self) -> None:
        while True:
            try:
                await self.store.remove_expired()
            except StoreError:
                logger.warning("files that have expired cannot be removed")
            await asyncio.sleep(SWEEP_SECONDS)


def begin_cancelling(batch: StoredBatch) -> None:
    """Raises InvalidRequest."""
    if not batch.is_open:
        raise InvalidRequest(f"the batch has ended: it is {batch.status}", "batch_id")
    if batch.status != "cancelling":
        batch.status = "cancelling"
        batch.cancelling_at = int(time.time())
