"""Request fields of the routes that return vectors: those of other servers, and unknown ones."""

from __future__ import annotations

import base64
import dataclasses
import math
from array import array
from collections.abc import Callable

import pytest

from serve_llm.server.prompt.model import ServedModel
from support.fakes import make_model_info
from support.serving import Served

Serve = Callable[..., Served]
EMBEDDER = {"generates": False, "pooling_task": "embed", "vector_size": 3}


def serve_vectors(serve: Serve, options: dict[str, object] | None = None) -> Served:
    return serve(script=lambda request: (0.6, 0.8, 0.0), model_info=make_model_info(**EMBEDDER), options=options)


def serve_classes(
    serve: Serve,
    logits: tuple[float, ...],
    served_model: ServedModel | None = None,
    options: dict[str, object] | None = None,
) -> Served:
    more = {} if served_model is None else {"served_model": served_model}
    changed = {"generates": False, "pooling_task": "classify", "vector_size": len(logits)}
    return serve(script=lambda request: logits, model_info=make_model_info(**changed), options=options, **more)


BODIES = {
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/score": {"queries": "a", "documents": "b"},
    "/v1/score": {"queries": "a", "documents": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("policy", ["refuse", "ignore"])
def test_unknown_fields(serve: Serve, path: str, policy: str) -> None:
    options = {"unknown_fields": policy}
    served = serve_classes(serve, (0.0,), options=options) if path == "/classify" else serve_vectors(serve, options)
    assert "x-ignored-fields" not in served.post(path, BODIES[path]).headers
    reply = served.post(path, BODIES[path] | {"nonsense": 1, "other": 2, "absent": None, "request_id": "mine"})
    if policy == "refuse":
        assert reply.status == 400 and reply.json()["error"]["param"] == "nonsense"
        return
    assert reply.status == 200 and reply.headers["x-ignored-fields"] == "nonsense, other"
    assert reply.json()["id"].endswith("-mine")
    metrics = served.get("/metrics").content.decode()
    assert f'ignored_fields_total{{model_name="demo",route="{path}"}} 2.0' in metrics


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_neutral_values_of_vectors(serve: Serve, path: str) -> None:
    served = serve_vectors(serve)
    for fields in ({"embed_dtype": "float32", "endianness": "native"}, {"endianness": "little"}, {"embed_dtype": None}):
        assert served.post(path, {"input": "a", **fields}).status == 200
    for name, value in (("embed_dtype", "float16"), ("endianness", "big")):
        error = served.post(path, {"input": "a", name: value}).json()["error"]
        assert error["code"] == "unsupported" and error["param"] == name


@pytest.mark.parametrize("path", BODIES)
def test_fields_of_peers(serve: Serve, path: str) -> None:
    served = serve_classes(serve, (0.0,)) if path == "/classify" else serve_vectors(serve)
    neutral = {"cache_salt": "s", "padding": "do_not_pad", "mm_processor_kwargs": {}, "media_io_kwargs": {}}
    assert served.post(path, BODIES[path] | neutral | {"use_activation": True}).status == 200
    assert {request.cache_salt for request in served.engine.submitted} == {"s"}
    for name, value in (("cache_salt", ""), ("padding", "max_length"), ("mm_processor_kwargs", {"a": 1})):
        assert served.post(path, BODIES[path] | {name: value}).json()["error"]["param"] == name


def test_fields_of_peers_without_effect_are_named(serve: Serve) -> None:
    served = serve_vectors(serve)
    reply = served.post("/v1/embeddings", {"input": "a", "input_type": "query"})
    assert reply.status == 200 and reply.headers["x-ignored-fields"] == "input_type"
    reply = served.post("/v1/rerank", {"query": "a", "documents": ["b"], "max_chunks_per_doc": 10})
    assert reply.status == 200 and reply.headers["x-ignored-fields"] == "max_chunks_per_doc"


@pytest.mark.parametrize("name", ["normalize", "use_activation"])
def test_length_of_embeddings(serve: Serve, model: ServedModel, name: str) -> None:
    long = dataclasses.replace(model, vectors=dataclasses.replace(model.vectors, has_unit_length=False))
    for has_unit_length, served_model in ((True, model), (False, long)):
        served = serve(
            script=lambda request: (3.0, 0.0, 4.0), model_info=make_model_info(**EMBEDDER), served_model=served_model
        )
        for path, key in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
            default = served.post(path, {"input": "a"}).json()["data"][0][key]
            assert default == [3.0, 0.0, 4.0], "as the engine computed it"
            scaled = served.post(path, {"input": "a", name: True}).json()["data"][0][key]
            assert scaled == (default if has_unit_length else pytest.approx([0.6, 0.0, 0.8]))
            reply = served.post(path, {"input": "a", name: False})
            if has_unit_length:
                assert reply.json()["error"]["param"] == name and reply.json()["error"]["code"] == "unsupported"
            else:
                assert reply.json()["data"][0][key] == default
            error = served.post(path, {"input": "a", "normalize": True, "use_activation": False}).json()["error"]
            assert error["param"] == "normalize"


def test_scores_without_activation(serve: Serve, model: ServedModel) -> None:
    vectors = dataclasses.replace(model.vectors, activation="sigmoid")
    served = serve_classes(serve, (2.0,), dataclasses.replace(model, vectors=vectors))
    for path, key in (("/rerank", "results"), ("/score", "data")):
        scores = []
        for activation in (None, True, False):
            entry = served.post(path, BODIES[path] | {"use_activation": activation}).json()[key][0]
            scores.append(entry["relevance_score" if path == "/rerank" else "score"])
        assert scores == pytest.approx([0.8807971, 0.8807971, 2.0])


def test_texts_of_scores_may_be_cut(serve: Serve) -> None:
    served = serve_vectors(serve)
    long = "import os, sys"
    cuts = {"max_tokens_per_query": 2, "max_tokens_per_doc": 1}
    assert served.post("/score", {"queries": long, "documents": long, **cuts}).status == 200
    assert sorted(len(request.prompt_ids) for request in served.engine.submitted) == [1, 2]


@pytest.mark.parametrize("dimensions", [None, 2])
@pytest.mark.parametrize("normalize", [None, True, False])
def test_vectors_of_tokens(serve: Serve, model: ServedModel, normalize: bool | None, dimensions: int | None) -> None:
    matryoshka = dataclasses.replace(model, vectors=dataclasses.replace(model.vectors, dimensions=()))
    rows = [(3.0, 4.0, 0.0), (0.0, -2.0, 1.0), (8.0, 6.0, 2.0)]
    served = serve(
        script=lambda request: [number for row in rows[: len(request.prompt_ids)] for number in row],
        model_info=make_model_info(**EMBEDDER, token_vector_size=3),
        served_model=matryoshka,
    )
    body = {"input": [[1, 2], [3, 4, 5]], "task": "token_embed", "normalize": normalize, "dimensions": dimensions}
    reply = served.post("/pooling", body).json()
    assert all(request.pools_tokens for request in served.engine.submitted)
    expected = []
    for row in rows:
        short = row[:dimensions]
        length = 1.0 if normalize is False and dimensions is None else math.hypot(*short)
        expected.append([number / length for number in short])
    assert [entry["index"] for entry in reply["data"]] == [0, 1] and reply["usage"]["prompt_tokens"] == 5
    for entry, count in zip(reply["data"], (2, 3), strict=True):
        assert entry["object"] == "pooling" and len(entry["data"]) == count
        for found, wanted in zip(entry["data"], expected, strict=False):
            assert found == pytest.approx(wanted)
    encoded = served.post("/pooling", body | {"encoding_format": "base64"}).json()["data"]
    for entry, plain in zip(encoded, reply["data"], strict=True):
        numbers = array("f", base64.b64decode(entry["data"], validate=True))
        assert numbers.tolist() == [number for row in plain["data"] for number in row]


def serve_token_classes(serve: Serve) -> Served:
    """Serve two token classes, whose logits are 0 and the token's position."""
    return serve(
        script=lambda request: [number for place in range(len(request.prompt_ids)) for number in (0.0, place)],
        model_info=make_model_info(generates=False, pooling_task="token_classify", vector_size=2, token_vector_size=2),
    )


@pytest.mark.parametrize("task", [None, "token_classify"])
@pytest.mark.parametrize("activate", [None, False, True])
def test_classes_of_tokens(serve: Serve, activate: bool | None, task: str | None) -> None:
    served = serve_token_classes(serve)
    body = {"input": [[1, 2], [3, 4, 5]], "task": task, "use_activation": activate}
    reply = served.post("/pooling", body).json()
    assert all(request.pools_tokens for request in served.engine.submitted)
    for entry, count in zip(reply["data"], (2, 3), strict=True):
        assert entry["object"] == "pooling" and len(entry["data"]) == count
        for place, found in enumerate(entry["data"]):
            first = 1 / (1 + math.exp(place))
            assert found == pytest.approx([first, 1 - first] if activate else [0.0, place])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/classify", {"input": "a"}, None),
        ("/v1/embeddings", {"input": "a"}, None),
        ("/rerank", {"query": "a", "documents": ["b"]}, None),
        ("/score", {"queries": "a", "documents": "b"}, None),
        ("/pooling", {"input": "a", "task": "token_embed"}, "task"),
        ("/pooling", {"input": "a", "task": "classify"}, "task"),
        ("/pooling", {"input": "a", "dimensions": 1}, "dimensions"),
    ],
    ids=str,
)
def test_what_a_classifier_of_tokens_cannot_do(
    serve: Serve, path: str, body: dict[str, object], param: str | None
) -> None:
    error = serve_token_classes(serve).post(path, body).json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported")
    assert param == "dimensions" or "token" in error["message"]


