"""Ranges of the text-level parameters."""

from __future__ import annotations

import enum
import math
from fractions import Fraction

import msgspec
import numpy as np
import pytest

from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.sampling_params import RepetitionDetection, SamplingParams
from serve_llm.server.structured_output.params import StructuredOutputs

GOOD = [
    {"temperature": 0},
    {"temperature": 2},
    {"top_p": 1},
    {"top_p": 0},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 10**9},
    {"min_p": 0},
    {"min_p": 1},
    {"presence_penalty": -2},
    {"frequency_penalty": 2},
    {"repetition_penalty": 0.01},
    {"n": 128},
    {"seed": -(2**63)},
    {"seed": 2**64 - 1},
    {"max_tokens": 0},
    {"max_tokens": None, "min_tokens": 100},
    {"logprobs": 0},
    {"logprobs": 20},
    {"prompt_logprobs": 20},
    {"stop": []},
    {"stop": "x"},
    {"stop": ["x"] * 16},
    {"logit_bias": {5: -100}},
    {"truncate_prompt_tokens": -1},
    {"allowed_token_ids": [1]},
]
BAD = [
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": float("inf")}),
    ("top_p", {"top_p": -0.1}),
    ("top_p", {"top_p": 1.1}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.5}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -2.5}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("n", {"n": 0}),
    ("seed", {"seed": 2**64}),
    ("seed", {"seed": -(2**63) - 1}),
    ("max_tokens", {"max_tokens": -1}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 17}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("stop", {"stop": ""}),
    ("bad_words", {"bad_words": [""]}),
    ("logit_bias", {"logit_bias": {5: 101}}),
    ("logit_bias", {"logit_bias": {5: float("nan")}}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
]


@pytest.mark.parametrize("given", GOOD, ids=str)
def test_allowed(given: dict[str, object]) -> None:
    SamplingParams(**given)


@pytest.mark.parametrize(("param", "given"), BAD, ids=str)
def test_refused_by_name(param: str, given: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**given)
    assert caught.value.param == param
    assert param in caught.value.message
    assert isinstance(caught.value, ValueError)


NEUTRAL_OF_VLLM = {
    "best_of": 1,
    "detokenize": True,
    "extra_args": None,
    "logits_processors": None,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
}


