"""Hostile requests, from families: what is wrong with each, and the statuses that answer it.

Every request is a method, a path, headers and a body; `cases` gives them all, in the same order every time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CLIENT_ERROR = frozenset(range(400, 500))
MANY = 50_000


class Case(NamedTuple):
    name: str
    path: str
    body: bytes
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()
    statuses: frozenset[int] = CLIENT_ERROR


def cases() -> list[Case]:
    families = (numbers, types, texts, ids, sizes, costly, malformed, templates, routes, headers)
    return [case for family in families for case in family()]


def completion(name: str, **fields: object) -> Case:
    return Case(f"completion {name}", COMPLETIONS, json.dumps({"prompt": "x", "max_tokens": 1} | fields).encode())


def chat(name: str, **fields: object) -> Case:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | fields
    return Case(f"chat {name}", CHAT, json.dumps(body).encode())


NUMBERS = ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
NUMBERS += ("seed", "max_tokens", "min_tokens", "prompt_logprobs", "truncate_prompt_tokens", "priority")


def numbers() -> Iterator[Case]:
    """Not finite, enormous, out of range."""
    for name in NUMBERS:
        for value in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 400, "-" + "9" * 40):
            yield Case(f"{name}={value[:12]}", COMPLETIONS, f'{{"prompt": "x", "{name}": {value}}}'.encode())
    for name in ("logprobs", "prompt_logprobs"):
        yield completion(name, **{name: 10**6})
    yield completion("n", n=10**6)
    yield completion("choices", n=128, prompt=["x"] * 100)
    yield completion("bias", logit_bias={"5": 1000})
    yield Case("bias NaN", COMPLETIONS, b'{"prompt": "x", "logit_bias": {"5": NaN}}')
    yield completion("too long", max_tokens=10**6)


def types() -> Iterator[Case]:
    """A value of a type that the field does not have."""
    for name in (*NUMBERS, "stop", "stop_token_ids", "logit_bias", "stream", "bad_words", "model", "cache_salt"):
        for value in ({}, [[]], "\x00", True) if name != "stream" else ({}, [], "yes", 3):
            if (name, value) not in (("logit_bias", {}), ("stop", "\x00"), ("cache_salt", "\x00")):
                yield completion(f"{name}={value!r}", **{name: value})
    for value in (None, 3, {}, [], [None], [{}], [1.5], ["x", 3], [[1], "x"], [[]]):
        yield completion(f"prompt={value!r}", prompt=value)
        yield chat(f"messages={value!r}", messages=value)
    for value in ({"role": "user", "content": 3}, {"role": "wizard", "content": "x"}, {"content": "x"}, {"role": None}):
        yield chat(f"message {value!r}", messages=[value])
    for part in ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, {"type": "text"}, {}, 3):
        yield chat(f"part {part!r}", messages=[{"role": "user", "content": [part]}])
    for name in (
        "__proto__",
        "best_of",
        "suffix",
        "tools",
        "functions",
        "response_format",
        "guided_regex",
        "\x00",
        "a" * 9999,
    ):
        yield chat(f"field {name[:20]!r}", **{name: [{"type": "x"}]})


def texts() -> Iterator[Case]:
    """Not UTF-8, halves of characters."""
    for broken in (b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x80", b"\xe2\x82"):
        yield Case(f"bytes {broken!r}", COMPLETIONS, b'{"prompt": "' + broken + b'"}')
    for escape in ("\\ud800", "\\udfff\\ud800", "\\u12", "\\x41"):
        yield Case(f"escape {escape}", COMPLETIONS, f'{{"prompt": "{escape}"}}'.encode())
    yield completion("empty", prompt="")
    yield completion("empty stop", stop="")
    yield completion("empty bad word", bad_words=[""])
    yield completion("salt", cache_salt="x" * 10_000)
    yield completion("model", model="../../etc/passwd\r\nX-Injected: 1")


def ids() -> Iterator[Case]:
    for value in (-1, 4096, 2**31, 2**63, 2**64, -(2**63)):
        yield completion(f"prompt id {value}", prompt=[value])
        yield completion(f"stop id {value}", stop_token_ids=[value])
        yield completion(f"allowed id {value}", allowed_token_ids=[value])
        yield completion(f"biased id {value}", logit_bias={str(value): 1})
        yield Case(f"detokenize {value}", "/detokenize", json.dumps({"tokens": [value]}).encode())


def sizes() -> Iterator[Case]:
    """Too much of something: refused by a limit, before it costs anything."""
    yield completion("prompt", prompt="x" * 10_000_000)
    yield completion("words", prompt="word " * 200_000)
    yield completion("ids", prompt=[5] * 500_000)
    yield completion("prompts", prompt=["x"] * MANY)
    yield completion("stops", stop=["x"] * MANY)
    yield completion("stop", stop="x" * 10**6)
    yield completion("stop ids", stop_token_ids=[1] * MANY)
    yield completion("bad words", bad_words=["x" * 100] * MANY)
    yield completion("biases", logit_bias={str(number): 1 for number in range(MANY)})
    yield completion("allowed", allowed_token_ids=[1] * MANY)
    yield completion("metadata", metadata={"x": [1] * 10}, prompt=[])
    yield chat("messages", messages=[{"role": "user", "content": "x"}] * MANY)
    yield chat("parts", messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * MANY}])
    yield chat("kwargs", chat_template_kwargs={"x": "y" * 10**6}, messages=[])
    yield Case("body", COMPLETIONS, b" " * (17 * 2**20))
    yield Case("values", COMPLETIONS, b'{"prompt": [' + b"1," * 2_000_000 + b"1]}")
    yield Case("tokenize", "/tokenize", json.dumps({"prompt": 3, "x": "y" * 10**6}).encode())


def costly() -> Iterator[Case]:
    """Within the limits, and much work: it must not stall others."""
    found = [
        completion("bad words", n=16, max_tokens=20, bad_words=[f"{number} " * 200 for number in range(256)]),
        completion("biases", n=64, max_tokens=5, logit_bias={str(number): 1 for number in range(4096)}),
        completion("logprobs", n=32, max_tokens=100, logprobs=20, ignore_eos=True),
        completion("prompt logprobs", prompt=[[number + 5] * 1000 for number in range(8)], prompt_logprobs=20),
        completion("echo", prompt=[[number + 5] * 1000 for number in range(8)], logprobs=20, echo=True),
        completion("choices", n=128, prompt=["x"] * 8, stream=True),
        chat("top logprobs", n=32, max_tokens=100, logprobs=True, top_logprobs=20),
    ]
    found.append(Case("tokens", "/tokenize", json.dumps({"prompt": "word and word " * 40_000}).encode()))
    found.append(Case("text", "/detokenize", json.dumps({"tokens": [300] * 500_000}).encode()))
    for case in found:
        yield case._replace(statuses=CLIENT_ERROR | {200})
    yield completion("all logprobs", n=128, prompt=["x"] * 16, max_tokens=2000, logprobs=20)
    yield completion("all bad words", n=128, bad_words=[f"{number} " * 200 for number in range(256)])


def malformed() -> Iterator[Case]:
    bodies = [
        b"",
        b"null",
        b"[]",
        b"3",
        b'"x"',
        b"{",
        b'{"prompt"',
        b'{"prompt": "x"}}',
        b"{'prompt': 'x'}",
        b"\x00" * 9,
    ]
    bodies += [b"\xef\xbb\xbf{}", b"PK\x03\x04", b"--x\r\nContent-Disposition: form-data\r\n\r\n", b"prompt=x", b"<a/>"]
    for depth in (100, 1000, 100_000):
        bodies.append(b'{"metadata": ' + b"[" * depth + b"]" * depth + b', "prompt": "x"}')
        bodies.append(b'{"a":' * depth + b"1" + b"}" * depth)
    for number, body in enumerate(bodies):
        for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
            yield Case(f"malformed {number} {path}", path, body)


BOMBS = (
    "{% for a in range(100000) %}{% for b in range(100000) %}{% set x = a * b %}{% endfor %}{% endfor %}",
    "{% for a in range(100000) %}{{ 'x' * 100000 }}{% endfor %}",
    "{{ 'x' * 10 ** 11 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{{ messages.__class__ }}{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception('no') }}",
    "{% for",
)


def templates() -> Iterator[Case]:
    for number, source in enumerate(BOMBS):
        yield chat(f"template {number}", chat_template=source)


def routes() -> Iterator[Case]:
    for path in (
        "/v1/../etc/passwd",
        "/%2e%2e/%2e%2e",
        "/v1/models/../../x",
        "/\x7f",
        "//",
        "/v1/completions/",
        "/admin",
    ):
        yield Case(f"path {path!r}", path, b"", "GET")
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        yield Case(method, COMPLETIONS, b"", method)


def headers() -> Iterator[Case]:
    good = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    for value in ("x", "-1", "0", "nan", "1e400", "9" * 50):
        yield Case(f"timeout {value[:9]}", COMPLETIONS, good, headers=(("X-Request-Timeout", value),))
    for name, value in (
        ("X-Long", "x" * 100_000),
        ("Content-Length", "-1"),
        ("Content-Length", "x"),
        ("X-Bad", "a\x00b"),
    ):
        yield Case(f"header {name}={value[:9]!r}", COMPLETIONS, good, headers=((name, value),))
    yield Case("two lengths", COMPLETIONS, good, headers=(("Content-Length", "5"), ("Content-Length", "50")))
    yield Case("smuggled", COMPLETIONS, good, headers=(("Transfer-Encoding", "chunked"), ("Content-Length", "5")))