def test_invocations_of_a_classifier_of_tokens(serve: Serve) -> None:
    reply = serve_token_classes(serve).post("/invocations", {"input": [1, 2]}).json()
    assert reply["data"][0]["data"] == [[0.0, 0.0], [0.0, 1.0]]


def test_too_many_vectors_of_tokens(serve: Serve) -> None:
    options = {"limit": ["token-vector-numbers=15"]}
    served = serve(
        script=lambda request: [1.0] * 3 * len(request.prompt_ids),
        model_info=make_model_info(**EMBEDDER, token_vector_size=3),
        options=options,
    )
    assert served.post("/pooling", {"input": [[1, 2], [3, 4, 5]], "task": "token_embed"}).status == 200
    error = served.post("/pooling", {"input": [[1, 2, 3], [3, 4, 5]], "task": "token_embed"}).json()["error"]
    assert error["param"] == "input" and "18 numbers" in error["message"]


def test_task_of_pooling(serve: Serve) -> None:
    for served, task, other in (
        (serve_vectors(serve), "embed", "classify"),
        (serve_vectors(serve), "embed", "token_classify"),
        (serve_classes(serve, (0.5, 2.0)), "classify", "token_embed"),
        (serve_classes(serve, (0.5, 2.0)), "classify", "token_classify"),
    ):
        assert served.post("/pooling", {"input": "a", "task": task}).status == 200
        error = served.post("/pooling", {"input": "a", "task": other}).json()["error"]
        assert (error["param"], error["code"]) == ("task", "unsupported")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"input": "a"}, "embedding"),
        ({"input": "a", "task": "embed"}, "pooling"),
        ({"text_1": "a", "text_2": ["b"]}, "score"),
        ({"queries": "a", "items": ["b"], "input": None}, "score"),
        ({"data_1": "a", "data_2": "b"}, "score"),
    ],
    ids=str,
)
def test_invocations_tell_requests_for_vectors_apart(serve: Serve, body: dict[str, object], kind: str) -> None:
    reply = serve_vectors(serve).post("/invocations", body)
    assert reply.status == 200 and reply.json()["data"][0]["object"] == kind


