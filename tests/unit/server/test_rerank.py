"""The reranking routes, on a scripted engine."""

from __future__ import annotations

import pytest

from support.fakes import make_model_info
from support.vector_models import EMBEDDER, Serve, serve_classifier, serve_embedder


class TestRerank:
    @pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
    def test_sorted_with_documents(self, serve: Serve, path: str) -> None:
        served = serve(
            script=lambda request: (1.0, 0.0) if request.prompt_ids == served.ids("b") else (0.6, 0.8),
            model_info=make_model_info(**EMBEDDER),
        )
        body = {"query": "b", "documents": ["a", {"text": "b"}]}
        reply = served.post(path, body).json()
        assert [result["index"] for result in reply["results"]] == [1, 0]
        assert [result["document"]["text"] for result in reply["results"]] == ["b", "a"]
        assert [result["relevance_score"] for result in reply["results"]] == pytest.approx([1.0, 0.6])
        assert reply["usage"]["total_tokens"] == sum(len(request.prompt_ids) for request in served.engine.submitted)
        short = served.post(path, body | {"top_n": 1, "return_documents": False}).json()
        assert short["results"] == [{"index": 1, "relevance_score": pytest.approx(1.0)}]

    def test_documents_are_cut(self, serve: Serve) -> None:
        served = serve_embedder(serve)
        long = "import os, sys"
        body = {"query": "x", "documents": [long], "max_tokens_per_doc": 2}
        assert served.post("/rerank", body).status == 200
        assert served.engine.submitted[1].prompt_ids == served.ids(long)[:2]

    @pytest.mark.parametrize(
        ("changed", "param"),
        [
            ({"documents": []}, "documents"),
            ({"documents": [""]}, "documents"),
            ({"documents": ["a"] * 2049}, "documents"),
            ({"top_n": -1}, "top_n"),
            ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
            ({"query": 5}, "query"),
        ],
    )
    def test_wrong_fields(self, serve: Serve, changed: dict[str, object], param: str) -> None:
        reply = serve_embedder(serve).post("/rerank", {"query": "x", "documents": ["a"]} | changed)
        assert reply.status == 400 and reply.json()["error"]["param"] == param

    def test_the_query_is_cut(self, serve: Serve) -> None:
        served = serve_embedder(serve)
        long = "import os, sys"
        assert served.post("/rerank", {"query": long, "documents": ["a"], "max_tokens_per_query": 2}).status == 200
        assert served.engine.submitted[0].prompt_ids == served.ids(long)[:2]

    @pytest.mark.parametrize("path", ["/rerank", "/score"])
    def test_texts_that_are_cut_may_be_longer_than_the_context(self, serve: Serve, path: str) -> None:
        served = serve_embedder(serve)
        long = "import os\n" * 200
        body = {"query" if path == "/rerank" else "queries": long, "documents": ["a", long]}
        error = served.post(path, body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        cuts = {"max_tokens_per_query": 5, "max_tokens_per_doc": 3}
        assert served.post(path, body | cuts).status == 200
        assert sorted(len(request.prompt_ids) for request in served.engine.submitted) == [1, 3, 5]

    @pytest.mark.parametrize("text", ["", "import os\n" * 200, "x, " * 9], ids=["empty", "hopeless", "too long"])
    @pytest.mark.parametrize(
        ("path", "fields", "place"),
        [
            ("/rerank", ("query", "documents"), "query"),
            ("/rerank", ("query", "documents"), "documents[1]"),
            ("/score", ("text_1", "text_2"), "text_1"),
            ("/score", ("text_1", "text_2"), "text_2[1]"),
            ("/score", ("queries", "documents"), "queries[1]"),
        ],
    )
    def test_errors_name_the_text(
        self, serve: Serve, path: str, fields: tuple[str, str], place: str, text: str
    ) -> None:
        first, second = fields
        body: dict[str, object] = {first: "a", second: ["b", "c"]}
        field = place.partition("[")[0]
        body[field] = ["d", text] if "[" in place else text
        error = serve_embedder(serve).post(path, body).json()["error"]
        assert error["param"] == field and error["message"].startswith(f"{place} has ")

    def test_an_error_of_a_pair_names_both_texts(self, serve: Serve) -> None:
        served = serve_classifier(serve, lambda request: (0.0,), 1)
        body = {"query": "", "documents": ["a", ""]}
        error = served.post("/rerank", body).json()["error"]
        assert error == error | {"param": "documents", "message": "documents[1] with query has no tokens"}

    def test_no_cosine_is_above_one(self, serve: Serve) -> None:
        served = serve(
            script=lambda request: (0.0, 0.3, 0.7), model_info=make_model_info(**EMBEDDER)
        )  # rounds to 1 + 2**-52
        (result,) = served.post("/rerank", {"query": "a", "documents": ["b"]}).json()["results"]
        assert result["relevance_score"] == 1.0

    def test_documents_have_other_keys(self, serve: Serve) -> None:
        served = serve_embedder(serve)
        body = {"query": "x", "documents": [{"text": "a", "title": "b", "id": 3}], "rank_fields": ["text"]}
        assert served.post("/rerank", body).json()["results"][0]["document"] == {"text": "a"}
        for wrong in ({"title": "b"}, {"text": 5}, 5, None):
            error = served.post("/rerank", body | {"documents": ["a", wrong]}).json()["error"]
            assert error["param"] == "documents[1]" and "must be a text, or an object" in error["message"]
        error = served.post("/rerank", body | {"rank_fields": ["title"]}).json()["error"]
        assert error["code"] == "unsupported" and error["param"] == "rank_fields"
