"""Fields of other servers, and unknown fields, in generation requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.common.options.sources import make_options
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.schema.completions import Completion
from support.serving import Served
from support.tools import with_tools

Serve = Callable[..., Served]
Json = dict[str, Any]

SILLY_TAVERN = {  # what its text completion types send by default
    "best_of": 1, "spaces_between_special_tokens": True, "max_new_tokens": 3, "stopping_strings": ["zz"], "typical":
    1, "typical_p": 1, "sampler_seed": 7, "add_bos_token": True, "smoothing_factor": 0, "smoothing_curve": 1, "tfs":
    1, "dry_allowed_length": 2, "dry_multiplier": 0, "dry_base": 1.75, "dry_sequence_breakers": "[]",
    "dry_penalty_last_n": 0, "max_tokens_second": 0, "truncation_length": 4096, "ban_eos_token": False, "top_a": 0,
    "mirostat_mode": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": "", "banned_strings": [],
    "api_type": "ooba", "api_server": "http://127.0.0.1:5000/", "xtc_threshold": 0.1, "xtc_probability": 0,
    "rep_pen": 1, "guided_grammar": "", "guided_json": "", "early_stopping": False, "length_penalty": 1,
    "use_beam_search": False,
}  # fmt: skip


def test_fields_of_other_servers_are_served_where_they_mean_nothing(served: Served) -> None:
    found = Completion.model_validate(served.complete(**SILLY_TAVERN).json(), extra="forbid")
    assert found.usage.completion_tokens == 3
    sampling = served.engine.submitted[-1].sampling
    assert (sampling.seed, sampling.max_tokens, sampling.repetition_penalty) == (7, 3, 1)
    assert served.complete(n_predict=2, max_tokens=2, repeat_penalty=1.5).status == 200
    assert served.engine.submitted[-1].sampling.repetition_penalty == 1.5
    for post in (served.complete, served.chat):
        assert post(best_of=2, n=2).status == post(best_of=1).status == post(best_of=1, n=2).status == 200
        error = post(best_of=3, n=2).json()["error"]
        assert error["param"] == "best_of" and error["code"] == "unsupported"


def test_fields_that_are_served_elsewhere_or_not_at_all_are_no_typos(served: Served) -> None:
    refused = {
        "stop_regex": "x", "prompt_embeds": "AAAA", "packed_top_logprobs": True, "return_token_offsets": True,
        "return_prompt_text": True, "weight_versions": [1], "custom_params": {"a": 1}, "no_stop_trim": True,
        "max_repetition_pattern_size": 8, "min_repetition_pattern_size": 2, "repetition_min_count": 3,
    }  # fmt: skip
    for post in (served.complete, served.chat):
        for name, value in refused.items():
            error = post(**{name: value}).json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported"), error
        assert "use stop" in post(stop_regex="x").json()["error"]["message"]
        assert post(grammar="", json_schema={}, no_stop_trim=False, max_repetition_pattern_size=0).status == 200


def test_fields_of_conversations_are_explained_in_completions(served: Served) -> None:
    for name, value in (("messages", []), ("thinking_token_budget", 5)):
        error = served.complete(**{name: value}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported")
        assert "/v1/chat/completions" in error["message"]


def test_a_null_field_is_absent_whatever_its_name(served: Served) -> None:
    assert served.complete(tempratur=None, nonsense=None).status == 200
    assert served.chat(max_tokens=1, nonsense=None).status == 200
    assert served.post("/tokenize", {"prompt": "x", "nonsense": None}).status == 200


def test_unknown_fields_may_be_left_out(serve: Serve) -> None:
    served = serve(options={"unknown_fields": "ignore"})
    reply = served.complete(nonsense=1, tempratur=2, absent=None)
    assert reply.status == 200 and reply.headers["x-ignored-fields"] == "nonsense, tempratur"
    assert served.chat(nonsense=1, stream=True).headers["x-ignored-fields"] == "nonsense"
    assert served.complete(temperature="1", nonsense=1).json()["error"]["param"] == "temperature"
    assert served.complete(stream=True, stream_options={"nonsense": 1}).status == 400, "inside a known field"
    text = served.get("/metrics").content.decode()
    assert 'ignored_fields_total{model_name="demo",route="/v1/completions"} 2.0' in text
    assert 'ignored_fields_total{model_name="demo",route="/v1/chat/completions"} 1.0' in text
    assert served.post("/tokenize", {"prompt": "x", "nonsense": 1}).headers["x-ignored-fields"] == "nonsense"
    assert served.post("/detokenize", {"tokens": [40], "nonsense": 1}).headers["x-ignored-fields"] == "nonsense"


SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


GBNF = 'root ::= "x" | "yy"'


@pytest.mark.parametrize(
    ("body", "own"),
    [
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
        ({"guided_json": {}}, {"json": {}}),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, {"json": SCHEMA, "whitespace_pattern": " ?"}),
        ({"guided_regex": "[ab]+"}, {"regex": "[ab]+"}),
        ({"guided_choice": ["x", "yy"]}, {"choice": ["x", "yy"]}),
        ({"guided_grammar": GBNF, "guided_regex": "", "guided_choice": []}, {"grammar": GBNF}),
        ({"regex": "[ab]+", "ebnf": ""}, {"regex": "[ab]+"}),
        ({"ebnf": GBNF}, {"grammar": GBNF}),
        ({"grammar": GBNF, "json_schema": {}}, {"grammar": GBNF}),
        ({"json_schema": SCHEMA}, {"json": SCHEMA}),
        ({"json_schema": json.dumps(SCHEMA), "guided_json": None}, {"json": SCHEMA}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"response_format": {"type": "json_object", "schema": {}}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"response_format": {"type": "text"}, "regex": "a"}, {"regex": "a"}),
    ],
    ids=str,
)
def test_constraints_under_the_names_of_other_servers(served: Served, body: Json, own: Json) -> None:
    for post in (served.complete, served.chat):
        grammars = []
        for fields in (body, {"structured_outputs": own}):
            reply = post(max_tokens=3, **fields)
            assert reply.status == 200, reply.content
            grammars.append(served.engine.submitted[-1].sampling.grammar)
        assert grammars[0] == grammars[1] != ""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"guided_choice": "x"}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_json": {"type": "nothing"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"ebnf": "start: foo"}, "ebnf"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"guided_regex": "a", "regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": {"type": "nothing"}}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"name": "a", "schema": {}}}},
            "response_format.schema",
        ),
    ],
    ids=str,
)
def test_wrong_constraints_under_the_names_of_other_servers(served: Served, body: Json, param: str) -> None:
    for post in (served.complete, served.chat):
        reply = post(**body)
        assert (reply.status, reply.json()["error"]["param"]) == (400, param), reply.content


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, ""),
        ({"output_config": {"effort": "high"}}, ""),
        ({"output_config": {"effort": "xhigh"}, "reasoning_effort": "high"}, "output_config.effort"),
        ({"output_config": {"effort": "high", "task_budget": {"total": 9}}}, "output_config.task_budget"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"web_search_options": {"search_context_size": "low"}, "context_management": None}, "web_search_options"),
    ],
    ids=str,
)
def test_fields_that_gateways_pass_on_from_anthropics_api(served: Served, body: Json, ignored: str) -> None:
    """LiteLLM passes them on when it translates Claude Code's requests."""
    reply = served.chat(max_tokens=1, **body)
    assert reply.status == 200 and reply.headers.get("x-ignored-fields", "") == ignored


