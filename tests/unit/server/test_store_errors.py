"""Stores whose disk is full or not writable, on a scripted engine."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.formparsers import MultiPartParser

from serve_llm.server.http.errors import StoreError
from serve_llm.server.storage.database import Connection, Database
from support.asgi import Reply
from support.serving import Served
from support.stored_batches import BATCHES, FILES, FORM, build_form, build_input, build_line
from support.stored_batches import Serve as ServeBatches
from support.stored_responses import PATH, ask
from support.stored_responses import Serve as ServeStored

READ_ONLY = "PRAGMA query_only = ON"
NO_ROOM = "PRAGMA max_page_count = 1"
Json = dict[str, object]


def spoil(database: Database, pragma: str) -> None:
    database.run_here(lambda connection: connection.execute(pragma).fetchall())


def check(reply: Reply, status: int, *words: str) -> None:
    assert reply.status == status, reply.content
    error = reply.json()["error"]  # type: ignore[index]
    assert error["code"] == ("store_full" if status == 507 else "store_unavailable")
    assert all(word in error["message"] for word in words) and reply.headers["retry-after"] == "1"


def list_response_calls(served: Served, response_id: str) -> dict[str, Callable[[], Reply]]:
    large = {"role": "user", "content": "Hi", "id": "y" * 30_000}
    return {
        "background": lambda: served.post(PATH, {"input": [large], "background": True}),
        "delete": lambda: served.delete(f"{PATH}/{response_id}"),
    }


@pytest.mark.parametrize("call", ["background", "delete"])
def test_a_store_of_responses_that_is_read_only(serve_stored: ServeStored, call: str) -> None:
    served = serve_stored()
    response_id = ask(served)["id"]
    assert served.storage.responses is not None
    spoil(served.storage.responses._database, READ_ONLY)
    check(list_response_calls(served, response_id)[call](), 503, "--responses-store", "readonly")
    assert served.get(f"{PATH}/{response_id}").status == 200
    assert ask(served)["store"] is False and served.chat().status == 200
    assert served.admission.num_open == 0


def test_a_store_of_responses_without_room(serve_stored: ServeStored, caplog: pytest.LogCaptureFixture) -> None:
    served = serve_stored()
    response_id = ask(served)["id"]
    assert served.storage.responses is not None
    spoil(served.storage.responses._database, NO_ROOM)
    check(list_response_calls(served, response_id)["background"](), 507, "--responses-store", "full")
    assert "--responses-store failed: database or disk is full" in caplog.text and "Traceback" not in caplog.text
    assert served.get(f"{PATH}/{response_id}").status == 200
    assert ask(served, store=False)["status"] == "completed" and served.admission.num_open == 0


def test_a_store_that_cannot_be_read(serve_stored: ServeStored, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve_stored()
    response_id = ask(served)["id"]

    def fail(self: Database, work: Callable[[Connection], object]) -> None:
        raise sqlite3.OperationalError("database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "run_here", fail)
        for path in ("", "/input_items"):
            check(served.get(f"{PATH}/{response_id}{path}"), 503, "--responses-store", "locked")
        check(served.post(PATH, {"input": "x", "previous_response_id": response_id}), 503, "locked")
    assert ask(served, previous_response_id=response_id)["status"] == "completed"


def test_a_wrong_statement_is_logged_as_a_bug(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SQLite reports it with the class that a full disk has."""
    database = Database(tmp_path / "database", "", "responses-store")
    with pytest.raises(StoreError, match="no such column"):
        asyncio.run(database.run(lambda connection: connection.execute("SELECT lost").fetchall()))
    assert "Traceback" in caplog.text
    caplog.clear()
    database.run_here(lambda connection: connection.execute(READ_ONLY).fetchall())
    with pytest.raises(StoreError, match="readonly"):
        asyncio.run(database.run(lambda connection: connection.execute("CREATE TABLE late (id)").fetchall()))
    assert "--responses-store failed" in caplog.text and "Traceback" not in caplog.text
    database.close()


@pytest.mark.parametrize(("pragma", "status"), [(READ_ONLY, 503), (NO_ROOM, 507)])
def test_a_store_of_batches_that_cannot_be_written(serve_batches: ServeBatches, pragma: str, status: int) -> None:
    served = serve_batches()
    line = build_line(1)
    name = {"input_file_id": served.post(FILES, build_form(build_input(line)), FORM).json()["id"]}  # type: ignore[index]
    assert served.storage.batches is not None
    spoil(served.storage.batches._database, pragma)
    large = {"metadata": {f"key{number}": "x" * 512 for number in range(16)}}
    creation = {**name, **large, "endpoint": "/v1/completions", "completion_window": "24h"}
    check(served.post(BATCHES, creation), status, "--batches-dir")
    for path in (FILES, BATCHES, f"{FILES}/{name['input_file_id']}/content"):
        assert served.get(path).status == 200
    if pragma == READ_ONLY:
        check(served.post(FILES, build_form(b"x"), FORM), status, "--batches-dir")
        check(served.delete(f"{FILES}/{name['input_file_id']}"), status, "--batches-dir")


def test_a_disk_without_room_for_files(serve_batches: ServeBatches, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve_batches()

    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("serve_llm.server.batches.store.shutil.copyfileobj", fail)
        check(served.post(FILES, build_form(b"x"), FORM), 507, "--batches-dir", "No space left")
    with monkeypatch.context() as patch:
        patch.setattr(MultiPartParser, "parse", fail)
        check(served.post(FILES, build_form(b"x"), FORM), 507, "temporary files", "No space left")
    assert served.get(FILES).json()["data"] == []  # type: ignore[index]


def test_a_file_that_somebody_removed(serve_batches: ServeBatches) -> None:
    served = serve_batches()
    file_id = served.post(FILES, build_form(b"x"), FORM).json()["id"]  # type: ignore[index]
    assert served.storage.batches is not None
    (served.storage.batches._files / file_id).unlink()
    check(served.get(f"{FILES}/{file_id}/content"), 503, "--batches-dir", "No such file")
