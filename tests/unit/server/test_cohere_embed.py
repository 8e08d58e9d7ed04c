"""POST /v2/embed, Cohere's API for embeddings."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.server.response.vectors import pack_signs
from serve_llm.server.schema.cohere import CohereEmbedReply
from support.serving import Served
from support.vector_models import serve_embedder

Json = dict[str, Any]
Serve = Callable[..., Served]

PATH = "/v2/embed"


@pytest.fixture
def embedder(serve: Serve) -> Served:
    return serve_embedder(serve)


def read_error(served: Served, body: Json) -> Json:
    reply = served.post(PATH, body)
    assert reply.status == 400, reply.content
    return dict(reply.json()["error"])  # type: ignore[call-overload]


def test_vectors_in_each_form(embedder: Served) -> None:
    types = ["float", "base64", "binary", "ubinary", "float"]
    body = {"model": "demo", "texts": ["a", "b"], "input_type": "search_query", "embedding_types": types}
    reply = embedder.post(PATH, body)
    assert reply.status == 200 and reply.headers["x-ignored-fields"] == "input_type"
    found: Json = reply.json()  # type: ignore[assignment]
    CohereEmbedReply.model_validate_json(reply.content, strict=True)
    assert found["texts"] == ["a", "b"] and found["response_type"] == "embeddings_by_type"
    assert found["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 2}}
    forms = found["embeddings"]
    assert forms["float"] == [[1.0, 0.0, 0.0]] * 2
    assert forms["base64"] == [base64.b64encode(struct.pack("<3f", 1, 0, 0)).decode()] * 2
    assert forms["ubinary"] == [[128]] * 2 and forms["binary"] == [[0]] * 2


def test_signs_are_packed_from_the_highest_bit() -> None:
    assert pack_signs([-1.0, 0.5, 0.0, 2.0, -3.0, 0.1, -0.1, 7.0, 1.0]) == [0b01010101, 0b10000000]


def test_texts_as_inputs(embedder: Served) -> None:
    text = {"type": "text", "text": "a"}
    reply = embedder.post(PATH, {"inputs": [{"content": [text]}, {"content": [text, {"type": "text", "text": "b"}]}]})
    assert reply.status == 200 and reply.json()["texts"] == ["a", "a\nb"]
    assert read_error(embedder, {"inputs": [{"content": [text, {"type": "image_url"}]}]}) == {
        "message": "inputs[0].content[1]: content of type 'image_url' is not supported, only text",
        "type": "invalid_request_error",
        "param": "inputs[0].content[1]",
        "code": "unsupported",
    }
    assert read_error(embedder, {"inputs": [{"content": [{"type": "text"}]}]})["param"] == "inputs[0].content[0].text"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, "first"),
        ({"truncate": "END"}, "first"),
        ({"truncate": "START"}, "last"),
        ({"max_tokens": 5}, "first"),
        ({"max_tokens": 5, "truncate": "START"}, "last"),
    ],
)
def test_long_texts_are_cut_unless_refused(embedder: Served, fields: Json, kept: str) -> None:
    text = " ".join(f"word{number}" for number in range(40))
    ids = embedder.model.tokenizer.encode(text, add_special_tokens=True)
    count = fields.get("max_tokens", 16)
    assert embedder.post(PATH, {"texts": [text], **fields}).status == 200
    expected = ids[:count] if kept == "first" else ids[-count:]
    assert list(embedder.engine.submitted[-1].prompt_ids) == expected


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "texts", None),
        ({"texts": []}, "texts", None),
        ({"texts": None, "inputs": []}, "inputs", None),
        ({"texts": ["a"], "inputs": [{"content": []}]}, "texts", None),
        ({"texts": ["a", "b " * 40], "truncate": "NONE"}, "texts", "context_length_exceeded"),
        ({"images": ["data:"]}, "images", "unsupported"),
        ({"texts": ["a"], "embedding_types": ["float", "int8"]}, "embedding_types[1]", "unsupported"),
        ({"texts": ["a"], "output_dimension": 2}, "output_dimension", "unsupported"),
        ({"texts": ["a"], "truncate": "end"}, "truncate", None),
        ({"texts": ["a"], "priority": 2**40}, "priority", None),
    ],
    ids=str,
)
def test_refusals(embedder: Served, body: Json, param: str, code: str | None) -> None:
    error = read_error(embedder, body)
    assert error["param"] == param and error["code"] == code


def test_unknown_fields_are_named(embedder: Served) -> None:
    reply = embedder.post(PATH, {"texts": ["a"], "zzz": 1, "images": None, "embedding_types": []})
    assert reply.status == 200 and reply.headers["x-ignored-fields"] == "zzz"
    assert list(reply.json()["embeddings"]) == ["float"]
