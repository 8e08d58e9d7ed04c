"""Hostile requests, in families: what is wrong with each, and the allowed statuses of the reply.

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
    families = (
        numbers,
        types,
        small_fields,
        texts,
        ids,
        sizes,
        costly,
        malformed,
        templates,
        routes,
        headers,
        vectors,
        stored,
    )
    return [case for family in families for case in family()]


def completion(name: str, **fields: object) -> Case:
    return Case(f"completion {name}", COMPLETIONS, json.dumps({"prompt": "x", "max_tokens": 1} | fields).encode())


def decisions(name: str, **fields: object) -> Case:
    return Case(f"decisions {name}", "/v1/decisions", json.dumps({"input": "x"} | fields).encode())


def chat(name: str, **fields: object) -> Case:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | fields
    return Case(f"chat {name}", CHAT, json.dumps(body).encode())


NUMBERS = ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
NUMBERS += ("seed", "max_tokens", "min_tokens", "prompt_logprobs", "truncate_prompt_tokens", "priority")


def numbers() -> Iterator[Case]:
    """Yield numbers that are not finite, enormous, or out of range."""
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
    """Yield values of the wrong type."""
    for name in (*NUMBERS, "stop", "stop_token_ids", "logit_bias", "stream", "bad_words", "model", "cache_salt"):
        for value in ({}, [[]], "\x00", True) if name != "stream" else ({}, [], "yes", 3):
            if (name, value) not in (("logit_bias", {}), ("stop", "\x00"), ("cache_salt", "\x00")):
                yield completion(f"{name}={value!r}", **{name: value})
    for value in (None, 3, {}, [], [None], [{}], [1.5], ["x", 3], [[1], "x"], [[]]):
        yield completion(f"prompt={value!r}", prompt=value)
        yield chat(f"messages={value!r}", messages=value)
    for value in (
        {"role": "user", "content": 3},
        {"role": "wizard<|end|>", "content": "x"},
        {"content": "x"},
        {"role": None},
    ):
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


def small_fields() -> Iterator[Case]:
    """Yield rarely used fields."""
    detection = {"max_pattern_size": 2, "min_count": 2}
    for name, value in (("max_pattern_size", 10**9), ("min_pattern_size", -1), ("min_count", 10**30), ("x", 1)):
        yield completion(f"repetition {name}", repetition_detection=detection | {name: value})
    for value in ([], "x", {}, {"max_pattern_size": {}}):
        yield completion(f"repetition {value!r}", repetition_detection=value)
    for name in ("return_metrics", "return_tokens_as_token_ids", "echo"):
        yield chat(f"{name} as text", **{name: "true"})
    for value in ([-1], [10**9], list(range(129)), [10**30], "x", [[]], [0] * MANY, {}):
        yield completion(f"asked ids {value!r}"[:40], logprob_token_ids=value, logprobs=1)
        yield chat(f"asked ids {value!r}"[:40], logprob_token_ids=value, logprobs=True)
    for value in (
        [],
        [{}],
        [{"type": "x"}],
        [{"type": "choice", "instructions": "x", "choices": [{"value": "x"}] * MANY}],
        "x",
    ):
        yield decisions(f"{value!r}"[:30], questions=value)
    predicate = {"type": "predicate", "instructions": "x"}
    yield decisions("many", questions=[predicate] * MANY)
    yield decisions("long", questions=[predicate], input="x" * 10**7)
    for value in ("x" * 10**6, "a\r\nX-Injected: 1", "\x00", 3):
        yield completion(f"request id {value!r}"[:40], request_id=value)
    for value in ("x", "x" * 10**7, ["x"] * MANY, {}):
        yield completion(f"suffix {value!r}"[:40], suffix=value)
    for value in ("x", {}, [3], [{"text": "x"}], [{"text": "x" * 10**6}] * 20):
        yield chat(f"documents {value!r}"[:40], documents=value)
    for value in ({"effort": "x"}, {"effort": "low"} | {f"x{number}": 1 for number in range(MANY)}, [], "high"):
        yield chat(f"reasoning {value!r}"[:40], reasoning=value)
    for name in ("typical_p", "use_beam_search", "logits_processors", "modalities", "guided_regex", "best_of"):
        for value in ("x" * 10**6, [[[]]] * MANY, {"a": {"b": {}}}, -1):
            yield completion(f"{name} {value!r}"[:40], **{name: value})
    for name, value in (("max_new_tokens", 10**9), ("n_predict", -1), ("rep_pen", 1e999), ("stopping_strings", [3])):
        yield completion(f"{name}", **{name: value})
    for body in (
        b"{",
        b"[]",
        b'{"input_extra": [{}]}',
        b'{"n_predict": 1e999}',
        b'{"input_prefix": "' + b"x" * 10**7 + b'"}',
    ):
        yield Case(f"infill {body[:20]!r}", "/infill", body)
    for body in (b"{", b"[]", b"{}", b'{"messages": 3}', b'{"prompt": ' + b"[" * 9999, b'{"input": {}}'):
        yield Case(f"invocation {body[:20]!r}", "/invocations", body)


def texts() -> Iterator[Case]:
    """Yield invalid UTF-8 and incomplete characters."""
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
    """Yield too much of something: a limit refuses it before it costs anything."""
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
    """Yield expensive requests within the limits, which must not stall others."""
    found = [
        completion("bad words", n=16, max_tokens=20, bad_words=[f"{number} " * 200 for number in range(256)]),
        completion("biases", n=64, max_tokens=5, logit_bias={str(number): 1 for number in range(4096)}),
        completion("logprobs", n=128, max_tokens=25, logprobs=20, ignore_eos=True),
        completion("prompt logprobs", prompt=[[number + 5] * 1000 for number in range(6)], prompt_logprobs=20),
        completion("echo", prompt=[[number + 5] * 1000 for number in range(3)], logprobs=20, echo=True),
        completion("choices", n=128, prompt=["x"] * 8, stream=True),
        chat("top logprobs", n=128, max_tokens=25, logprobs=True, top_logprobs=20),
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
    for value in ("x", "-1", "0", "nan", "-1e400"):
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


VECTORS: dict[str, dict[str, object]] = {
    "/v1/embeddings": {"input": "x"},
    "/pooling": {"input": "x"},
    "/classify": {"input": "x"},
    "/v1/score": {"queries": "x", "documents": ["y"]},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v2/rerank": {"query": "x", "documents": ["y"]},
}


def vectors() -> Iterator[Case]:
    """Yield requests to routes that return vectors. An embedding server also refuses valid requests to /classify, and a
    classifier also refuses valid requests to /v1/embeddings."""
    for path, good in VECTORS.items():
        text = next(reversed(good))
        wrong: list[dict[str, object]] = [
            {text: value}
            for value in (None, 5, {}, [], [[]], [None], ["x", 5], [5, "x"], [[5], "x"], [True], [1.5], [[["x"]]])
        ]
        wrong += [{text: [""] * 3}, {text: ["x"] * 3000}, {text: ["word " * MANY]}, {text: [-1]}, {text: [[2**63]]}]
        wrong += [{"truncate_prompt_tokens": value} for value in (0, -2, 2**63, "1", 1.5)]
        wrong += [{"truncation_side": "middle"}, {"add_special_tokens": "yes"}, {"priority": 2**40}, {"model": 5}]
        wrong += [{"temperature": 0.5}, {"nonsense": "x"}, {"model": "x" * MANY}]
        wrong += [{"cache_salt": ""}, {"cache_salt": "x" * MANY}, {"use_activation": "yes"}, {"padding": "longest"}]
        for number, changed in enumerate(wrong):
            yield Case(f"{path} {number}", path, json.dumps(good | changed).encode())
        for number, body in enumerate((b"", b"[]", b'{"input": NaN}', b'{"input": "\xff"}', b"[" * 1000)):
            yield Case(f"{path} malformed {number}", path, body)
    for value in (0, -1, 10**9, 1.5, "3", 2**63):
        yield Case(f"dimensions {value}", "/v1/embeddings", json.dumps({"input": "x", "dimensions": value}).encode())
    for value in ("hex", 5, ["float"], "FLOAT"):
        yield Case(f"format {value}", "/v1/embeddings", json.dumps({"input": "x", "encoding_format": value}).encode())
    for changed in (
        {"top_n": -1},
        {"top_n": 1.5},
        {"max_tokens_per_doc": 0},
        {"return_documents": 1},
        {"documents": [{"text": 5}]},
        {"documents": [{"image": "x"}]},
        {"instruction": 5},
        {"max_tokens_per_query": 0},
        {"use_activation": 1},
    ):
        body = {"query": "x", "documents": ["y"]} | changed
        yield Case(f"rerank {changed}", "/rerank", json.dumps(body).encode())
    long = json.dumps({"query": "x", "documents": ["y" * 10**6], "max_tokens_per_doc": 1}).encode()
    yield Case("rerank a long document that is cut", "/rerank", long, statuses=CLIENT_ERROR | {200})
    for body in ({"queries": ["x", "y"], "documents": ["z"] * 3}, {"text_1": "x"}, {"queries": "x", "text_2": "y"}):
        yield Case(f"score {sorted(body)}", "/score", json.dumps(body).encode())


def classifier_cases() -> list[Case]:
    """Return requests for a classifier, whose scores are those of pairs of texts."""
    pair: dict[str, object] = {"queries": "x", "documents": ["y"]}
    wrong: list[tuple[str, dict[str, object]]] = [("/classify", {"input": "x", "dimensions": 2})]
    for changed in (
        {"instruction": "word " * MANY},
        {"instruction": 5},
        {"queries": "word " * MANY},
        {"queries": ["x"] * 3000, "documents": ["y"] * 3000},
        {"documents": []},
        {"documents": [""], "queries": None},
        {"max_tokens_per_doc": -1},
        {"chat_template_kwargs": {"a": 1}},
    ):
        wrong.append(("/score", pair | changed))
    for task in ("embed", "token_classify", 5, "x" * MANY):
        wrong.append(("/pooling", {"input": "x", "task": task}))
    found = [Case(f"classifier {path} {n}", path, json.dumps(body).encode()) for n, (path, body) in enumerate(wrong)]
    for case in vectors():  # a pair with an empty text still has a prompt
        may_be_served = "classify" not in case.path and b'["", "", ""]' in case.body
        found.append(case._replace(statuses=case.statuses | {200}) if may_be_served else case)
    return found


RESPONSES = "/v1/responses"


def stored() -> Iterator[Case]:
    """Yield missing stored responses, impossible pages, and dangling references."""
    for name in (
        "resp_x",
        "%00",
        "%2e%2e%2f%2e%2e",
        "'%20OR%201=1--",
        "x" * 5000,
        "%ff",
        "\u00e9".encode().decode("latin-1"),
    ):
        for method, more in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
            yield Case(f"stored {method} {name[:12]!r}{more}", f"{RESPONSES}/{name}{more}", b"", method)
    for query in ("limit=0", "limit=-1", "limit=1e9", "order=x", "after=%00", "stream=maybe", "starting_after=-1"):
        yield Case(f"stored {query}", f"{RESPONSES}/resp_x/input_items?{query}", b"", "GET")
    wrong: list[dict[str, object]] = [
        {name: value}
        for name in ("previous_response_id", "background", "store")
        for value in ({}, [], 5, "resp_x", 1.5, "\x00")
    ]
    wrong += [{"background": True, "store": False}, {"previous_response_id": "x" * 10**6}]
    wrong += [{"input": [{"type": "item_reference", "id": value}]} for value in ("msg_x", 5, None, {}, "x" * MANY)]
    wrong += [{"input": [{"type": "item_reference", "id": str(number)} for number in range(MANY)]}]
    for number, changed in enumerate(wrong):
        yield Case(
            f"stored body {number}", RESPONSES, json.dumps({"input": "x", "max_output_tokens": 1} | changed).encode()
        )
