"""--responses-store: which responses are kept, for whom, and for how long; background responses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from serve_llm.common.errors import OptionError
from serve_llm.server.schema.common import ObjectList
from serve_llm.server.schema.responses import ResponseReply
from serve_llm.server.storage import responses as responses_module
from support.asgi import Call
from support.serving import Served
from support.stored_responses import PATH, Json, Serve, ask, get, read_events, wait_for_status
from support.tools import write_call

CLOCK = {"type": "function", "name": "clock"}
FIRST, SECOND = ({"authorization": f"Bearer {key}"} for key in ("first", "second"))


def last_prompt(served: Served) -> str:
    ids = served.engine.submitted[-1].prompt_ids
    return served.model.tokenizer.decode(ids, skip_special_tokens=False)


def test_the_stored_response_is_the_answer(serve_stored: Serve) -> None:
    served = serve_stored()
    body = ask(served, metadata={"a": "b"})
    assert body["store"] is True and body["background"] is False and body["previous_response_id"] is None
    stored = get(served, body["id"])
    assert stored.status == 200 and stored.json() == body
    ResponseReply.model_validate(stored.json())
    deleted = served.delete(f"{PATH}/{body['id']}")
    assert deleted.json() == {"id": body["id"], "object": "response", "deleted": True}
    for reply in (get(served, body["id"]), served.delete(f"{PATH}/{body['id']}")):
        assert reply.status == 404 and body["id"] in reply.json()["error"]["message"]  # type: ignore[index]


@pytest.mark.parametrize("fields", [{}, {"max_output_tokens": 2}])
def test_the_stored_response_is_the_end_of_the_stream(serve_stored: Serve, fields: Json) -> None:
    served = serve_stored("Hello, you there.")
    events = read_events(served.post(PATH, {"input": "Hi", "stream": True, **fields}).content)
    last = events[-1]["response"]
    assert last["id"] == events[0]["response"]["id"]
    assert get(served, last["id"]).json() == last
    assert last["status"] == ("incomplete" if fields else "completed")


def test_nothing_is_stored_unless_asked(serve_stored: Serve, serve: Serve) -> None:
    served = serve_stored()
    body = ask(served, store=False)
    assert body["store"] is False and get(served, body["id"]).status == 404
    reply = serve().get(PATH + "/resp_1")
    assert reply.status == 404 and "--responses-store" in reply.json()["error"]["message"]  # type: ignore[index]


def test_only_what_is_not_stored_has_the_id_of_the_request(serve_stored: Serve) -> None:
    served = serve_stored()
    reply = served.post(PATH, {"input": "Hi", "request_id": "x", "store": False})
    assert reply.json()["id"] == "resp_x"  # type: ignore[index]
    reply = served.post(PATH, {"input": "Hi", "request_id": "x"})
    assert reply.json()["id"] != "resp_x" and reply.headers["x-ignored-fields"] == "request_id"  # type: ignore[index]


def test_an_incomplete_response_is_continued_without_input(serve_stored: Serve) -> None:
    served = serve_stored("Hello, you there.")
    first = ask(served, max_output_tokens=2)
    begun = first["output"][0]["content"][0]["text"]
    served.post(PATH, {"previous_response_id": first["id"]})
    assert begun and last_prompt(served).endswith(begun)
    served.post(PATH, {"previous_response_id": first["id"], "input": "Go on"})
    assert not last_prompt(served).endswith(begun)


@pytest.mark.parametrize("text", ["Hello.", "<think>\nHm.\n</think>\n\nHello.", write_call("clock")])
def test_a_continued_conversation_is_the_replayed_one(serve_stored: Serve, text: str) -> None:
    served = serve_stored(text)
    first = ask(served, input="One", tools=[CLOCK], instructions="Be brief.")
    answers = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "Noon."}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    second = ask(served, input=[*answers, {"role": "user", "content": "Two"}], previous_response_id=first["id"])
    third = ask(served, input="Three", previous_response_id=second["id"], tools=[CLOCK])
    continued = last_prompt(served)
    replayed = [{"role": "user", "content": "One"}, *first["output"], *answers, {"role": "user", "content": "Two"}]
    ask(served, input=[*replayed, *second["output"], {"role": "user", "content": "Three"}], tools=[CLOCK])
    assert continued == last_prompt(served)
    assert third["previous_response_id"] == second["id"] and "Be brief." not in continued
    counted = served.post(PATH + "/input_tokens", {"input": "Three", "previous_response_id": second["id"]})
    assert counted.status == 200 and counted.json()["input_tokens"] > 20  # type: ignore[operator]


def test_a_call_that_was_cut_is_left_out(serve_stored: Serve) -> None:
    served = serve_stored(write_call("clock", zone="x" * 50))
    first = ask(served, tools=[CLOCK], max_output_tokens=25)
    assert first["output"][-1]["status"] == "incomplete"
    assert ask(served, input="Go on", previous_response_id=first["id"])["status"] == "completed"
    assert "clock" not in last_prompt(served)


def test_items_may_be_named_instead_of_sent(serve_stored: Serve) -> None:
    served = serve_stored()
    first = ask(served, input="One")
    (question,) = served.get(f"{PATH}/{first['id']}/input_items").json()["data"]  # type: ignore[misc]
    references = [{"type": "item_reference", "id": item["id"]} for item in (question, *first["output"])]
    second = ask(served, input=[*references, {"role": "user", "content": "Two"}])
    assert "One" in last_prompt(served) and "Hello." in last_prompt(served)
    items = served.get(f"{PATH}/{second['id']}/input_items?order=asc").json()["data"]
    assert items[:2] == [question, *first["output"]]  # type: ignore[index]
    missing = served.post(PATH, {"input": [{"type": "item_reference", "id": "msg_none"}]})
    assert missing.status == 400 and missing.json()["error"]["param"] == "input[0]"  # type: ignore[index]


def test_input_items_are_listed_page_by_page(serve_stored: Serve) -> None:
    served = serve_stored()
    texts = [str(number) for number in range(25)]
    body = ask(served, input=[{"role": "user", "content": text, "id": f"mine_{text}"} for text in texts])
    path = f"{PATH}/{body['id']}/input_items"
    for order, expected in (("asc", texts), ("desc", texts[::-1])):
        found: list[str] = []
        after = ""
        while True:
            page = served.get(f"{path}?limit=10&order={order}{after}").json()
            ObjectList.model_validate(page)
            found += [item["content"][0]["text"] for item in page["data"]]  # type: ignore[index, attr-defined]
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        assert found == expected
    assert len(served.get(path).json()["data"]) == 20  # type: ignore[arg-type]
    for query, param in (
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=msg_none", "after"),
    ):
        reply = served.get(f"{path}?{query}")
        assert reply.status == 400 and reply.json()["error"]["param"] == param  # type: ignore[index]


def test_another_key_finds_nothing(serve_stored: Serve) -> None:
    served = serve_stored(options={"api_key": ("first", "second")})
    mine = ask(served, FIRST)
    path = f"{PATH}/{mine['id']}"
    item = {"type": "item_reference", "id": mine["output"][0]["id"]}
    absent = [served.get(f"{path}{more}", SECOND) for more in ("", "/input_items", "?stream=true")] + [
        served.delete(path, SECOND),
        served.post(path + "/cancel", {}, SECOND),
        served.post(PATH, {"input": "x", "previous_response_id": mine["id"]}, SECOND),
        served.post(PATH + "/input_tokens", {"input": "x", "previous_response_id": mine["id"]}, SECOND),
    ]
    assert [reply.status for reply in absent] == [404] * len(absent)
    never = served.get(f"{PATH}/resp_none", SECOND).json()["error"]["message"]  # type: ignore[index]
    assert absent[0].json()["error"]["message"] == never.replace("resp_none", mine["id"])  # type: ignore[index]
    assert served.post(PATH, {"input": [item]}, SECOND).status == 400
    assert served.get(path, FIRST).status == 200 and served.post(PATH, {"input": [item]}, FIRST).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_whose_client_left_is_cancelled(serve_stored: Serve, stream: bool) -> None:
    served = serve_stored("one two three four", automatic=False)

    async def scenario() -> None:
        call = Call(served.app, "POST", PATH, {"input": "Hi", "stream": stream})
        while not served.engine.submitted:
            await served.engine.changed.wait()
            served.engine.changed.clear()
        served.engine.step()
        if stream:
            await call.news.wait()
        served.engine.step()
        call.leave()
        await call.finished
        (row,) = await served.storage.responses._database.run(  # type: ignore[union-attr]
            lambda connection: connection.execute("SELECT id FROM responses").fetchall()
        )
        stored = (await Call(served.app, "GET", f"{PATH}/{row[0]}").reply()).json()
        assert stored["status"] == "cancelled" and stored["usage"]["output_tokens"] == 2  # type: ignore[index]
        (item,) = stored["output"]  # type: ignore[misc]
        assert item["status"] == "incomplete" and item["content"][0]["text"]

    asyncio.run(scenario())


async def start(served: Served, **fields: Any) -> Json:
    reply = await Call(served.app, "POST", PATH, {"input": "Hi", "background": True, **fields}).reply()
    assert reply.status == 200, reply.content
    return dict(reply.json())


def test_a_background_response_goes_on_without_its_client(serve_stored: Serve) -> None:
    served = serve_stored("one two three", automatic=False)

    async def scenario() -> None:
        queued = await start(served)
        assert queued["status"] == "queued" and queued["background"] is True and queued["output"] == []
        assert (await wait_for_status(served, queued["id"], "queued")) == queued
        early = await Call(served.app, "POST", PATH, {"input": "x", "previous_response_id": queued["id"]}).reply()
        assert early.status == 400 and "queued" in str(early.json())
        served.engine.step()
        assert (await wait_for_status(served, queued["id"], "in_progress"))["output"] == []
        while served.engine.open:
            served.engine.step()
        done = await wait_for_status(served, queued["id"], "completed")
        assert done["id"] == queued["id"] and done["output"][0]["content"][0]["text"] == "one two three"
        cancelled = await Call(served.app, "POST", f"{PATH}/{queued['id']}/cancel", {}).reply()
        assert cancelled.status == 200 and cancelled.json() == done

    asyncio.run(scenario())


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_background_response_can_be_ended(serve_stored: Serve, method: str) -> None:
    served = serve_stored("one two three", automatic=False)

    async def scenario() -> None:
        path = f"{PATH}/{(await start(served))['id']}"
        served.engine.step()
        reply = await Call(served.app, method, path + ("/cancel" if method == "POST" else "")).reply()
        assert reply.status == 200 and not served.engine.open and served.admission.num_open == 0
        after = await Call(served.app, "GET", path).reply()
        if method == "DELETE":
            assert after.status == 404
        else:
            assert after.json() == reply.json() and reply.json()["status"] == "cancelled"

    asyncio.run(scenario())


def test_only_background_responses_can_be_cancelled(serve_stored: Serve) -> None:
    served = serve_stored()
    reply = served.post(f"{PATH}/{ask(served)['id']}/cancel", {})
    assert reply.status == 400 and "background" in reply.json()["error"]["message"]  # type: ignore[index]


def test_a_background_stream_can_be_followed_again(serve_stored: Serve) -> None:
    served = serve_stored("one two three", automatic=False)

    async def scenario() -> None:
        call = Call(served.app, "POST", PATH, {"input": "Hi", "background": True, "stream": True})
        while not served.engine.submitted:
            await served.engine.changed.wait()
            served.engine.changed.clear()
        served.engine.step()
        while len(call.sent) < 2:
            await call.news.wait()
            call.news.clear()
        call.leave()
        await call.finished
        response_id = read_events(call.sent[1]["body"])[0]["response"]["id"]
        path = f"{PATH}/{response_id}?stream=true&starting_after="
        again = Call(served.app, "GET", path + "1")
        while served.engine.open:
            served.engine.step()
        live = read_events((await again.reply()).content)
        assert [event["sequence_number"] for event in live] == list(range(2, 2 + len(live)))
        assert live[-1]["response"] == (await Call(served.app, "GET", f"{PATH}/{response_id}").reply()).json()
        assert read_events((await Call(served.app, "GET", path + "1").reply()).content) == live
        assert read_events((await Call(served.app, "GET", path + "999").reply()).content) == []
        bad = await Call(served.app, "GET", path + "x").reply()
        assert bad.status == 400 and bad.json()["error"]["param"] == "starting_after"  # type: ignore[index]

    asyncio.run(scenario())


def test_events_of_other_responses_are_not_kept(serve_stored: Serve) -> None:
    served = serve_stored()
    path = f"{PATH}/{ask(served)['id']}?stream="
    for value in ("true", "True", "maybe", "1"):  # True: a flag of Python as requests writes it
        reply = served.get(path + value)
        assert reply.status == 400 and reply.json()["error"]["param"] == "stream"  # type: ignore[index]
        assert ("keep their events" in reply.json()["error"]["message"]) == (value.lower() == "true")
    assert served.get(path + "False").status == served.get(path + "false").status == 200


def test_a_failure_in_the_background_is_stored(serve_stored: Serve) -> None:
    served = serve_stored(automatic=False)

    async def scenario() -> None:
        first, second = await start(served), await start(served)
        served.admission.draining = True
        served.admission.end_open()
        await served.admission.drained()
        for response in (first, second):
            found = await wait_for_status(served, response["id"], "failed")
            assert "shutting down" in found["error"]["message"]
        refused = await Call(served.app, "POST", PATH, {"input": "Hi", "background": True}).reply()
        assert refused.status == 503

    asyncio.run(scenario())


def test_the_oldest_leave_first(serve_stored: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve_stored(limit=("stored-responses=2",))
    ids = [ask(served)["id"] for _ in range(4)]
    assert [get(served, one).status for one in ids] == [404, 404, 200, 200]
    chain = ask(served, previous_response_id=ids[-1])
    ask(served)
    broken = served.post(PATH, {"input": "x", "previous_response_id": chain["id"]})
    message = broken.json()["error"]["message"]  # type: ignore[index]
    assert broken.status == 404 and "continues" in message and "--limit stored-responses" in message
    now = responses_module.time.time()
    monkeypatch.setattr(responses_module.time, "time", lambda: now + 40 * 86400)
    assert get(served, chain["id"]).status == 404


def test_a_file_survives_the_server(serve_stored: Serve, tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    served = serve_stored(store=path)
    first = ask(served, input="One")
    with pytest.raises(OptionError, match="another server uses it"):
        serve_stored(store=path)
    served.storage.close()
    assert path.stat().st_mode & 0o077 == 0
    again = serve_stored(store=path)
    assert get(again, first["id"]).json() == first
    ask(again, input="Two", previous_response_id=first["id"])
    assert "One" in last_prompt(again)
    again.storage.close()
    locked = serve_stored(store=path, options={"api_key": "first"})
    assert get(locked, first["id"], FIRST).status == 404, "it was stored without a key"


def test_what_a_killed_server_was_generating_has_failed(serve_stored: Serve, tmp_path: Path) -> None:
    served = serve_stored(store=tmp_path / "responses.db", automatic=False)
    found: Json = {}

    async def scenario() -> None:
        found.update(await start(served))

    asyncio.run(scenario())  # the loop ends, and the task with it
    served.storage.close()
    again = serve_stored(store=tmp_path / "responses.db")
    response = get(again, found["id"]).json()
    assert response["status"] == "failed" and "stopped" in response["error"]["message"]  # type: ignore[index]


def test_files_of_others_are_refused(serve_stored: Serve, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("precious " * 200)
    for path, reason in ((tmp_path / "text", "not a database"), (tmp_path / "none" / "x", "No such file")):
        with pytest.raises(OptionError, match=f"--responses-store .*{reason}"):
            serve_stored(store=path)
    assert (tmp_path / "text").read_text() == "precious " * 200


BAD: list[tuple[Json, int, str]] = [
    ({"background": True, "store": False}, 400, "background: true needs store"),
    ({"previous_response_id": "resp_none"}, 404, "resp_none"),
    ({"previous_response_id": 5}, 400, "previous_response_id"),
    ({"previous_response_id": "x" * 100_000}, 404, "is not stored"),
    ({"store": "yes"}, 400, "store"),
    ({"background": 1}, 400, "background"),
    ({"input": [{"type": "item_reference"}]}, 400, "input[0]"),
    ({"input": [{"type": "item_reference", "id": 5}]}, 400, "input[0]"),
    ({"input": []}, 400, "input must not be empty"),
]


@pytest.mark.parametrize(("fields", "status", "message"), BAD, ids=range(len(BAD)))
def test_bad_requests(serve_stored: Serve, fields: Json, status: int, message: str) -> None:
    reply = serve_stored().post(PATH, {"input": "Hi", **fields})
    assert reply.status == status, reply.content
    assert message in reply.json()["error"]["message"]  # type: ignore[index]
