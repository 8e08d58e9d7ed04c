"""What all routes share: keys, ids, the format of errors, documentation; and routes that generate nothing."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from serve_llm.server.http.errors import ANSWERS, ServeError, Unavailable, answer_for, error_body
from serve_llm.server.http.startup_app import StartupApp
from support.asgi import Call, fetch
from support.fakes import make_model_info
from support.serving import TEXT, Served

Serve = Callable[..., Served]
KEYS = {"options": {"api_key": ("first", "second")}}


def routes(served: Served) -> set[tuple[str, str]]:
    """Return (method, path) of all routes, including documentation and routes hidden from the schema."""
    app: Any = served.app
    while not isinstance(app, FastAPI):  # middleware in front of it
        app = app.app
    return {(method, route.path) for route in leaves(app.routes) for method in route.methods or ()}


def leaves(table: Iterable[object]) -> Iterator[Route]:
    """Yield the routes of a table, and of the routers in it."""
    for entry in table:
        router = getattr(entry, "original_router", entry)
        if hasattr(router, "routes"):
            yield from leaves(router.routes)
        else:
            assert isinstance(entry, Route), f"{entry}: no websocket, no other app"
            yield entry


def test_no_route_changes_the_servers_state(served: Served) -> None:
    """Such a route would need a key of its own, for administrators."""
    changing = {path for method, path in routes(served) if method not in ("GET", "HEAD")}
    vectors = {
        "/v1/embeddings",
        "/v1/rerank",
        "/rerank",
        "/v2/rerank",
        "/v2/embed",
        "/v1/score",
        "/score",
        "/classify",
        "/pooling",
    }
    texts = {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/infill", "/invocations"}
    translated = {"/v1/messages", "/v1/messages/count_tokens"}
    translated |= {f"/v1/responses{end}" for end in ("", "/input_tokens", "/compact")}
    assert changing == texts | translated | vectors | {"/v1/decisions", "/ping"}


def test_the_route_that_scales(serve: Serve, served: Served) -> None:
    """It needs an administrator's key: test_scaling.py."""
    added = routes(serve(options={"data_parallel_max": 2})) - routes(served)
    assert added == {("POST", "/scale")}


def test_routes_that_load_adapters(serve: Serve, served: Served) -> None:
    """They need an administrator's key: test_adapters.py."""
    added = routes(serve(options={"enable_lora": True})) - routes(served)
    assert added == {("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter")}


def store_in(folder: Path) -> dict[str, object]:
    """Return the options that add routes."""
    return {"responses_store": "memory", "batches_dir": str(folder)}


def test_routes_that_store_are_those_of_a_keys_own_objects(serve: Serve, served: Served, tmp_path: Path) -> None:
    added = routes(serve(options=store_in(tmp_path))) - routes(served)
    response, batch, file = "/v1/responses/{response_id}", "/v1/batches/{batch_id}", "/v1/files/{file_id}"
    reading = {response, response + "/input_items", batch, file, file + "/content", "/v1/batches", "/v1/files"}
    writing = {response + "/cancel", batch + "/cancel", "/v1/batches", "/v1/files"}
    assert {path for method, path in added if method == "GET"} == reading
    assert {path for method, path in added if method == "POST"} == writing
    assert {path for method, path in added if method == "DELETE"} == {response, file}


@pytest.mark.parametrize("stores", [False, True])
def test_every_route_but_the_probes_and_the_page_needs_a_key(serve: Serve, tmp_path: Path, stores: bool) -> None:
    served = serve(options=KEYS["options"] | (store_in(tmp_path) if stores else {}))
    table = routes(served)
    assert stores == any("{batch_id}" in path for _, path in table)
    assert {"/v1/completions", "/metrics", "/status", "/health", "/docs"} <= {path for _, path in table}
    found = sorted((method, re.sub(r"{[^}]*}", "x", path)) for method, path in table if method != "HEAD")
    for method, path in [*found, ("GET", "/nowhere"), ("GET", "/health/"), ("GET", "//health"), ("GET", "/models/")]:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "first"}, {"x-api-key": "wrong"}):
            reply = served.get(path, headers) if method == "GET" else served.post(path, {}, headers)
            if path in ("/health", "/ping", "/ready", "/health/", "/", "/docs") or path.startswith("/web_ui/"):
                assert reply.status == (307 if path == "/docs" else 200)
            else:
                assert reply.status == 401, (method, path, headers)
                error = reply.json()["error"]
                assert "invalid_api_key" in error.values() or error["type"] == "authentication_error"
                assert reply.headers["www-authenticate"] == "Bearer" and reply.headers["x-request-id"]
        for headers in ({"authorization": "bearer first"}, {"authorization": "bearer second"}, {"x-api-key": "second"}):
            reply = served.get(path, headers) if method == "GET" else served.post(path, {}, headers)
            assert reply.status != 401


