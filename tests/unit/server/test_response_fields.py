"""Fields of the Responses API that do not reach the model, on a scripted engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serve_llm.common.options.sources import make_options
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
    served = serve("Hello.<|end|>", served_model=with_tools(model), model_info=None)
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


def test_vllms_sampling_fields(serve: Serve) -> None:
    served = serve("Hello, world.<|end|>")
    sampling_fields = {
        "seed": 7,
        "top_k": 3,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": -3},
        "stop": ["world"],
        "include_stop_str_in_output": True,
    }
    reply = served.post("/v1/responses", {"input": "Hi", **sampling_fields, "priority": -2, "cache_salt": "mine"})
    assert reply.status == 200 and "x-ignored-fields" not in reply.headers, reply.content
    body = reply.json()
    assert body["status"] == "completed" and body["output"][0]["content"][0]["text"] == "Hello, world"
    request = served.engine.submitted[-1]
    sampling = request.sampling
    assert (sampling.seed, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (7, 3, 0.25, 1.5)
    assert sampling.logit_bias == {5: -3} and (request.priority, request.cache_salt) == (-2, "mine")
    script = "Hello, world.<|end|>"
    endless = {"ignore_eos": True, "skip_special_tokens": False, "max_output_tokens": len(served.ids(script))}
    text = served.post("/v1/responses", {"input": "Hi", **endless}).json()["output"][0]["content"][0]["text"]
    assert text == script


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"seed": 2**64}, "seed"),
        ({"top_k": -2}, "top_k"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 129}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(one): 1 for one in range(4097)}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"priority": 2**31}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"ignore_eos": True, "structured_outputs": {"regex": "a"}}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}, "structured_outputs"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
    ],
)
def test_vllms_sampling_fields_are_checked(serve: Serve, body: dict[str, object], param: str) -> None:
    reply = serve("Hello.<|end|>").post("/v1/responses", {"input": "Hi", **body})
    assert reply.status == 400 and reply.json()["error"]["param"] == param, reply.content


def test_structured_outputs_and_a_plain_format(serve: Serve) -> None:
    served = serve("ab<|end|>")
    body = {"input": "Hi", "structured_outputs": {"regex": "ab"}, "text": {"format": {"type": "text"}}}
    reply = served.post("/v1/responses", body)
    assert reply.status == 200 and "x-ignored-fields" not in reply.headers
    assert served.engine.submitted[-1].sampling.grammar


def test_variables_of_the_template(serve: Serve, model: ServedModel) -> None:
    options = make_options("demo", chat_template="{{ tone or '-' }} {{ enable_thinking }}")
    served = serve("Hello.<|end|>", served_model=ServedModel.load(model.directory, options))
    body = {"input": "Hi", "chat_template_kwargs": {"tone": "dry"}, "reasoning": {"effort": "none"}}
    assert served.post("/v1/responses", body).status == 200
    assert model.tokenizer.decode(served.engine.submitted[-1].prompt_ids) == "dry False"
    counts = [served.post("/v1/responses/input_tokens", one).json()["input_tokens"] for one in (body, {"input": "Hi"})]
    assert counts[0] == len(served.engine.submitted[-1].prompt_ids) and counts[0] != counts[1]


def test_reasoning_may_be_left_out(serve: Serve, model: ServedModel) -> None:
    script = "<think>\nHm.\n</think>\n\nYes.<|end|>"
    served = serve(script, served_model=with_tools(model), model_info=None)
    for include, kinds in ((True, ["reasoning", "message"]), (False, ["message"])):
        reply = served.post("/v1/responses", {"input": "Hi", "include_reasoning": include})
        assert [item["type"] for item in reply.json()["output"]] == kinds
    assert served.post("/v1/responses", {"input": "Hi", "thinking_token_budget": 3}).status == 200
    thinking = served.engine.submitted[-1].sampling.thinking
    assert thinking is not None and thinking.num_tokens == 3
    error = served.post("/v1/responses", {"input": "Hi", "thinking_token_budget": -2}).json()["error"]
    assert error["param"] == "thinking_token_budget"
