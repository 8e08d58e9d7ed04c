"""Whole numbers written as floats, as some JSON libraries write all numbers."""

from __future__ import annotations

from typing import Any

import pytest

from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.schema.chat import ChatRequest
from serve_llm.server.schema.common import validate_body
from serve_llm.server.schema.completions import CompletionRequest
from serve_llm.server.schema.pooling import EmbeddingRequest
from serve_llm.server.schema.tokenize import DetokenizeRequest
from support.serving import Served

TALK = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 2.0, "n": 2.0, "seed": 7.0, "stop_token_ids": [3.0, 4.0]}),
        ("/v1/completions", {"prompt": [[5.0, 6], [7.0]], "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": TALK, "max_tokens": 2.0, "logprobs": True, "top_logprobs": 1.0}),
        ("/v1/messages", {"messages": TALK, "max_tokens": 2.0, "top_k": 5.0}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2.0}),
        ("/detokenize", {"tokens": [5.0, 6.0]}),
    ],
    ids=str,
)
def test_they_are_read(served: Served, path: str, body: dict[str, Any]) -> None:
    reply = served.post(path, body)
    assert reply.status == 200, reply.content


def test_they_become_whole() -> None:
    nested = {"max_pattern_size": 3.0, "min_count": 2.0}
    body = validate_body(CompletionRequest, {"prompt": [[5.0], [6]], "seed": 1e3, "repetition_detection": nested})
    assert (body.prompt, body.seed) == ([[5], [6]], 1000) and type(body.seed) is int
    assert body.repetition_detection is not None and body.repetition_detection.max_pattern_size == 3
    assert validate_body(EmbeddingRequest, {"input": [1.0, 2.0]}).input == [1, 2]
    assert validate_body(DetokenizeRequest, {"tokens": [1.0] * 10_000}).tokens == [1] * 10_000


def test_schemas_stay_as_they_are() -> None:
    parameters = {"type": "object", "properties": {"a": {"const": 1.0}}}
    function = {"name": "f", "parameters": parameters}
    body = validate_body(ChatRequest, {"messages": TALK, "n": 1.0, "tools": [{"function": function}]})
    assert body.tools is not None and body.tools[0].function is not None
    assert repr(body.tools[0].function.parameters) == repr(parameters)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": "2.0"}, "max_tokens"),
        ({"max_tokens": 2.0, "seed": True}, "seed"),
        ({"prompt": [1.0, 1.5]}, "prompt"),
        ({"prompt": [1.0, "a"]}, "prompt"),
    ],
    ids=str,
)
def test_other_numbers_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        validate_body(CompletionRequest, {"prompt": "x", **fields})
    assert error.value.param == param


def test_large_ones_are_out_of_range(served: Served) -> None:
    reply = served.complete(max_tokens=1e300)
    assert reply.status == 400 and reply.json()["error"]["message"].startswith("max_tokens must be at least 0")