def test_scripts_of_web_pages_may_call_only_if_asked_for(serve: Serve) -> None:
    page = {"origin": "https://chat.example.com"}
    asking = page | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    closed, opened = serve(**KEYS), serve(options=KEYS["options"] | {"allowed_origins": page["origin"]})

    def said(served: Served, method: str, headers: dict[str, str]) -> tuple[int, str | None, bool]:
        reply = fetch(served.app, method, "/v1/completions", None, headers)
        return reply.status, reply.headers.get("access-control-allow-origin"), "vary" in reply.headers

    assert said(closed, "OPTIONS", asking) == (401, None, False) == said(closed, "POST", page)
    assert said(opened, "OPTIONS", asking) == (200, page["origin"], True)
    assert said(opened, "POST", page) == (401, page["origin"], True), "asking is free, computing is not"
    assert said(opened, "OPTIONS", asking | {"origin": "https://evil.example.com"})[:2] == (400, None)


def test_without_keys_everything_is_open(served: Served) -> None:
    assert served.get("/v1/models").status == 200


def test_the_page_is_there_before_the_server_is_ready() -> None:
    startup = StartupApp(with_page=True)
    page = fetch(startup, "GET", "/")
    assert page.status == 200 and "script-src 'self'" in page.headers["content-security-policy"]
    assert fetch(startup, "GET", "/web_ui/main.js").headers["content-type"].startswith("text/javascript")
    assert fetch(startup, "GET", "/health").status == 200 and fetch(startup, "GET", "/status").status == 503
    assert fetch(StartupApp(with_page=False), "GET", "/").status == 503


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "\u00e9"])
def test_a_request_id_that_does_not_fit_is_replaced(served: Served, given: str) -> None:
    first, second = (served.get("/health", {"x-request-id": given}).headers["x-request-id"] for _ in range(2))
    assert first != second and given not in (first, second) and len(first) == 32


def test_a_request_id_comes_back_with_every_answer(served: Served) -> None:
    mine = {"x-request-id": "mine-1"}
    for reply in (served.get("/nowhere", mine), served.post("/v1/completions", b"{", mine), served.get("/docs", mine)):
        assert reply.headers["x-request-id"] == "mine-1"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nowhere", 404), ("GET", "/v1/completions", 405)])
def test_the_routers_refusals_have_the_errors_shape(served: Served, method: str, path: str, status: int) -> None:
    reply = served.get(path)
    assert reply.status == status and set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert path in reply.json()["error"]["message"]
    assert status != 405 or reply.headers["allow"] == "POST"


