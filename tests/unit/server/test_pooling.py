"""Routes that return vectors: embeddings, reranking, scores and classes, on a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import math
import struct
from array import array

import pytest

from serve_llm.common.errors import EngineDead
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.generate.dispatcher import LocalDispatcher
from serve_llm.server.generate.generation import Generator
from serve_llm.server.metrics.meter import Clock, Meter
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.reranker_prompt import SUFFIX
from serve_llm.server.prompt.validate import prepare_pooling
from serve_llm.server.routes.pooling import PAUSE_BYTES
from support.fakes import ScriptedEngine, make_model_info
from support.refused_pairs import FIELDS, REFUSALS
from support.vector_models import EMBEDDER, VECTORS, Serve, by_length, serve_classifier, serve_embedder


class TestEmbeddings:
    def test_body_and_usage(self, serve: Serve) -> None:
        served = serve_embedder(serve)
        reply = served.post("/v1/embeddings", {"input": [[5], [5, 6]], "model": "demo"})
        body = reply.json()
        assert reply.status == 200
        assert body["object"] == "list" and body["model"] == "demo" and body["id"].startswith("embd-")
        assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
        assert [entry["index"] for entry in body["data"]] == [0, 1]
        assert body["data"][0] == {"object": "embedding", "index": 0, "embedding": [1.0, 0.0, 0.0]}
        assert body["data"][1]["embedding"] == pytest.approx([0.6, 0.8, 0.0])

    def test_texts_begin_with_the_default_prompt(self, serve: Serve, model: ServedModel) -> None:
        prompted = dataclasses.replace(model, vectors=dataclasses.replace(model.vectors, prompt="Find: "))
        served = serve(
            script=by_length, model_info=make_model_info(**EMBEDDER | {"max_model_len": 64}), served_model=prompted
        )

        def submit(path: str, **body: object) -> list[list[int]]:
            before = len(served.engine.submitted)
            assert served.post(path, body).status == 200
            return [request.prompt_ids for request in served.engine.submitted[before:]]

        assert submit("/v1/embeddings", input=["ab", "c"]) == [served.ids("Find: ab"), served.ids("Find: c")]
        assert submit("/v1/score", text_1="ab", text_2="c") == [served.ids("Find: ab"), served.ids("Find: c")]
        assert submit("/v1/embeddings", input=[[5]]) == [[5]]
        talk = [{"role": "user", "content": "ab"}]
        assert submit("/v1/embeddings", messages=talk) == [served.ids("<|user|>\nab<|end|>\n")]

    def test_messages_are_rendered_without_a_reply(self, serve: Serve) -> None:
        served = serve_embedder(serve, max_model_len=64)
        talk = [{"role": "user", "content": "ab"}]
        reply = served.post("/v1/embeddings", {"messages": talk})
        assert reply.status == 200 and len(reply.json()["data"]) == 1
        assert served.engine.submitted[-1].prompt_ids == served.ids("<|user|>\nab<|end|>\n")
        opened = served.post("/v1/embeddings", {"messages": talk, "add_generation_prompt": True})
        assert opened.status == 200
        assert served.engine.submitted[-1].prompt_ids == served.ids("<|user|>\nab<|end|>\n<|assistant|>\n")
        cut = served.post(
            "/v1/embeddings", {"messages": talk, "truncate_prompt_tokens": 2, "encoding_format": "base64"}
        )
        assert cut.json()["usage"]["prompt_tokens"] == 2
        assert served.post("/invocations", {"messages": talk}).json()["object"] == "list"
        for body, param in (
            ({"messages": talk, "input": "x"}, "input"),
            ({}, "input"),
            ({"messages": []}, "messages"),
            ({"input": "x", "tools": []}, "tools"),
            ({"messages": [{"role": "user", "content": "x " * 99}]}, "messages"),
            ({"messages": talk, "dimensions": 2}, "dimensions"),
        ):
            error = served.post("/v1/embeddings", body).json()["error"]
            assert error["param"] == param, error

    def test_vectors_of_messages(self, serve: Serve) -> None:
        talk = {"messages": [{"role": "user", "content": "ab"}]}
        embedder = serve_embedder(serve, max_model_len=64)
        classifier = serve_classifier(serve, lambda request: (0.0, math.log(3.0)), 2)
        for served, path in ((embedder, "/pooling"), (classifier, "/pooling"), (classifier, "/classify")):
            reply = served.post(path, talk)
            assert reply.status == 200 and len(reply.json()["data"]) == 1
            assert served.engine.submitted[-1].prompt_ids == served.ids("<|user|>\nab<|end|>\n")
            for body, param in (({}, "input"), ({**talk, "input": "x"}, "input"), ({"messages": []}, "messages")):
                assert served.post(path, body).json()["error"]["param"] == param
        assert classifier.post("/invocations", talk).json()["data"][0]["num_classes"] == 2

    def test_base64_is_little_endian_float32(self, serve: Serve) -> None:
        served = serve_embedder(serve)
        body = served.post("/v1/embeddings", {"input": [5, 6], "encoding_format": "base64"}).json()
        assert base64.b64decode(body["data"][0]["embedding"]) == struct.pack("<3f", 0.6, 0.8, 0.0)

    def test_texts_are_tokenized(self, serve: Serve) -> None:
        served = serve_embedder(serve)
        assert served.post("/v1/embeddings", {"input": ["import os", "x"]}).status == 200
        assert [request.prompt_ids for request in served.engine.submitted] == [served.ids("import os"), served.ids("x")]
        assert all(request.pooling and request.sampling.max_tokens == 0 for request in served.engine.submitted)

    def test_many_vectors_in_one_body(self, serve: Serve) -> None:
        size = 3 * PAUSE_BYTES // 40
        served = serve(
            script=lambda request: [float(len(request.prompt_ids))] * size,
            model_info=make_model_info(**{**EMBEDDER, "vector_size": size}),
        )
        data = served.post("/v1/embeddings", {"input": [[5], [5, 6], [5, 6, 7]]}).json()["data"]
        assert [entry["embedding"] for entry in data] == [[1.0] * size, [2.0] * size, [3.0] * size]

    @pytest.mark.parametrize(("side", "expected"), [("left", [8, 9]), ("right", [5, 6]), (None, [5, 6])])
    def test_truncation(self, serve: Serve, side: str | None, expected: list[int]) -> None:
        served = serve_embedder(serve)
        body = {"input": [5, 6, 7, 8, 9], "truncate_prompt_tokens": 2, "truncation_side": side}
        assert served.post("/v1/embeddings", body).status == 200
        assert served.engine.submitted[0].prompt_ids == expected

    def test_truncation_to_the_models_length(self, serve: Serve) -> None:
        served = serve_embedder(serve)
        text = "import os, sys, re, json, math, time, heapq, array, struct, random, typing"
        assert len(served.ids(text)) > 16
        assert served.post("/v1/embeddings", {"input": text}).json()["error"]["code"] == "context_length_exceeded"
        assert served.post("/v1/embeddings", {"input": text, "truncate_prompt_tokens": -1}).status == 200
        assert served.engine.submitted[0].prompt_ids == served.ids(text)[:16]

    def test_dimensions_need_a_model_made_for_it(self, serve: Serve) -> None:
        served = serve_embedder(serve)
        error = served.post("/v1/embeddings", {"input": "x", "dimensions": 2}).json()["error"]
        assert error["param"] == "dimensions" and error["code"] == "unsupported"
        assert served.post("/v1/embeddings", {"input": "x", "dimensions": 3}).status == 200

    @pytest.mark.parametrize("encoding", ["float", "base64"])
    def test_dimensions_cut_and_scale(self, serve: Serve, model: ServedModel, encoding: str) -> None:
        trained = dataclasses.replace(model, vectors=dataclasses.replace(model.vectors, dimensions=()))
        served = serve(
            script=lambda request: (3.0, 4.0, 12.0), model_info=make_model_info(**EMBEDDER), served_model=trained
        )
        body = {"input": "x", "dimensions": 2, "encoding_format": encoding}
        found = served.post("/v1/embeddings", body).json()["data"][0]["embedding"]
        if encoding == "base64":
            found = list(struct.unpack("<2f", base64.b64decode(found)))
        assert found == pytest.approx([0.6, 0.8])
        assert served.post("/v1/embeddings", body | {"dimensions": 4}).status == 400

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "input"),
            ({"input": []}, "input"),
            ({"input": [""]}, "input"),
            ({"input": ["x"] * 2049}, "input"),
            ({"input": [[]]}, "input"),
            ({"input": [5, 9999]}, "input"),
            ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
            ({"input": "x", "dimensions": 0}, "dimensions"),
            ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
            ({"input": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
            ({"input": "x", "priority": 2**40}, "priority"),
            ({"input": "x", "temperature": 1}, "temperature"),
            ({"input": "x", "model": "other"}, "model"),
        ],
    )
    def test_the_field_at_fault_is_named(self, serve: Serve, body: dict[str, object], param: str) -> None:
        reply = serve_embedder(serve).post("/v1/embeddings", body)
        assert reply.status in (400, 404)
        assert reply.json()["error"]["param"] == param


def test_usage_and_metrics_agree(serve: Serve) -> None:
    served = serve_embedder(serve)
    usages = [
        served.post("/v1/embeddings", {"input": [[5], [5, 6]]}).json()["usage"],
        served.post("/v1/rerank", {"query": "x", "documents": ["y", "zz"]}).json()["usage"],
        served.post("/v1/score", {"text_1": "x", "text_2": ["y", "z"]}).json()["usage"],
        served.post("/pooling", {"input": "x"}).json()["usage"],
    ]
    lines = served.get("/metrics").content.decode().splitlines()
    (line,) = [line for line in lines if line.startswith("serve_llm_prompt_tokens_total{")]
    assert float(line.rpartition(" ")[2]) == sum(usage.get("prompt_tokens", usage["total_tokens"]) for usage in usages)


def test_models_say_what_they_do_not_do(serve: Serve) -> None:
    embedder = serve_embedder(serve)
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/classify", {"input": "x"})):
        assert embedder.post(path, body).json()["error"]["code"] == "unsupported"
    chat = embedder.chat()
    assert chat.json()["error"]["code"] == "unsupported" and "no text" in chat.json()["error"]["message"]
    generator = serve()
    for path, body in (
        ("/v1/embeddings", {"input": "x"}),
        ("/pooling", {"input": "x"}),
        ("/v1/score", {"queries": "x", "documents": "y"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ):
        error = generator.post(path, body).json()["error"]
        assert error["code"] == "unsupported" and "--convert embed" in error["message"]
    error = generator.post("/classify", {"input": "x"}).json()["error"]
    assert error["code"] == "unsupported" and "has no classes; --classifier-from-token" in error["message"]


class TestScores:
    @pytest.mark.parametrize("path", ["/v1/score", "/score"])
    @pytest.mark.parametrize(
        ("names"), [("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items")]
    )
    def test_cosine_of_embeddings(self, serve: Serve, path: str, names: tuple[str, str]) -> None:
        served = serve(
            script=lambda request: (1.0, 1.0) if request.prompt_ids == served.ids("a") else (0.0, 2.0),
            model_info=make_model_info(**EMBEDDER),
        )
        body = served.post(path, {names[0]: "a", names[1]: ["a", "b"]}).json()
        assert [entry["object"] for entry in body["data"]] == ["score", "score"]
        assert [entry["score"] for entry in body["data"]] == pytest.approx([1.0, math.sqrt(0.5)])
        assert len(served.engine.submitted) == 2  # each text once

    def test_pairs_of_a_cross_encoder(self, serve: Serve) -> None:
        served = serve_classifier(serve, lambda request: (0.0,), 1)
        body = {"queries": ["a", "b"], "documents": ["c", "d"]}
        reply = served.post("/score", body).json()
        pairs = [request.prompt_ids for request in served.engine.submitted]
        assert pairs == [served.ids("a") + served.ids("c"), served.ids("b") + served.ids("d")]
        assert len(reply["data"]) == 2

    def test_each_pair_is_cut_on_its_own(self, serve: Serve) -> None:
        served = serve_classifier(serve, lambda request: (0.0,), 1)
        long, short = "import os, sys", "x"
        body = {"queries": [long, short, long], "documents": [short, long, long], "truncate_prompt_tokens": 4}
        assert served.post("/score", body).status == 200
        ids = {text: served.ids(text) for text in (long, short)}
        room = 4 - len(ids[short])
        expected = [ids[long][:room] + ids[short], ids[short] + ids[long][:room], ids[long][:2] * 2]
        assert len(ids[long]) >= 4
        assert [request.prompt_ids for request in served.engine.submitted] == expected

    @pytest.mark.parametrize(
        "body",
        [
            {"queries": "a"},
            {"queries": "a", "text_2": "b"},
            {"queries": "a", "documents": "b", "text_1": "c"},
            {"queries": ["a", "b"], "documents": ["c", "d", "e"]},
            {"queries": [], "documents": ["c"]},
            {"queries": "a", "documents": []},
        ],
    )
    def test_wrong_pairs(self, serve: Serve, body: dict[str, object]) -> None:
        assert serve_embedder(serve).post("/score", body).status == 400

    def test_a_classifier_of_several_classes_has_no_score(self, serve: Serve) -> None:
        served = serve_classifier(serve, lambda request: (0.0, 1.0), 2)
        error = served.post("/score", {"queries": "a", "documents": "b"}).json()["error"]
        assert "2 classes" in error["message"]


class TestClasses:
    def test_probabilities(self, serve: Serve) -> None:
        served = serve_classifier(serve, lambda request: (0.0, math.log(3.0)), 2)
        reply = served.post("/classify", {"input": ["a", "b"]}).json()
        assert reply["data"][0]["probs"] == pytest.approx([0.25, 0.75])
        assert reply["data"][1] | {"probs": []} == {"index": 1, "label": "LABEL_1", "probs": [], "num_classes": 2}
        raw = served.post("/classify", {"input": "a", "use_activation": False}).json()
        assert raw["data"][0]["probs"] == pytest.approx([0.0, math.log(3.0)])

    def test_raw_vectors(self, serve: Serve) -> None:
        served = serve_classifier(serve, lambda request: (0.5, 2.0), 2)
        reply = served.post("/pooling", {"input": "a"}).json()
        assert reply["data"] == [{"object": "pooling", "index": 0, "data": [0.5, 2.0]}]
        probabilities = served.post("/pooling", {"input": "a", "use_activation": True}).json()["data"][0]["data"]
        assert probabilities == pytest.approx([0.1824255, 0.8175745])
        encoded = served.post("/pooling", {"input": "a", "encoding_format": "base64"}).json()["data"][0]["data"]
        assert base64.b64decode(encoded) == array("f", (0.5, 2.0)).tobytes()


def test_the_prompt_of_qwen3_reranker(serve: Serve, model: ServedModel) -> None:
    vectors = dataclasses.replace(model.vectors, has_token_classes=True, labels=("no", "yes"), activation="softmax")
    served = serve(
        script=lambda request: (0.0, math.log(3.0)),
        model_info=make_model_info(generates=False, pooling_task="classify", vector_size=2),
        served_model=dataclasses.replace(model, vectors=vectors),
    )
    body = {"query": "q", "documents": ["d"], "instruction": "find it"}
    assert served.post("/rerank", body).json()["results"][0]["relevance_score"] == pytest.approx(0.75)
    (request,) = served.engine.submitted
    text = model.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nJudge whether the Document")
    assert text.endswith("<Instruct>: find it\n<Query>: q\n<Document>: d" + SUFFIX)
    assert served.post("/rerank", body | {"truncate_prompt_tokens": len(request.prompt_ids) - 1}).status == 200
    shorter = model.tokenizer.decode(served.engine.submitted[1].prompt_ids, skip_special_tokens=False)
    assert shorter.endswith(SUFFIX) and len(shorter) < len(text)


@pytest.mark.pairs("replay + embeddings")
def test_a_request_survives_its_engine(model: ServedModel) -> None:
    async def run() -> list[bytes | None]:
        engines = [
            ScriptedEngine(by_length, automatic=False, model_info=make_model_info(**EMBEDDER), meter=Meter(Clock()))
            for _ in range(2)
        ]
        replicas = Replicas(engines[:1])
        request = prepare_pooling([[5], [5, 6]], make_model_info(**EMBEDDER), places=["input[0]", "input[1]"])
        with Generator(LocalDispatcher(replicas), model).open(request) as generation:
            replicas.drop_lost({0: []}, EngineDead("killed"))
            replicas.join({0: engines[1]})
            engines[1].step()
            return [delta.vector for delta in await generation.read_whole()]

    assert asyncio.run(run()) == [array("f", VECTORS[1]).tobytes(), array("f", VECTORS[2]).tobytes()]


@pytest.mark.parametrize(("pair", "field", "message"), REFUSALS)
def test_pairs_of_features_that_are_refused(serve: Serve, pair: str, field: str, message: str) -> None:
    served = serve(script=by_length, model_info=make_model_info(**EMBEDDER | {"generates": True}))
    reply = served.post("/v1/embeddings", {"input": [[5]], "model": "demo", field: FIELDS[field]})
    error = reply.json()["error"]
    assert (reply.status, error["message"], error["param"], error["code"]) == (400, message, field, "unsupported"), pair


def test_fields_of_generated_text_are_explained_on_every_route(serve: Serve) -> None:
    served = serve_embedder(serve)
    for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank"):
        error = served.post(path, {"temperature": 0.5}).json()["error"]
        assert error["message"].startswith("temperature is not supported; it concerns generated text")
    error = served.post("/v1/embeddings", {"input": [[5]], "prompt": "x"}).json()["error"]
    assert error["message"].startswith("unknown field prompt")
