"""/v1/files on a scripted engine: what is kept, for how long, and how much."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import pytest

from serve_llm.server.batches import store as store_module
from support.stored_batches import (
    BATCHES,
    EXPIRY_FIELDS,
    FILES,
    FIRST,
    FORM,
    SECOND,
    Serve,
    ask,
    build_form,
    build_input,
    build_line,
    create,
    get,
    run,
    upload,
    wait_for,
)


def test_files(serve_batches: Serve) -> None:
    served = serve_batches()

    async def scenario() -> None:
        ids = [await upload(served, b"%d\r\n--cu" % number) for number in range(3)]
        content = await ask(served, "GET", f"{FILES}/{ids[1]}/content")
        assert content.content == b"1\r\n--cu"
        file = await get(served, f"{FILES}/{ids[1]}")
        assert (file["bytes"], file["filename"], file["purpose"]) == (7, "in.jsonl", "batch")
        assert [one["id"] for one in (await get(served, FILES))["data"]] == ids[::-1]
        page = await get(served, f"{FILES}?limit=2&order=asc&purpose=batch")
        assert [one["id"] for one in page["data"]] == ids[:2] and page["has_more"]
        page = await get(served, f"{FILES}?order=asc&after={page['last_id']}")
        assert [one["id"] for one in page["data"]] == ids[2:] and not page["has_more"]
        assert (await get(served, f"{FILES}?purpose=batch_output"))["data"] == []
        deleted = await ask(served, "DELETE", f"{FILES}/{ids[0]}")
        assert deleted.json() == {"id": ids[0], "object": "file", "deleted": True}
        for method, more in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert (await ask(served, method, f"{FILES}/{ids[0]}{more}")).status == 404

    run(scenario)


def test_quotas(serve_batches: Serve) -> None:
    served = serve_batches("file-bytes=1000", "stored-files=3", "all-file-bytes=150000")

    async def scenario() -> None:
        large = await ask(served, "POST", FILES, build_form(b"x" * 100_000))
        assert large.status == 413 and "1000 bytes" in large.json()["error"]["message"]  # type: ignore[index]
        for _ in range(3):
            await upload(served, b"x" * 1000)
        full = await ask(served, "POST", FILES, build_form(b"x"))
        assert full.status == 413 and "delete some" in full.json()["error"]["message"]  # type: ignore[index]

    run(scenario)


def test_a_form_is_needed(serve_batches: Serve) -> None:
    served = serve_batches()
    for headers in ({}, {"content-type": "application/json"}, {"content-type": "multipart/form-data"}):
        assert served.post(FILES, b"{}", headers).status == 400
    torn = served.post(FILES, b'--cut\r\ncontent-disposition: form-data; name="', FORM)
    assert torn.status == 400


def test_files_may_be_sent_compressed(serve_batches: Serve) -> None:
    served = serve_batches("file-bytes=1000")
    headers = {"content-encoding": "gzip"}

    async def scenario() -> None:
        reply = await ask(served, "POST", FILES, gzip.compress(build_form(b"x" * 1000)), headers)
        assert reply.status == 200 and reply.json()["bytes"] == 1000
        large = await ask(served, "POST", FILES, gzip.compress(build_form(b"x" * 100_000)), headers)
        assert large.status == 413 and "1000 bytes" in large.json()["error"]["message"]  # type: ignore[index]

    run(scenario)


def test_a_key_cannot_take_the_room_of_another(serve_batches: Serve) -> None:
    limits = ("stored-files=2", "stored-batches=1")
    served = serve_batches(*limits, options={"api_key": ("first", "second")})

    async def scenario() -> None:
        batch = await create(served, build_input(build_line(1)), SECOND)
        await wait_for(served, batch["id"], "completed", key=SECOND)
        for _ in range(2):
            last = await create(served, build_input(build_line(1)), FIRST)
            await wait_for(served, last["id"], "completed", key=FIRST)
            for file in (await get(served, FILES, FIRST))["data"]:
                await ask(served, "DELETE", f"{FILES}/{file['id']}", None, FIRST)
        for _ in range(2):
            await upload(served, b"x", FIRST)
        assert (await ask(served, "POST", FILES, build_form(b"x"), FIRST)).status == 413
        assert (await ask(served, "DELETE", f"{FILES}/{batch['input_file_id']}", None, SECOND)).status == 200
        await upload(served, b"x", SECOND)
        assert [one["id"] for one in (await get(served, BATCHES, FIRST))["data"]] == [last["id"]]
        assert [one["id"] for one in (await get(served, BATCHES, SECOND))["data"]] == [batch["id"]]

    run(scenario)


def test_files_expire(serve_batches: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve_batches()

    async def scenario() -> None:
        kept = await upload(served, b"x")
        short = await upload(served, b"x", **EXPIRY_FIELDS)
        file = await get(served, f"{FILES}/{short}")
        assert file["expires_at"] == file["created_at"] + 3600
        assert (await get(served, f"{FILES}/{kept}"))["expires_at"] is None
        expiry = {"anchor": "created_at", "seconds": 7200}
        batch = await create(served, build_input(build_line(1)), output_expires_after=expiry)
        batch = await wait_for(served, batch["id"], "completed")
        assert batch["output_expires_after"] == expiry
        output = batch["output_file_id"]
        file = await get(served, f"{FILES}/{output}")
        assert file["expires_at"] == file["created_at"] + 7200
        now = time.time()
        for hours, left in ((0.9, {kept, short, output}), (1.1, {kept, output}), (2.1, {kept})):
            monkeypatch.setattr(store_module.time, "time", lambda later=now + 3600 * hours: later)
            left = left | {batch["input_file_id"]}
            assert {one["id"] for one in (await get(served, FILES))["data"]} == left
            assert {path.name for path in (tmp_path / "batches" / "files").iterdir()} == left
        for path in (f"{FILES}/{short}", f"{FILES}/{output}/content"):
            assert (await ask(served, "GET", path)).status == 404

    run(scenario)


def test_the_input_of_an_open_batch_outlives_its_time(serve_batches: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve_batches(automatic=False)

    async def scenario() -> None:
        assert served.batches is not None
        file_id = await upload(served, build_input(build_line(1)), **EXPIRY_FIELDS)
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await ask(served, "POST", BATCHES, body)).json()
        now = time.time()
        monkeypatch.setattr(store_module.time, "time", lambda: now + 4000)
        await served.batches.resume()
        assert (await ask(served, "GET", f"{FILES}/{file_id}/content")).status == 200
        await ask(served, "POST", f"{BATCHES}/{batch['id']}/cancel")
        await wait_for(served, str(batch["id"]), "cancelled")
        assert (await ask(served, "GET", f"{FILES}/{file_id}/content")).status == 404
        assert (await ask(served, "POST", BATCHES, body)).status == 404
        await served.batches.stop()

    run(scenario)
