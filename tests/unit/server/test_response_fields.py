"""Fields of the Responses API that do not reach the model, on a scripted engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serve_llm.server.prompt.model import ServedModel
from support.serving import Served
from support.tools import with_tools

Serve = Callable[..., Served]


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ({"x" * 64: "x" * 512}, None),
        ({str(number): "x" for number in range(16)}, None),
        ({str(number): "x" for number in range(17)}, "metadata"),
        ({"x" * 65: "x"}, "metadata"),
        ({"x": "x" * 513}, "metadata"),
        ({"x": 1}, "metadata.x"),
        ({"x": {}}, "metadata.x"),
        ("x", "metadata"),
    ],
)
def test_metadata_is_bounded(serve: Serve, metadata: object, param: str | None) -> None:
    reply = serve("Hello.<|end|>").post("/v1/responses", {"input": "Hi", "metadata": metadata})
    if param is None:
        assert reply.status == 200 and reply.json()["metadata"] == metadata
    else:
        assert reply.status == 400 and reply.json()["error"]["param"] == param


def test_unknown_fields_inside_of_others_are_named(serve: Serve, model: ServedModel) -> None:
    served = serve("Hello.<|end|>", served_model=with_tools(model), model_facts=None)
    clock = {"type": "function", "name": "clock", "parameters": {"type": "object"}, "zzz": 1, "none": None}
    body = {
        "input": "Hi",
        "reasoning": {"bogus": 1, "effort": "low"},
        "text": {"zz": 1, "format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "z": 1}},
        "tools": [clock, {"type": "web_search", "filters": {}}],
        "top": 1,
    }
    reply = served.post("/v1/responses", body)
    assert reply.status == 200, reply.content
    names = reply.headers["x-ignored-fields"].split(", ")
    assert set(names) == {"top", "tools[0].zzz", "text.zz", "text.format.z", "reasoning.bogus", "tools[1]"}
    assert len(names) == 6
    metrics = served.get("/metrics").content.decode()
    assert 'ignored_fields_total{model_name="demo",route="/v1/responses"} 6.0' in metrics
    tool = {"name": "clock", "input_schema": {"type": "object"}, "eager_input_streaming": True}
    messages = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    reply = served.post("/v1/messages", messages)
    assert reply.headers["x-ignored-fields"] == "tools[0].eager_input_streaming"


def test_penalties(serve: Serve) -> None:
    served = serve("Hello.<|end|>")
    reply = served.post("/v1/responses", {"input": "Hi", "presence_penalty": 0.5, "frequency_penalty": -1})
    assert reply.status == 200 and "x-ignored-fields" not in reply.headers
    assert (reply.json()["presence_penalty"], reply.json()["frequency_penalty"]) == (0.5, -1)
    sampling = served.engine.submitted[-1].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1)
    for name in ("presence_penalty", "frequency_penalty"):
        error = served.post("/v1/responses", {"input": "Hi", name: 2.5}).json()["error"]
        assert error["param"] == name
