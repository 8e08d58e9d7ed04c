"""/v1/files and /v1/batches on a scripted engine: what is stored, for whom, and the outcome of every line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from openai.types.batch_usage import BatchUsage

from serve_llm.common.errors import OptionError
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import LOWEST_PRIORITY
from serve_llm.server.assemble import assemble
from serve_llm.server.prompt.model import ServedModel
from support.asgi import Call
from support.serving import Served
from support.stored_batches import (
    BATCHES,
    EXPIRY_FIELDS,
    FILES,
    FIRST,
    FORM,
    SECOND,
    Json,
    Serve,
    ask,
    build_form,
    build_input,
    build_line,
    create,
    get,
    read_results,
    run,
    wait_for,
)


def test_every_line_has_one_result(serve_batches: Serve) -> None:
    served = serve_batches()
    lines = [build_line(number) for number in range(20)]
    lines[7]["body"] = {"prompt": 3}
    lines[9]["body"] = {"prompt": "x", "model": "other"}

    async def scenario() -> None:
        created = await create(served, build_input(*lines), metadata={"a": "b"})
        batch = await wait_for(served, created["id"], "completed")
        assert batch["request_counts"] == {"total": 20, "completed": 18, "failed": 2}
        assert batch["metadata"] == {"a": "b"} and batch["expires_at"] == batch["created_at"] + 86400
        answered = await read_results(served, batch, "output")
        failed = await read_results(served, batch, "error")
        assert sorted(int(one["custom_id"]) for one in answered + failed) == list(range(20))
        assert {one["custom_id"]: one["response"]["status_code"] for one in failed} == {"7": 400, "9": 404}
        assert all(one["response"]["body"]["choices"] and one["response"]["request_id"] for one in answered)
        assert [one["id"] for one in (await get(served, BATCHES))["data"]] == [batch["id"]]
        late = await ask(served, "POST", f"{BATCHES}/{batch['id']}/cancel", {})
        assert late.status == 400 and "completed" in late.json()["error"]["message"]  # type: ignore[index]

    run(scenario)
    assert {request.priority for request in served.engine.submitted} == {LOWEST_PRIORITY}


TALK = [{"role": "user", "content": "x"}]
BODIES: dict[str, Json] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2, "n": 2},
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 2},
    "/v1/messages": {"messages": TALK, "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
}


@pytest.mark.parametrize("url", BODIES)
def test_the_usage_is_that_of_all_answers(serve_batches: Serve, url: str) -> None:
    served = serve_batches()
    lines = [build_line(number, url=url, body=BODIES[url]) for number in range(4)]
    lines[1]["body"] = {}

    async def scenario() -> None:
        created = await create(served, build_input(*lines), endpoint=url)
        assert created["usage"] is None
        batch = await wait_for(served, created["id"], "completed")
        usage = BatchUsage.model_validate(batch["usage"])
        results = await read_results(served, batch, "output")
        (one, *_) = [result["response"]["body"]["usage"] for result in results]
        prompt = one.get("prompt_tokens", 0) + one.get("input_tokens", 0) + one.get("cache_read_input_tokens", 0)
        completion = one.get("completion_tokens", 0) + one.get("output_tokens", 0)
        assert len(results) == 3 and prompt > 0 and completion > 0
        assert (usage.input_tokens, usage.output_tokens) == (3 * prompt, 3 * completion)
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens

    run(scenario)


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/messages"])
def test_a_request_at_fault_fails_alone(serve_batches: Serve, url: str) -> None:
    served = serve_batches()
    body: Json = {"max_tokens": 2}
    body |= {"prompt": "x"} if url == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    lines = [build_line(number, url=url, body=body) for number in range(4)]
    lines[1]["body"] = body | {"stream": True}
    lines[2]["priority"] = 3
    lines[3]["body"] = "text"

    async def scenario() -> None:
        batch = await wait_for(served, (await create(served, build_input(*lines), endpoint=url))["id"], "completed")
        assert batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
        failed = await read_results(served, batch, "error")
        assert {one["custom_id"] for one in failed} == {"1", "2", "3"}
        for result in failed:
            assert result["error"] is None and result["response"]["status_code"] == 400
            assert result["response"]["request_id"]
            error = result["response"]["body"]["error"]
            assert ("param" in error) == (url == "/v1/completions")
            assert {"1": "stream", "2": "priority", "3": "body"}[result["custom_id"]] in error["message"]

    run(scenario)


def test_a_batch_gives_way_to_other_requests(serve_batches: Serve) -> None:
    served = serve_batches(automatic=False)

    async def wait_until_open(number: int) -> None:
        while len(served.engine.open) != number:
            await served.engine.changed.wait()
            served.engine.changed.clear()

    async def scenario() -> None:
        other = Call(served.app, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 20})
        await wait_until_open(1)
        batch = await create(served, build_input(*(build_line(number) for number in range(10))))
        for _ in range(3):
            await wait_until_open(2)
            served.engine.step()
        while not other.finished.done():
            assert len(served.engine.open) <= 2 or not served.admission.count_open_before(LOWEST_PRIORITY)
            served.engine.step()
            await asyncio.sleep(0)
        while served.engine.open or (await get(served, f"{BATCHES}/{batch['id']}"))["status"] == "in_progress":
            served.engine.step()
            await asyncio.sleep(0)
        assert (await get(served, f"{BATCHES}/{batch['id']}"))["request_counts"]["completed"] == 10

    run(scenario)


def test_a_batch_continues_on_the_next_server(serve_batches: Serve, tmp_path: Path) -> None:
    lines = [build_line(number) for number in range(10)]
    first = serve_batches("batch-lines=10", automatic=False, options={"max_num_seqs": 4})
    found: Json = {}

    async def begin() -> None:
        found.update(await create(first, build_input(*lines)))
        while len(first.engine.open) < 4:
            await first.engine.changed.wait()
            first.engine.changed.clear()
        while (await get(first, f"{BATCHES}/{found['id']}"))["request_counts"]["completed"] < 4:
            first.engine.step()
        refused = await ask(first, "DELETE", f"{FILES}/{found['input_file_id']}")
        assert refused.status == 400
        assert first.batches is not None
        await first.batches.stop()

    run(begin)
    with pytest.raises(OptionError, match=r"--batches-dir .*another server uses it"):
        serve_batches()
    first.storage.close()
    (output,) = (tmp_path / "batches" / "files").glob("*-output")
    num_done = len(output.read_bytes().splitlines())
    second = serve_batches()

    async def finish() -> None:
        assert second.batches is not None
        await second.batches.resume()
        batch = await wait_for(second, found["id"], "completed")
        results = await read_results(second, batch, "output")
        assert sorted(int(one["custom_id"]) for one in results) == list(range(10))
        usages = [one["response"]["body"]["usage"]["total_tokens"] for one in results]
        assert batch["usage"]["total_tokens"] == sum(usages), "also of those that the first server answered"

    run(finish)
    assert 4 <= num_done < 10 and len(second.engine.submitted) == 10 - num_done


@pytest.mark.parametrize(("fields", "status"), [({}, "cancelled"), ({"completion_window": "1s"}, "expired")])
def test_requests_that_are_not_answered_say_why(serve_batches: Serve, fields: Json, status: str) -> None:
    served = serve_batches(automatic=False, options={"max_num_seqs": 2})

    async def scenario() -> None:
        created = await create(served, build_input(*(build_line(number) for number in range(6))), **fields)
        if status == "cancelled":
            while len(served.engine.open) < 2:
                await served.engine.changed.wait()
                served.engine.changed.clear()
            served.engine.step()
            served.engine.step()
            reply = await ask(served, "POST", f"{BATCHES}/{created['id']}/cancel", {})
            assert reply.json()["status"] == "cancelling"
        batch = await wait_for(served, created["id"], status)
        answered = await read_results(served, batch, "output")
        failed = await read_results(served, batch, "error")
        assert sorted(int(one["custom_id"]) for one in answered + failed) == list(range(6))
        assert {one["error"]["code"] for one in failed} == {f"batch_{status}"} and len(failed) >= 4
        assert batch[f"{status}_at"] and not served.engine.open

    run(scenario)


@pytest.mark.parametrize(
    ("content", "reason", "code"),
    [
        (b"", "0 requests", "empty_file"),
        (build_input(build_line(1), build_line(1)), "not the first", "duplicate_custom_id"),
        (build_input(build_line(1)) + b"{", "line of a batch", "invalid_json_line"),
        (
            build_input(build_line(1), build_line(2, url="/v1/embeddings")),
            "url must be that of the batch",
            "url_mismatch",
        ),
        (build_input(build_line(1), build_line(2, method="GET")), "method must be POST", "invalid_line"),
        (build_input(*(build_line(number) for number in range(4))), "1 to 3 are possible", "too_many_tasks"),
    ],
)
def test_an_input_at_fault_fails_the_batch(serve_batches: Serve, content: bytes, reason: str, code: str) -> None:
    served = serve_batches("batch-lines=3")

    async def scenario() -> None:
        batch = await wait_for(served, (await create(served, content))["id"], "failed")
        (problem,) = batch["errors"]["data"]
        assert reason in problem["message"] and problem["code"] == code
        assert problem["line"] == (2 if len(content.splitlines()) == 2 else None)
        assert "/" not in problem["message"].replace("/v1/", ""), "no path of the server"

    run(scenario)
    assert not served.engine.submitted


def test_another_key_finds_nothing(serve_batches: Serve) -> None:
    served = serve_batches(options={"api_key": ("first", "second")})

    async def scenario() -> None:
        batch = await create(served, build_input(build_line(1)), FIRST)
        await wait_for(served, batch["id"], "completed", key=FIRST)
        file, one = f"{FILES}/{batch['input_file_id']}", f"{BATCHES}/{batch['id']}"
        for method, path in (
            ("GET", file),
            ("GET", file + "/content"),
            ("DELETE", file),
            ("GET", one),
            ("POST", one + "/cancel"),
        ):
            assert (await ask(served, method, path, None, SECOND)).status == 404, path
        for path in (FILES, BATCHES):
            assert (await get(served, path, SECOND))["data"] == [] != (await get(served, path, FIRST))["data"]
        body = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await ask(served, "POST", BATCHES, body, SECOND)).status == 404

    run(scenario)
    assert {request.tenant for request in served.engine.submitted} == {0}


GOOD = {"input_file_id": "file-none", "endpoint": "/v1/completions", "completion_window": "24h"}
EXPIRY = {"anchor": "created_at", "seconds": 3600}
BAD: list[tuple[str, object, int, str]] = [
    (BATCHES, GOOD, 404, "input_file_id"),
    (BATCHES, GOOD | {"endpoint": "/v1/files"}, 400, "endpoint"),
    (BATCHES, GOOD | {"completion_window": "0h"}, 400, "completion_window"),
    (BATCHES, GOOD | {"completion_window": "31d"}, 400, "completion_window"),
    (BATCHES, GOOD | {"metadata": {"a": 1}}, 400, "metadata.a"),
    (BATCHES, GOOD | {"metadata": {"a": "x" * 513}}, 400, "metadata"),
    (BATCHES, GOOD | {"metadata": {"x" * 65: "a"}}, 400, "metadata"),
    (BATCHES, GOOD | {"metadata": {str(number): "x" for number in range(17)}}, 400, "metadata"),
    (BATCHES, GOOD | {"output_expires_after": {}}, 400, "output_expires_after.anchor"),
    (BATCHES, GOOD | {"output_expires_after": EXPIRY | {"anchor": "now"}}, 400, "output_expires_after.anchor"),
    (BATCHES, GOOD | {"output_expires_after": EXPIRY | {"seconds": 3599}}, 400, "output_expires_after.seconds"),
    (BATCHES, GOOD | {"output_expires_after": EXPIRY | {"seconds": "3600"}}, 400, "output_expires_after.seconds"),
    (BATCHES, GOOD | {"output_expires_after": EXPIRY | {"days": 1}}, 400, "output_expires_after.days"),
    (BATCHES, {}, 400, "input_file_id"),
    (FILES, build_form(b"x", "fine-tune"), 400, "purpose"),
    (FILES, build_form(b"x", **{"expires_after[anchor]": "created_at"}), 400, "expires_after[seconds]"),
    (FILES, build_form(b"x", **{"expires_after[seconds]": "3600"}), 400, "expires_after[anchor]"),
    (FILES, build_form(b"x", **EXPIRY_FIELDS | {"expires_after[seconds]": "2592001"}), 400, "expires_after[seconds]"),
    (FILES, build_form(b"x", **EXPIRY_FIELDS | {"expires_after[seconds]": "3.6e3"}), 400, "expires_after[seconds]"),
    (FILES, build_form(b"x", **EXPIRY_FIELDS | {"expires_after": "1"}), 400, "expires_after"),
    (FILES, build_form(b"x", x="1"), 400, "x"),
    (FILES, b'--cut\r\ncontent-disposition: form-data; name="file"\r\n\r\nx\r\n--cut--\r\n', 400, "file"),
    (FILES, b"--cut\r\n", 400, "file"),
    (FILES, b"", 400, "file"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD, ids=range(len(BAD)))
def test_bad_requests(serve_batches: Serve, path: str, body: object, status: int, param: str) -> None:
    reply = serve_batches().post(path, body, FORM if path == FILES else {})
    assert reply.status == status, reply.content
    assert reply.json()["error"]["param"] in (param, None) and reply.json()["error"]["message"]  # type: ignore[index]


def test_without_a_directory_the_option_is_named(served: Served) -> None:
    for path in (FILES, BATCHES):
        reply = served.post(path, {})
        assert reply.status == 404 and "--batches-dir" in reply.json()["error"]["message"]  # type: ignore[index]


def test_a_folder_that_cannot_be_written_fails_the_start_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(ServedModel, "load", lambda *arguments: pytest.fail("the model is loaded"))
    with pytest.raises(OptionError, match=r"--batches-dir .*Not a directory"):
        asyncio.run(assemble(make_options("demo", batches_dir=str(tmp_path / "file" / "inner"))))
