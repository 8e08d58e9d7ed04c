"""Text-level requests against a model: lengths, vocabulary, and the resulting id-level `Sampling`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from serve_llm.common.options.limits import Limits
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.prompt.validate import Echo, TextRequest, check_text, check_volume, prepare
from serve_llm.server.sampling_params import SamplingParams
from support.fakes import make_model_info

MODEL_INFO = make_model_info(max_model_len=32, vocab_size=4096)


def prepared(model: ServedModel, num_prompt: int = 4, default: int | None = None, **params: object) -> TextRequest:
    return prepare([[40] * num_prompt], SamplingParams(**params), model, MODEL_INFO, default_max_tokens=default)


@pytest.mark.parametrize(
    ("num_prompt", "params", "param", "numbers"),
    [
        (33, {}, "prompt", ["33", "32"]),
        (32, {}, "prompt", ["32"]),
        (33, {"max_tokens": 0}, "prompt", ["33", "32"]),
        (20, {"max_tokens": 13}, "max_tokens", ["20", "13", "32"]),
        (20, {"max_tokens": None, "min_tokens": 13}, "min_tokens", ["13", "12", "20", "32"]),
        (0, {}, "prompt", []),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    model: ServedModel, num_prompt: int, params: dict[str, object], param: str, numbers: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepared(model, num_prompt, **params)
    assert caught.value.param == param
    assert all(number in caught.value.message for number in numbers)


@pytest.mark.parametrize(
    ("num_prompt", "default", "params", "max_tokens"),
    [
        (32, None, {"max_tokens": 0}, 0),
        (20, None, {"max_tokens": 12}, 12),
        (20, None, {"max_tokens": None}, 12),
        (4, 16, {"max_tokens": None}, 16),
        (20, 16, {"max_tokens": None}, 12),
        (4, 16, {"max_tokens": None, "min_tokens": 20}, 20),
    ],
)
def test_how_many_tokens_may_follow(
    model: ServedModel, num_prompt: int, default: int | None, params: dict[str, object], max_tokens: int
) -> None:
    assert prepared(model, num_prompt, default, **params).samplings[0].max_tokens == max_tokens


@pytest.mark.parametrize(
    ("given", "kept"), [({"truncate_prompt_tokens": 3}, [7, 8, 9]), ({"truncate_prompt_tokens": 99}, list(range(10)))]
)
def test_truncation_keeps_the_last_tokens(model: ServedModel, given: dict[str, int], kept: list[int]) -> None:
    assert prepare([list(range(10))], SamplingParams(**given), model, MODEL_INFO).prompts == [kept]


def test_truncation_to_what_fits_leaves_room_for_the_answer(model: ServedModel) -> None:
    found = prepare([list(range(50))], SamplingParams(truncate_prompt_tokens=-1, max_tokens=10), model, MODEL_INFO)
    assert found.prompts == [list(range(28, 50))]


@pytest.mark.parametrize(
    ("param", "params", "prompt"),
    [
        ("prompt", {}, [4096]),
        ("prompt", {}, [-1]),
        ("stop_token_ids", {"stop_token_ids": [4096]}, [1]),
        ("allowed_token_ids", {"allowed_token_ids": [1, -1]}, [1]),
        ("logit_bias", {"logit_bias": {5000: 1.0}}, [1]),
        ("stop_token_ids", {"stop_token_ids": [1] * 5000}, [1]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(
    model: ServedModel, param: str, params: dict[str, object], prompt: list[int]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        prepare([prompt], SamplingParams(**params), model, MODEL_INFO)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"n": 5}, "more than 4000"),
        ({"logit_bias": dict.fromkeys(range(4000), 1)}, "more than 4000"),
        ({"allowed_token_ids": list(range(4000))}, "more than 4000"),
        ({"stop_token_ids": list(range(4000))}, "more than 4000"),
        ({"bad_words": ["x y z " * 500, "q " * 500]}, "more than 4000"),
        ({"logprobs": 20, "max_tokens": 50}, "1050 log-probabilities"),
        ({"logprobs": 4, "n": 3, "max_tokens": 99}, "1485 log-probabilities"),
        ({"prompt_logprobs": 1}, "2000 log-probabilities"),
    ],
)
def test_too_much_in_one_request_is_refused(model: ServedModel, params: dict[str, object], problem: str) -> None:
    limits = Limits(prompt_tokens=4000, logprobs=1000)
    for given, expected in ((params, pytest.raises(InvalidRequest, match=problem)), ({}, nullcontext())):
        request = prepare([[40] * 1000], SamplingParams(**given), model, make_model_info(max_model_len=5000))
        with expected:
            check_volume(request, limits, "prompt")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(model: ServedModel) -> None:
    assert model.tokenizer.longest_token is not None
    text = "x" * (model.tokenizer.longest_token * 33)
    with pytest.raises(InvalidRequest, match=r"at least 33 tokens.*32"):
        check_text(text, model, MODEL_INFO, truncated=False, param="prompt")
    check_text(text, model, MODEL_INFO, truncated=True, param="prompt")
    check_text("x" * 32, model, MODEL_INFO, truncated=False, param="prompt")


def test_a_text_of_which_the_tokenizer_drops_much_may_fit(model: ServedModel) -> None:
    """Tokenizers of encoders drop spaces, and use one token for any unknown word."""
    rust = RustTokenizer(WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    rust.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    words = replace(model, tokenizer=Tokenizer(rust, {}))
    text = "a" + " " * 10_000 + "b" * 10_000
    check_text(text, words, MODEL_INFO, truncated=False, param="prompt")
    assert words.tokenizer.encode(text, add_special_tokens=False) == [0, 1]


def test_eos_ids_stop_unless_ignored(model: ServedModel) -> None:
    assert prepared(model, stop_token_ids=[9, 1]).samplings[0].stop_token_ids == (9, 1, 0)  # the demo's are 0 and 1
    assert prepared(model, stop_token_ids=[9], ignore_eos=True).samplings[0].stop_token_ids == (9,)
    outside = replace(model, eos_ids=(0, 99999))
    assert prepared(outside).samplings[0].stop_token_ids == (0,)


def test_values_that_the_engine_takes_for_off_or_greedy(model: ServedModel) -> None:
    sampling = prepared(model, top_k=-1, temperature=1e-9, seed=-1).samplings[0]
    assert (sampling.top_k, sampling.temperature, sampling.seed) == (0, 0.0, 2**64 - 1)
    assert prepared(model, top_k=10**9).samplings[0].top_k == 4096


def test_bad_words_are_forbidden_with_and_without_a_space(model: ServedModel) -> None:
    found = prepared(model, bad_words=["self"]).samplings[0].bad_words_ids
    assert {model.tokenizer.decode(list(ids)) for ids in found} == {"self", " self"}


def test_echo_with_logprobs_asks_for_the_prompts(model: ServedModel) -> None:
    params = SamplingParams(logprobs=3, prompt_logprobs=1)
    request = prepare([[40, 41]], params, model, MODEL_INFO, echo=[None])
    assert request.samplings[0].prompt_logprobs == 3
    assert request.echoes == [Echo(model.tokenizer.decode([40, 41]))]
    assert prepare([[40]], SamplingParams(logprobs=3), model, MODEL_INFO).samplings[0].prompt_logprobs is None


def test_echo_is_the_text_that_came_unless_it_was_cut(model: ServedModel) -> None:
    ids = model.tokenizer.encode("<|user|>ab cd", add_special_tokens=False)
    whole = prepare([ids], SamplingParams(), model, MODEL_INFO, echo=[Echo("<|user|>ab cd")])
    assert whole.echoes == [Echo("<|user|>ab cd")]
    cut = prepare([ids], SamplingParams(truncate_prompt_tokens=1), model, MODEL_INFO, echo=[Echo("<|user|>ab cd")])
    assert cut.echoes == [Echo(model.tokenizer.decode(ids[-1:]))]