def test_a_bug_of_ours_is_no_traceback_for_the_client(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(served.engine, "submit_many", broken)

    async def call() -> Call:
        call = Call(served.app, "POST", "/v1/completions", {"prompt": "x"}, {"x-request-id": "mine"})
        with pytest.raises(ZeroDivisionError):  # raised again for the server's log
            await call.finished
        return call

    made = asyncio.run(call())
    assert made.sent[0]["status"] == 500
    assert (b"x-request-id", b"mine") in made.sent[0]["headers"]
    assert b"secret" not in made.sent[1]["body"] and b"internal error" in made.sent[1]["body"]


def test_plain_routes_are_called_without_fastapi(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise AssertionError("FastAPI was called")

    monkeypatch.setattr(FastAPI, "__call__", refuse)
    assert served.complete(max_tokens=1).status == 200
    assert served.complete(max_tokens=-1).status == 400
    with pytest.raises(AssertionError):
        served.get("/v1/completions")


def test_models(serve: Serve) -> None:
    served = serve(model_info=make_model_info(max_model_len=77))
    found = served.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["max_model_len"]) for card in found] == [("demo", "demo", 77)]
    created = datetime.fromisoformat(found[0]["created_at"])
    assert created.timestamp() == found[0]["created"] and found[0]["display_name"] == "demo"
    assert served.get("/v1/models/demo").json() == found[0]
    missing = served.get("/v1/models/org/name")
    assert (missing.status, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_probes_tell_life_from_readiness(served: Served) -> None:
    assert served.get("/health").status == served.get("/ready").status == 200
    served.engine.ready = False
    assert served.get("/health").status == served.get("/ping").status == served.post("/ping", {}).status == 200
    reply = served.get("/ready")
    assert reply.status == 503 and reply.headers["retry-after"]
    reply = served.complete()
    assert reply.status == 503 and reply.headers["retry-after"] and reply.json()["error"]["code"] == "unavailable"
    assert served.get("/v1/models").status == 200


def test_draining_refuses_new_requests(served: Served) -> None:
    served.admission.draining = True
    for reply in (served.complete(), served.chat(), served.get("/ready"), served.post("/tokenize", {"prompt": "x"})):
        assert reply.status == 503 and reply.headers["retry-after"]
    assert served.get("/health").status == 200


def test_status_says_what_the_server_does(serve: Serve) -> None:
    served = serve(automatic=False, options={"max_queue": "7,900", "tensor_parallel_size": 2})
    served.engine.stats.num_running = 3
    found = served.get("/status").json()
    assert found["phase"] == "serving" and found["restarts"] == 0 and found["first_cause"] is None
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    assert found["parallel"] == {"executor": "inprocess", **sizes}
    assert found["engines"][0]["num_ranks"] == 2 and found["engines"][0]["num_running"] == 3
    assert found["engines"][0]["kv_cache"] == {"tokens": 4096, "blocks": 256, "usage": 0.0}
    assert found["queue"]["max_requests"] == 7 and found["queue"]["refused"]["queue_full"] == 0
    assert set(found["versions"]) == {"serve-llm", "python", "torch"} and found["recent_restarts"] == []
    assert found["engines"][0]["ranks"] == [{"rank": 0, "tp_rank": 0, "pp_rank": 0, "host": "host-a"}]
    served.engine.ready = False
    assert served.get("/status").json()["phase"] == "recovering" and served.complete().status == 503
    served.admission.draining = True
    served.get("/ready")
    found = served.get("/status").json()
    assert found["phase"] == "draining" and found["queue"]["refused"]["not_ready"] == 1, "probes do not count"


def test_the_uptime_does_not_follow_a_clock_that_is_set_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= served.get("/status").json()["uptime_seconds"] < 3600


def test_a_slash_at_the_end_does_not_count(served: Served) -> None:
    for path in ("/health", "/v1/models", "/v1/models/demo"):
        assert served.get(path + "/").content == served.get(path).content != b""
    assert served.post("/v1/completions/", {"prompt": "x", "max_tokens": 1}).status == 200
    assert served.post("/v1/messages/", {"max_tokens": 1, "messages": []}).json()["type"] == "error"
    assert served.get("/health//").status == served.get("//").status == served.get("///").status == 404


def test_head_is_get_without_the_body(served: Served) -> None:
    for path in ("/health", "/v1/models", "/ready/", "/openapi.json", "/nowhere", "/"):
        head, whole = fetch(served.app, "HEAD", path), served.get(path)
        assert (head.status, head.content) == (whole.status, b"")
        assert head.headers["content-length"] == str(len(whole.content))
    assert fetch(served.app, "HEAD", "/v1/completions").status == 405


def test_version(served: Served) -> None:
    assert served.get("/version").json()["version"].count(".") >= 1


def test_tokenize_and_detokenize(served: Served) -> None:
    found = served.post("/tokenize", {"prompt": TEXT, "return_token_strs": True}).json()
    assert found["tokens"] == served.ids(TEXT) and found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 2048 and len(found["token_strs"]) == found["count"]
    assert served.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": TEXT}
    chat = served.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["token_strs"] is None
    emoji = served.post("/tokenize", {"prompt": "a\U0001f600", "return_token_strs": True}).json()["token_strs"]
    assert len(set(emoji)) == len(emoji) and not any("\ufffd" in token for token in emoji), "bytes can be told apart"
    served.chat(max_tokens=1)
    assert chat["tokens"] == served.engine.submitted[-1].prompt_ids


def test_tokenizer_info_is_what_lm_eval_looks_up(served: Served) -> None:
    found = served.get("/tokenizer_info").json()
    assert found["eos_token"] in served.model.tokenizer.added_tokens and found["model_max_length"] == 2048
    assert "message" in found["chat_template"] and found["added_tokens"]["<|end|>"] == served.ids("<|end|>")[0]
    assert set(found) >= {"tokenizer_class"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "model": "y"}, "model"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_bad_bodies_of_the_tokenizer_routes(served: Served, path: str, body: object, param: str) -> None:
    reply = served.post(path, body)
    assert reply.status in (400, 404) and reply.json()["error"]["param"] == param


def test_the_documentation_describes_the_real_bodies(served: Served) -> None:
    found = served.get("/openapi.json").json()
    schemas = found["components"]["schemas"]
    body = found["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/CompletionRequest"}
    temperature = schemas["CompletionRequest"]["properties"]["temperature"]
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
    assert schemas["CompletionRequest"]["additionalProperties"] is False
    answers = found["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert answers["200"]["content"]["text/event-stream"]["schema"] == {"$ref": "#/components/schemas/ChatEvent"}
    assert set(answers) == {"200", "400", "401", "404", "408", "413", "415", "500", "503", "504"}
    referred = set(_references(found))
    assert referred and referred <= {f"#/components/schemas/{name}" for name in schemas}
    assert served.get("/docs").headers["location"] == "./#api"


def test_the_documentation_names_every_status(serve: Serve, tmp_path: Path) -> None:
    found = serve(options=store_in(tmp_path) | {"data_parallel_max": 2}).get("/openapi.json").json()
    described = {
        status for methods in found["paths"].values() for route in methods.values() for status in route["responses"]
    }
    before_routes = {405, 431}
    assert {str(answer.status) for answer in ANSWERS.values() if answer.status not in before_routes} <= described
    assert "507" in found["paths"]["/v1/files"]["post"]["responses"]


def _references(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in _references(value)]
    return [found for value in node for found in _references(value)] if isinstance(node, list) else []


def test_every_error_has_an_answer() -> None:
    pending, kinds = [ServeError], []
    while pending:
        kind = pending.pop()
        kinds.append(kind)
        pending += kind.__subclasses__()
    assert len(kinds) > 15
    for kind in kinds:
        assert answer_for(kind("x")).status >= 400
    assert answer_for(Unavailable("x", retry_after=7)).headers == {"retry-after": "7"}
    assert error_body(Unavailable("gone")) == (
        b'{"error":{"message":"gone","type":"server_error","param":null,"code":"unavailable"}}'
    )


def test_an_error_quotes_no_megabytes(served: Served) -> None:
    for body in (
        {"x" * 10**6: 1},
        {"prompt": "x", "model": "y" * 10**6},
        b'{"prompt": "x", "seed": 1%s}' % (b"0" * 4000),
    ):
        reply = served.post("/v1/completions", body)
        assert reply.status in (400, 404) and len(reply.content) < 2000


def test_the_log_has_the_request_but_no_text(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "serve_llm")
    served.complete(prompt="a secret prompt")
    assert any("/v1/completions" in record.getMessage() for record in caplog.records)
    assert "secret" not in caplog.text
    assert all(record.levelno == logging.DEBUG for record in caplog.records)


def test_the_server_process_imports_no_torch() -> None:
    program = (
        "import sys, serve_llm.server.app, serve_llm.server.prompt.model\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