def test_anthropics_form_of_effort_and_format(serve: Serve, model: ServedModel) -> None:
    options = make_options("demo", chat_template="{{ reasoning_effort or '-' }}")
    served = serve(served_model=ServedModel.load(model.directory, options))
    for body, effort in (
        ({"output_config": {"effort": "max"}}, "max"),
        ({"output_config": {"effort": "max"}, "reasoning_effort": "low"}, "low"),
        ({}, "-"),
    ):
        assert served.chat(max_tokens=1, **body).status == 200
        assert model.tokenizer.decode(served.engine.submitted[-1].prompt_ids) == effort
    own = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    grammars = set()
    for body in ({"output_config": {"format": FORMAT}}, {"output_format": FORMAT}, {"response_format": own}):
        assert served.chat(max_tokens=9, **body).status == 200
        grammars.add(served.engine.submitted[-1].sampling.grammar)
    assert len(grammars) == 1 and "" not in grammars
    reply = served.chat(max_tokens=9, response_format=own, output_format=FORMAT | {"schema": {"type": "object"}})
    assert reply.headers["x-ignored-fields"] == "output_format"
    assert served.engine.submitted[-1].sampling.grammar in grammars
    error = served.chat(output_format=FORMAT, output_config={"format": FORMAT}).json()["error"]
    assert error["param"] == "output_format"


def test_thoughts_may_be_omitted_as_in_anthropics_api(serve: Serve, model: ServedModel) -> None:
    served = serve("<think>\nHm.\n</think>\n\nYes.<|end|>", served_model=with_tools(model), model_info=None)
    for display, reasoning in (("summarized", "Hm."), ("omitted", None)):
        message = served.chat(thinking={"type": "adaptive", "display": display}).json()["choices"][0]["message"]
        assert message["content"] == "Yes." and message.get("reasoning") == reasoning
