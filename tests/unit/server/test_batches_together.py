"""Several batches of one key, on a scripted engine, and batches whose files cannot be written for a while."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable

import pytest

from serve_llm.common.errors import ServeError
from serve_llm.server.batches import job
from serve_llm.server.batches.files import BatchOutput
from serve_llm.server.batches.objects import StoredBatch
from serve_llm.server.batches.service import begin_cancelling
from serve_llm.server.batches.store import BatchStore
from support.serving import Served
from support.stored_batches import (
    BATCHES,
    Json,
    Serve,
    ask,
    build_input,
    build_line,
    create,
    get,
    read_results,
    run,
    wait_for,
)

TWO_LINES = build_input(build_line("first"), build_line("second"))


async def begin(served: Served) -> Json:
    """Start a batch that runs until `finish`."""
    batch = await create(served, build_input(*(build_line(number) for number in range(4))))
    while len(served.engine.open) < 2:
        await served.engine.changed.wait()
        served.engine.changed.clear()
    return batch


async def finish(served: Served, batch_id: str) -> Json:
    while (await get(served, f"{BATCHES}/{batch_id}"))["status"] == "in_progress":
        served.engine.step()
        await asyncio.sleep(0)
    return await get(served, f"{BATCHES}/{batch_id}")


@pytest.mark.parametrize(
    ("status", "content", "fields"),
    [
        ("cancelled", TWO_LINES, {}),
        ("expired", TWO_LINES, {"completion_window": "1s"}),
        ("failed", TWO_LINES + b"{", {}),
    ],
)
def test_a_batch_ends_while_it_waits_for_another(
    serve_batches: Serve, status: str, content: bytes, fields: Json
) -> None:
    served = serve_batches(automatic=False, options={"max_num_seqs": 2})

    async def scenario() -> None:
        running = await begin(served)
        waiting = await create(served, content, **fields)
        if status == "cancelled":
            waiting = await wait_for(served, waiting["id"], "in_progress")
            assert waiting["request_counts"] == {"total": 2, "completed": 0, "failed": 0}
            reply = await ask(served, "POST", f"{BATCHES}/{waiting['id']}/cancel", {})
            assert reply.json()["status"] == "cancelling"
        ended = await wait_for(served, waiting["id"], status)
        num_failed = 0 if status == "failed" else 2
        assert ended["request_counts"] == {"total": num_failed, "completed": 0, "failed": num_failed}
        failed = await read_results(served, ended, "error")
        assert [one["custom_id"] for one in failed] == ["first", "second"][:num_failed]
        assert {one["error"]["code"] for one in failed} <= {f"batch_{status}"}
        assert (await get(served, f"{BATCHES}/{running['id']}"))["status"] == "in_progress"
        done = await finish(served, running["id"])
        assert done["request_counts"] == {"total": 4, "completed": 4, "failed": 0}

    run(scenario)
    assert len(served.engine.submitted) == 4


def test_batches_of_a_key_are_answered_in_turn(serve_batches: Serve) -> None:
    served = serve_batches(automatic=False, options={"max_num_seqs": 2})

    async def scenario() -> None:
        batches = [await begin(served), *[await create(served, TWO_LINES) for _ in range(2)]]
        for batch in batches[1:]:
            await wait_for(served, batch["id"], "in_progress")
        for number, batch in enumerate(batches, start=1):
            assert (await finish(served, batch["id"]))["status"] == "completed"
            assert len(served.engine.submitted) <= 4 + 2 * number

    run(scenario)
    assert len(served.engine.submitted) == 8


def test_the_next_server_ends_a_cancelled_batch_before_its_turn(serve_batches: Serve) -> None:
    first = serve_batches(automatic=False, options={"max_num_seqs": 2})
    ids: list[str] = []

    async def leave() -> None:
        assert first.batches is not None
        await begin(first)
        ids.append((await create(first, TWO_LINES))["id"])
        await wait_for(first, ids[0], "in_progress")
        await first.batches.stop()
        await first.batches.store.change_batch(ids[0], begin_cancelling)

    run(leave)
    first.storage.close()
    second = serve_batches(automatic=False)

    async def resume() -> None:
        assert second.batches is not None
        await second.batches.resume()
        batch = await wait_for(second, ids[0], "cancelled")
        assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
        await second.batches.stop()

    run(resume)


class FullDisk:
    """Nothing can be written while `is_full`. kind: what the disk holds, results or states of batches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        self.is_full = True
        self.num_failures = 0
        self._append = BatchOutput.append
        self._change_batch = BatchStore.change_batch
        if kind == "results":
            monkeypatch.setattr(BatchOutput, "append", lambda *arguments: self._append_to(*arguments))
        else:
            monkeypatch.setattr(BatchStore, "change_batch", lambda *arguments: self._change(*arguments))
        monkeypatch.setattr(job, "FIRST_RETRY_SECONDS", 0.0)

    def _append_to(self, output: BatchOutput, line: bytes) -> None:
        if self.is_full:
            self.num_failures += 1
            raise ServeError("No space left on device")
        self._append(output, line)

    async def _change(self, store: BatchStore, batch_id: str, change: Callable[[StoredBatch], None]) -> StoredBatch:
        if self.is_full:
            self.num_failures += 1
            raise sqlite3.OperationalError("database or disk is full")
        return await self._change_batch(store, batch_id, change)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("results", "completed"),
        ("results", "cancelled"),
        ("results", "expired"),
        ("states", "completed"),
        ("states", "expired"),
    ],
)
def test_a_batch_goes_on_when_the_disk_has_room_again(
    serve_batches: Serve, monkeypatch: pytest.MonkeyPatch, kind: str, status: str
) -> None:
    served = serve_batches()
    disk = FullDisk(monkeypatch, kind)

    async def scenario() -> None:
        created = await create(served, TWO_LINES, completion_window="1s" if status == "expired" else "24h")
        path = f"{BATCHES}/{created['id']}"
        while disk.num_failures < 3 or (status == "expired" and time.time() < created["expires_at"]):
            assert (await get(served, path))["status"] in ("validating", "in_progress")
            await asyncio.sleep(0)
        if status == "cancelled":
            assert (await ask(served, "POST", path + "/cancel", {})).json()["status"] == "cancelling"
        seen = disk.num_failures
        while disk.num_failures < seen + 3:  # an attempt that began before the end may answer two requests
            await asyncio.sleep(0)
        disk.is_full = False
        batch = await wait_for(served, created["id"], status)
        num_completed = 2 if status == "completed" else 0
        assert batch["request_counts"] == {"total": 2, "completed": num_completed, "failed": 2 - num_completed}
        results = [*await read_results(served, batch, "output"), *await read_results(served, batch, "error")]
        assert sorted(one["custom_id"] for one in results) == ["first", "second"]

    run(scenario)


@pytest.mark.parametrize(("name", "code"), [("input", "input_file_not_found"), ("errors", "invalid_results")])
def test_a_batch_whose_files_are_damaged_fails(serve_batches: Serve, name: str, code: str) -> None:
    served = serve_batches(automatic=False, options={"max_num_seqs": 2})

    async def scenario() -> None:
        assert served.batches is not None
        batch = await begin(served)
        store = served.batches.store
        await served.batches.stop()
        path = getattr(store.find_paths(await store.get_batch(batch["id"], "")), name)
        path.unlink() if name == "input" else path.write_text("something else\n")
        await served.batches.resume()
        failed = await wait_for(served, batch["id"], "failed")
        assert [problem["code"] for problem in failed["errors"]["data"]] == [code]

    run(scenario)