class RequestOutputKind(enum.Enum):
    """Has vLLM's numbers."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY, 0, None])
def test_fields_of_vllm_that_ask_for_nothing(kind: object) -> None:
    found = SamplingParams(temperature=0.5, n=3, output_kind=kind, **NEUTRAL_OF_VLLM)  # type: ignore[arg-type,call-arg]
    assert found == SamplingParams(temperature=0.5, n=3)
    assert SamplingParams(n=3, best_of=3) == SamplingParams(n=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"detokenize": False}, "detokenize=False is not supported; omit it"),
        ({"best_of": 2}, "best_of=2 is not supported; n gives"),
        ({"use_beam_search": True}, "beam search is not implemented"),
        ({"output_kind": RequestOutputKind.DELTA}, "LLM returns whole texts"),
        ({"extra_args": {"a": 1}}, "extra_args"),
        ({"detokenize": True, "temperature": 3}, "temperature must be"),
    ],
)
def test_fields_of_vllm_that_ask_for_something(fields: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("temprature", r"no field 'temprature'; did you mean temperature\?"),
        ("max_new_tokens", r"did you mean max_tokens\?"),
        ("zzz", r"no field 'zzz'; docs/offline\.md lists what takes its place"),
    ],
)
def test_unknown_fields(name: str, suggestion: str) -> None:
    with pytest.raises(TypeError, match=suggestion):
        SamplingParams(n=1, **{name: 1})  # type: ignore[arg-type]


def test_fields_are_keywords() -> None:
    with pytest.raises(TypeError, match=r"SamplingParams takes keywords only, such as temperature=0\.5"):
        SamplingParams(0.5)  # type: ignore[misc]


def test_an_unknown_field_of_structured_outputs_has_a_suggestion() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown field structured_outputs\.choise; did you mean choice\?"):
        SamplingParams(structured_outputs={"choise": ["a"]})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"unknown field structured_outputs\.1$"):
        SamplingParams(structured_outputs={1: ["a"]})  # type: ignore[arg-type]


def test_a_value_of_the_wrong_type_is_no_unknown_field() -> None:
    with pytest.raises(InvalidRequest, match="temperature must be a number, not 'hot'"):
        SamplingParams(temperature="hot")  # type: ignore[arg-type]


CONVERTED = [
    ("max_tokens", 2.0, 2),
    ("max_tokens", np.int64(3), 3),
    ("max_tokens", np.array(3), 3),
    ("top_k", 50.0, 50),
    ("top_k", None, 0),
    ("seed", 1.0, 1),
    ("seed", np.int64(3), 3),
    ("seed", np.uint64(2**64 - 1), 2**64 - 1),
    ("min_tokens", 1.0, 1),
    ("n", np.int32(2), 2),
    ("temperature", np.float32(0.5), 0.5),
    ("temperature", Fraction(1, 2), 0.5),
    ("temperature", None, 1.0),
    ("truncation_side", None, "left"),
    ("logprobs", True, 1),  # as in vLLM
    ("logprobs", False, None),
    ("prompt_logprobs", True, 1),
    ("ignore_eos", np.bool_(True), True),
    ("stop", ("a", "b"), ["a", "b"]),
    ("bad_words", ("a",), ["a"]),
    ("stop_token_ids", np.array([1, 2]), [1, 2]),
    ("stop_token_ids", (1,), [1]),
    ("allowed_token_ids", [5.0], [5]),
    ("allowed_token_ids", range(2), [0, 1]),
    ("logprob_token_ids", None, None),
    ("logit_bias", {"5": 100}, {5: 100}),
    ("logit_bias", {5.0: np.float64(1)}, {5: 1.0}),
    ("structured_outputs", {"choice": ["a"]}, StructuredOutputs(choice=["a"])),
    (
        "repetition_detection",
        {"max_pattern_size": 3, "min_count": 2},
        RepetitionDetection(max_pattern_size=3, min_count=2),
    ),
]
WRONG_TYPES = [
    ("max_tokens", "5"),
    ("max_tokens", 2.5),
    ("max_tokens", math.inf),
    ("max_tokens", True),
    ("max_tokens", np.array([1, 2])),
    ("temperature", True),
    ("temperature", "0.5"),
    ("temperature", 10**400),
    ("logprobs", 1.5),
    ("ignore_eos", 1),
    ("stop", [5]),
    ("stop", 5),
    ("bad_words", "word"),
    ("stop_token_ids", 5),
    ("stop_token_ids", ["5"]),
    ("stop_token_ids", [None]),
    ("allowed_token_ids", {1: 2}),
    ("logit_bias", {5.5: 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"\u0665": 1}),
    ("logit_bias", {5: "1"}),
    ("logit_bias", [5]),
    ("truncation_side", 1),
    ("structured_outputs", "json"),
    ("structured_outputs", {"choices": ["a"]}),
    ("structured_outputs", {"choice": [1]}),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}),
    ("repetition_detection", {"min_count": 2}),
    ("repetition_detection", {"max_pattern_size": 3, "min_count": "2"}),
]


@pytest.mark.parametrize(("name", "value", "expected"), CONVERTED, ids=str)
def test_what_is_meant_is_taken(name: str, value: object, expected: object) -> None:
    found = getattr(SamplingParams(**{name: value}), name)
    assert found == expected and type(found) is type(expected)
    if isinstance(found, list | dict):
        assert list(map(type, found)) == list(map(type, expected))


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES, ids=str)
def test_wrong_types_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param.split(".")[0] == name, caught.value.param
    assert name in caught.value.message


def test_what_was_accepted_can_be_sent() -> None:
    for name, value, _ in CONVERTED:
        msgspec.msgpack.encode(SamplingParams(**{name: value}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": 5}, "regex must be a text, not 5"),
        ({"grammar": ["a"]}, "grammar must be a text"),
        ({"choice": "yes"}, "choice must be a list of texts, not 'yes'"),
        ({"choice": ["a", 5]}, "choice must be a list of texts"),
        ({"json": dict}, "model_json_schema"),
        ({"json_object": 1}, "json_object must be True"),
        ({"structural_tag": 1}, "structural_tag must be a dict"),
        ({"json_object": True, "whitespace_pattern": 1}, "whitespace_pattern must be a text"),
    ],
)
def test_types_of_structured_outputs(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        StructuredOutputs(**given)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        SamplingParams(structured_outputs=given)  # type: ignore[arg-type]


def test_choices_may_be_a_tuple() -> None:
    assert StructuredOutputs(choice=("a", "b")).choice == ["a", "b"]  # type: ignore[arg-type]


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(
        stop=["a"], logit_bias={1: 2.0}, structured_outputs=StructuredOutputs(json={"type": "null"})
    )
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")  # type: ignore[union-attr]
    clone.structured_outputs.json.clear()  # type: ignore[union-attr]
    assert params.stop == ["a"] and params.structured_outputs == StructuredOutputs(json={"type": "null"})