@pytest.mark.parametrize(("truncate", "side"), [(True, "right"), ("END", "right"), ("START", "left")])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/rerank"])
def test_truncate_cuts_long_texts(serve: Serve, path: str, truncate: object, side: str) -> None:
    """The parameter is the one of Jina's, Nvidia's and Hugging Face's servers."""
    served = serve(script=lambda request: (0.6, 0.8, 0.0), model_info=make_model_info(**EMBEDDER, max_model_len=16))
    text = " ".join(f"word{number}" for number in range(40))
    body = BODIES[path] | ({"documents": [text]} if path == "/rerank" else {"input": text})
    ids = served.model.tokenizer.encode(text, add_special_tokens=True)
    expected = ids[:16] if side == "right" else ids[-16:]
    assert served.post(path, body | {"truncate": truncate}).status == 200
    assert expected in [list(request.prompt_ids) for request in served.engine.submitted]
    for refused in ({}, {"truncate": False}, {"truncate": "NONE"}):
        assert served.post(path, body | refused).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "fields",
    [
        {"truncate": False, "truncate_prompt_tokens": 3},
        {"truncate": "NONE", "truncate_prompt_tokens": -1},
        {"truncate": "START", "truncation_side": "right"},
        {"truncate": "MIDDLE"},
        {"truncate": 1},
    ],
    ids=str,
)
def test_truncate_that_means_nothing(serve: Serve, fields: dict[str, object]) -> None:
    error = serve_vectors(serve).post("/v1/embeddings", {"input": "a", **fields}).json()["error"]
    assert error["param"] == "truncate"


def test_neutral_values_of_jina(serve: Serve) -> None:
    served = serve_vectors(serve)
    fields = {"embedding_type": "float", "late_chunking": False, "truncate": True}
    assert served.post("/v1/embeddings", {"input": "a", **fields}).status == 200
    assert served.post("/rerank", {"query": "a", "documents": ["b"], "return_embeddings": False}).status == 200
    for name, value in (("embedding_type", "binary"), ("late_chunking", True)):
        error = served.post("/v1/embeddings", {"input": "a", name: value}).json()["error"]
        assert error["param"] == name and error["code"] == "unsupported"
