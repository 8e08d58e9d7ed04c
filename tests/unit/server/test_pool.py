"""Large and untrusted requests are parsed in processes that can be killed; limits on requests."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from serve_llm.common.options.limits import Limits
from serve_llm.common.options.sources import make_options
from serve_llm.server.http.errors import DeadlineExceeded, InvalidRequest, Unavailable
from serve_llm.server.prompt.jobs import JobContext
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pool import SMALL_BYTES, PromptPool
from serve_llm.server.prompt.text_jobs import TokenizeResult
from support.fakes import make_model_info
from support.matrix import mostly_slow
from support.serving import Served

Serve = Callable[..., Served]
ALLOWED = {"trust_request_chat_template": True, "limit": ("prompt-seconds=1", "template-characters=1000")}


@pytest.fixture
def pool(model: ServedModel) -> Iterator[PromptPool]:
    options = make_options("demo", limit=("prompt-seconds=1",))
    made = PromptPool(JobContext(model, make_model_info(), options.limits), options)
    yield made
    made.close()


@pytest.fixture
def alone(pool: PromptPool) -> PromptPool:
    """Limit the pool to one process: a job that arrives before the first thread is idle would otherwise start another
    one."""
    pool._size = 1
    return pool


def large(text: str = "x") -> bytes:
    return b'{"prompt": "' + text.encode() * SMALL_BYTES + b'"}'


def test_a_worker_returns_what_this_process_returns(alone: PromptPool, model: ServedModel) -> None:
    made = asyncio.run(alone.run("tokenize", large(), TokenizeResult))
    assert made.ids == model.tokenizer.encode("x" * SMALL_BYTES, add_special_tokens=True)
    (worker,) = alone._workers
    again = asyncio.run(alone.run("tokenize", large(), TokenizeResult))
    assert again == made and alone._workers == {worker}, "the same process"


def test_errors_come_back_as_they_are(pool: PromptPool) -> None:
    with pytest.raises(InvalidRequest, match="unknown field x") as caught:
        asyncio.run(pool.run("tokenize", b'{"x": "' + b"y" * SMALL_BYTES + b'"}', TokenizeResult))
    assert caught.value.param == "x"


@pytest.mark.parametrize("number", mostly_slow([signal.SIGKILL, signal.SIGSTOP], [signal.SIGKILL]))
def test_a_process_that_dies_or_hangs_is_replaced(alone: PromptPool, number: signal.Signals) -> None:
    asyncio.run(alone.run("tokenize", large(), TokenizeResult))
    (worker,) = alone._workers
    os.kill(worker._process.pid, number)
    if number == signal.SIGKILL:
        worker._process.wait()
    else:
        began = time.monotonic()
        with pytest.raises(InvalidRequest, match="more than 1 s"):
            asyncio.run(alone.run("tokenize", large(), TokenizeResult))
        assert time.monotonic() - began < 30
    assert asyncio.run(alone.run("tokenize", large(), TokenizeResult)).ids


def test_a_process_that_cannot_be_launched_is_not_the_clients_fault(
    alone: PromptPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as broken:
        broken.setattr(subprocess, "Popen", fail)
        with pytest.raises(Unavailable, match="cannot be launched: Too many open files"):
            asyncio.run(alone.run("tokenize", large(), TokenizeResult))
    assert asyncio.run(alone.run("tokenize", large(), TokenizeResult)).ids, "the next request tries again"


def test_a_bug_in_a_worker_is_not_the_clients_fault(pool: PromptPool) -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'nonsense'"):
        asyncio.run(pool.run("nonsense", large(), TokenizeResult))


def test_a_crowd_is_refused_and_deadlines_hold(pool: PromptPool) -> None:
    async def crowd() -> list[object]:
        jobs = (pool.run("tokenize", large(), TokenizeResult, time.perf_counter() - 1) for _ in range(5))
        return await asyncio.gather(*jobs, return_exceptions=True)

    pool._job_seconds = 30.0  # as after many malicious requests
    *late, refused = asyncio.run(crowd())
    assert [type(one) for one in late] == [DeadlineExceeded] * 4
    assert isinstance(refused, Unavailable) and refused.retry_after == 40
    assert asyncio.run(pool.run("tokenize", large(), TokenizeResult)).ids


def test_small_requests_start_no_process(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_llm.server.prompt.pool.PromptWorker", None)
    assert served.complete(prompt="x" * 2000).status == 200


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}",
            "more than 1 s",
        ),
        pytest.param("{{ 9 ** (9 ** 9) }}", "more than 1 s", marks=pytest.mark.slow),
        ("{{ 'x' * 10 ** 11 }}", "MemoryError"),
        ("{% for a in range(99999) %}{{ a }}{% endfor %}", "more than 1000 characters"),
        ("{% for", "not valid Jinja"),
    ],
)
def test_a_hostile_template_fails_only_its_request(serve: Serve, template: str, problem: str) -> None:
    served = serve(options=ALLOWED)
    began = time.monotonic()
    reply = served.chat(chat_template=template)
    assert reply.status == 400 and problem in reply.json()["error"]["message"], reply.content
    assert time.monotonic() - began < 30
    fine = served.chat(chat_template="{{ messages[0].content }}!", max_tokens=1)
    assert fine.status == 200 and served.engine.submitted[-1].prompt_ids == served.ids("hi!")


def test_templates_in_requests_need_an_option(served: Served) -> None:
    reply = served.chat(chat_template="x")
    assert reply.status == 400 and "--trust-request-chat-template" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "chat_template"


@pytest.mark.parametrize(
    ("limit", "path", "fine", "refused", "param"),
    [
        ("n=2", "completions", {"n": 2}, {"n": 3}, "n"),
        ("choices=3", "completions", {"prompt": ["a"] * 3}, {"prompt": ["a", "b"], "n": 2}, "prompt"),
        ("prompts=2", "completions", {"prompt": ["a"] * 2}, {"prompt": ["a"] * 3}, "prompt"),
        ("prompt-tokens=4", "completions", {"prompt": [5, 6], "n": 2}, {"prompt": [5] * 5}, "prompt"),
        ("stop-strings=1", "completions", {"stop": ["q"]}, {"stop": ["q", "w"]}, "stop"),
        ("stop-characters=3", "completions", {"stop": "qqq"}, {"stop": "qqqq"}, "stop"),
        ("bad-words=1", "completions", {"bad_words": ["q"]}, {"bad_words": ["q", "w"]}, "bad_words"),
        ("logit-bias=1", "completions", {"logit_bias": {"1": 1}}, {"logit_bias": {"1": 1, "2": 1}}, "logit_bias"),
        ("messages=1", "chat/completions", {}, {"messages": [{"role": "user", "content": "x"}] * 2}, "messages"),
        (
            "template-characters=90",
            "chat/completions",
            {},
            {"messages": [{"role": "user", "content": "x" * 90}]},
            "messages",
        ),
        ("json-depth=3", "completions", {"metadata": [[]]}, {"metadata": [[[]]]}, None),
        ("json-values=50", "completions", {"prompt": [5] * 20}, {"prompt": [5] * 60}, None),
        ("body-bytes=100", "completions", {}, {"prompt": "x" * 100}, None),
        ("all-bodies-bytes=100", "completions", {}, {"prompt": "x" * 2**17}, None),
    ],
)
def test_limits(serve: Serve, limit: str, path: str, fine: object, refused: object, param: str | None) -> None:
    served = serve(options={"limit": limit})
    usual: dict[str, object] = {"max_tokens": 1}
    usual |= {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    assert served.post(f"/v1/{path}", usual | fine).status == 200
    reply = served.post(f"/v1/{path}", usual | refused)
    assert reply.status == {"body-bytes=100": 413, "json-values=50": 413, "all-bodies-bytes=100": 503}.get(limit, 400)
    assert reply.json()["error"]["param"] == param


def test_limits_are_parsed_and_named() -> None:
    assert Limits.parse(["n=4", "body-bytes=1MiB", "n=5"]) == Limits(n=5, body_bytes=2**20)
    for text, problem in (("x=1", "with one of the names header-bytes"), ("n", "NAME=VALUE"), ("n=0", "n: must be")):
        with pytest.raises(ValueError, match=problem):
            Limits.parse([text])
