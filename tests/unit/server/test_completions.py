"""POST /v1/completions on a scripted engine: texts, choices, usage, echo, logprobs, streams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.processors import TemplateProcessing

from serve_llm.common.types import EngineCoreRequest
from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.schema.completions import Completion, CompletionLogprobs
from support.fakes import logprobs_of
from support.serving import TEXT, Served

Serve = Callable[..., Served]


def completion(reply) -> Completion:
    """Send a request. Returns the response, checked against the documented schema."""
    assert reply.status == 200, reply.content
    return Completion.model_validate(reply.json(), strict=False, extra="forbid")


def events(reply) -> list[Completion]:
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
    return [Completion.model_validate(event, extra="forbid") for event in reply.events()]


def test_a_plain_completion(served: Served) -> None:
    found = completion(served.complete(max_tokens=5))
    assert found.choices[0].text == served.model.tokenizer.decode(served.ids(TEXT)[:5])
    assert (found.choices[0].finish_reason, found.choices[0].index) == ("length", 0)
    assert found.id.startswith("cmpl-") and found.model == "demo" and found.system_fingerprint.startswith("fp_")
    assert found.usage is not None
    assert found.usage.model_dump(exclude_unset=True) == {
        "prompt_tokens": 1,
        "completion_tokens": 5,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_without_max_tokens_there_are_sixteen(served: Served) -> None:
    usage = completion(served.complete()).usage
    assert usage is not None and usage.completion_tokens == 16


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_streamed_text_is_the_unstreamed_text(serve: Serve, tokens_per_step: int) -> None:
    served = serve(tokens_per_step=tokens_per_step)
    size = len(served.ids(TEXT))
    whole = completion(served.complete(max_tokens=size)).choices[0]
    assert whole.text == TEXT
    streamed = events(served.complete(max_tokens=size, stream=True))
    assert "".join(event.choices[0].text for event in streamed) == TEXT
    assert [event.choices[0].finish_reason for event in streamed] == [None] * (len(streamed) - 1) + ["length"]
    assert len(streamed) > 3
    assert len({event.id for event in streamed}) == 1
    assert all(event.usage is None and "usage" not in event.model_fields_set for event in streamed)


@pytest.mark.parametrize(
    "prompt", ["ab", ["ab"], [3, 4, 5], [[3, 4, 5]]], ids=["string", "strings", "ids", "lists of ids"]
)
def test_every_form_of_prompt(served: Served, prompt: object) -> None:
    completion(served.complete(prompt=prompt))
    (request,) = served.engine.submitted
    assert request.prompt_ids == ([3, 4, 5] if "3" in str(prompt) else served.ids("ab"))


def test_choices_are_numbered_by_prompt_and_n_and_prompts_count_once(serve: Serve, model) -> None:
    texts = ["zero", "one", "two", "three"]

    def script(request: EngineCoreRequest) -> list[int]:
        prompt = 0 if request.prompt_ids == [3] else 1
        return model.tokenizer.encode(texts[prompt * 2 + request.sampling.choice], add_special_tokens=False)

    served = serve(script=script, cached_tokens=1)
    body = {"prompt": [[3], [4, 5]], "n": 2, "seed": 7, "max_tokens": 1, "temperature": 1}
    found = completion(served.complete(**body))
    first_tokens = [model.tokenizer.decode(served.ids(text)[:1]) for text in texts]
    assert [(choice.index, choice.text) for choice in found.choices] == list(enumerate(first_tokens))
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, 4)
    assert found.usage.prompt_tokens_details.cached_tokens == 2  # the first choice of each prompt
    assert [request.sampling.choice for request in served.engine.submitted] == [0, 1, 0, 1]
    assert {request.sampling.seed for request in served.engine.submitted} == {7}
    streamed = events(served.complete(**body, stream=True))
    assert sorted((event.choices[0].index, event.choices[0].text) for event in streamed) == list(
        enumerate(first_tokens)
    )


def test_a_request_without_seed_gets_one_for_each_prompt(serve: Serve) -> None:
    served = serve()
    served.complete(prompt=[[3], [3]], n=2)
    seeds = [request.sampling.seed for request in served.engine.submitted]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    served.complete(prompt=[3])
    assert served.engine.submitted[-1].sampling.seed not in seeds


def test_the_seed_option_makes_drawn_seeds_repeatable(serve: Serve) -> None:
    drawn = []
    for _ in range(2):
        served = serve(options={"seed": 5})
        served.complete(prompt=[[3], [4]])
        drawn.append([request.sampling.seed for request in served.engine.submitted])
    assert drawn[0] == drawn[1]


def test_a_stop_string_ends_the_text_and_the_engines_request(serve: Serve) -> None:
    served = serve("one two three four")
    found = completion(served.complete(stop=["wo th", "zzz"])).choices[0]
    assert (found.text, found.finish_reason, found.stop_reason) == ("one t", "stop", "wo th")
    assert len(served.engine.aborted) == 1 and not served.engine.open
    kept = completion(served.complete(stop="wo th", include_stop_str_in_output=True)).choices[0]
    assert kept.text == "one two th"
    streamed = events(served.complete(stop="wo th", stream=True))
    assert "".join(event.choices[0].text for event in streamed) == "one t"


def test_end_ids(serve: Serve) -> None:
    served = serve("ab<|end|>cd")
    end = served.ids("<|end|>")[0]
    found = completion(served.complete(return_token_ids=True)).choices[0]
    assert (found.text, found.finish_reason, found.stop_reason) == ("ab", "stop", None)
    assert found.token_ids is not None and found.token_ids[-1] == end
    ignored = completion(served.complete(ignore_eos=True, max_tokens=5)).choices[0]
    assert (ignored.finish_reason, ignored.text[:4]) == ("length", "abcd")
    shown = completion(served.complete(ignore_eos=True, max_tokens=5, skip_special_tokens=False)).choices[0]
    assert shown.text.startswith("ab<|end|>cd")
    own = completion(served.complete(stop_token_ids=[served.ids("ab")[0]])).choices[0]
    assert own.stop_reason == served.ids("ab")[0]


def test_min_tokens_puts_off_stop_strings(serve: Serve) -> None:
    served = serve("xy xy xy")
    found = completion(served.complete(stop="x", min_tokens=len(served.ids("xy xy")))).choices[0]
    assert found.text == "xy xy "


def test_logprobs(serve: Serve) -> None:
    served = serve("ab cd")
    ids = served.ids("ab cd")
    tokens = [served.model.tokenizer.token_text(one) for one in ids]
    for k in (0, 3):
        found = completion(served.complete(logprobs=k, max_tokens=len(ids))).choices[0].logprobs
        assert found is not None
        assert found.tokens == tokens
        assert found.token_logprobs == [logprobs_of(one, k).logprob for one in ids]
        assert found.text_offset == [len("".join(tokens[:place])) for place in range(len(tokens))]
        assert all(top is not None and token in top for top, token in zip(found.top_logprobs, tokens, strict=True))
        assert all(top is not None and k <= len(top) <= k + 1 for top in found.top_logprobs) or k == 0
    streamed = events(served.complete(logprobs=3, max_tokens=len(ids), stream=True))
    assert joined([event.choices[0].logprobs for event in streamed]) == found.model_dump()


def joined(parts: list[CompletionLogprobs | None]) -> dict[str, list[object]]:
    whole: dict[str, list[object]] = {}
    for part in parts:
        assert part is not None
        for name, values in part.model_dump().items():
            whole[name] = whole.get(name, []) + values
    return whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_what_lm_eval_sends(serve: Serve, max_tokens: int, stream: bool) -> None:
    served = serve("cd")
    prompts = [served.ids("def main():\n    pass"), served.ids("x = 1")]
    body = {"prompt": prompts, "max_tokens": max_tokens, "logprobs": 1, "echo": True, "seed": 1234, "stream": stream}
    if stream:
        pieces = events(served.complete(**body))
        by_choice = [[event.choices[0] for event in pieces if event.choices[0].index == index] for index in (0, 1)]
        found = [("".join(one.text for one in own), joined([one.logprobs for one in own])) for own in by_choice]
    else:
        choices = completion(served.complete(**body)).choices
        found = [(choice.text, joined([choice.logprobs])) for choice in choices]
    generated = served.ids("cd")[:max_tokens]
    for ids, (text, logprobs) in zip(prompts, found, strict=True):
        assert text == served.model.tokenizer.decode(ids + generated)
        assert len(logprobs["tokens"]) == len(ids) + max_tokens
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == [logprobs_of(one, 1).logprob for one in ids[1:] + generated]
        for own, top in zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert own in top.values() and own <= max(top.values())
        assert "".join(logprobs["tokens"]) == text


def test_echo_keeps_the_prompt_as_it_was_sent(served: Served) -> None:
    found = completion(served.complete(prompt="<|user|>hi", echo=True, max_tokens=0)).choices[0]
    assert (found.text, found.finish_reason) == ("<|user|>hi", "length")


def test_offsets_of_an_echo_count_special_tokens(serve: Serve) -> None:
    """Those in the text count; one that the tokenizer adds does not."""
    served = serve("x")
    body = {"echo": True, "logprobs": 0, "max_tokens": 1}
    text = "<|user|>hello<|assistant|>"
    for prompt in (text, served.ids(text)):
        found = completion(served.complete(prompt=prompt, **body)).choices[0]
        assert found.text == text + "x"
        assert found.logprobs.text_offset == [0, 8, 10, 11, 13, 26]
    tokenizer = served.model.tokenizer
    tokenizer = Tokenizer(RustTokenizer.from_str(tokenizer.rust.to_str()), tokenizer.named_tokens)
    tokenizer.rust.post_processor = TemplateProcessing("<|user|> $A <|end|>", None, [("<|user|>", 4), ("<|end|>", 1)])
    begins = serve("x", served_model=replace(served.model, tokenizer=tokenizer))
    found = completion(begins.complete(prompt="hello", **body)).choices[0]
    assert (found.text, found.logprobs.text_offset) == ("hellox", [0, 0, 2, 3, 5, 5])
    assert found.logprobs.tokens[0] == "<|user|>"
    found = completion(begins.complete(prompt="hello", truncate_prompt_tokens=2, **body)).choices[0]
    assert (found.text, found.logprobs.text_offset) == ("lo<|end|>x", [0, 2, 9])


def test_prompt_logprobs(served: Served) -> None:
    ids = served.ids("ab cd")
    found = completion(served.complete(prompt=ids, prompt_logprobs=2, max_tokens=1)).choices[0].prompt_logprobs
    assert found is not None and found[0] is None and len(found) == len(ids)
    own = found[1][str(ids[1])]
    expected = logprobs_of(ids[1], 2)
    assert (own.logprob, own.rank) == (expected.logprob, expected.rank)
    assert own.decoded_token == served.model.tokenizer.token_text(ids[1])


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(serve: Serve, stream: bool) -> None:
    served = serve("one two three")
    ids = served.ids("one two three")
    body = {"prompt": [3, 4], "max_tokens": len(ids), "return_token_ids": True, "stream": stream}
    reply = served.complete(**body)
    choices = [event.choices[0] for event in events(reply)] if stream else completion(reply).choices
    assert [one for choice in choices for one in choice.token_ids] == ids
    assert choices[0].prompt_token_ids == [3, 4]
    assert all(choice.prompt_token_ids is None for choice in choices[1:])


def test_usage_in_streams(serve: Serve) -> None:
    served = serve("a b c d", cached_tokens=1)
    body = {"max_tokens": 4, "stream": True}
    streamed = served.complete(**body, stream_options={"include_usage": True}).events()
    assert all(event["usage"] is None for event in streamed[:-1])
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"] == served.complete(max_tokens=4).json()["usage"]
    streamed = served.complete(**body, stream_options={"continuous_usage_stats": True}).events()
    assert [event["usage"]["completion_tokens"] for event in streamed] == [1, 2, 3, 4]


def test_every_parameter_reaches_the_engine(served: Served) -> None:
    served.complete(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=0.2, frequency_penalty=0.3,
        repetition_penalty=1.1, logit_bias={"5": 1.5}, seed=-3, max_tokens=9, min_tokens=2, allowed_token_ids=[5, 6],
        stop_token_ids=[8], priority=4, cache_salt="s", logprobs=1,
    )  # fmt: skip
    (request,) = served.engine.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    assert penalties == (0.2, 0.3, 1.1)
    assert (sampling.logit_bias, sampling.seed, sampling.logprobs) == ({5: 1.5}, 2**64 - 3, 1)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.allowed_token_ids) == (9, 2, (5, 6))
    assert sampling.stop_token_ids == (8, 0, 1)
    assert (request.priority, request.cache_salt) == (4, "s")


def test_a_top_p_of_zero_takes_the_most_likely_token(served: Served) -> None:
    assert served.complete(temperature=1.5, top_p=0, top_k=7).status == 200
    sampling = served.engine.submitted[-1].sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (1, 1.0, 1.5)


def test_many_stop_strings(served: Served) -> None:
    stops = [f"\nname{number}:" for number in range(127)]
    whole = completion(served.complete(max_tokens=20)).choices[0].text
    assert completion(served.complete(max_tokens=20, stop=[*stops, whole[2:4]])).choices[0].text == whole[:2]


def test_null_is_absent_and_harmless_fields_are_accepted(served: Served) -> None:
    names = ("temperature", "n", "stop", "seed", "logprobs", "best_of", "suffix", "stream", "echo", "max_tokens")
    assert completion(served.complete(**dict.fromkeys(names))).choices[0].finish_reason == "length"
    harmless = {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "safety_identifier": "x"}
    assert served.complete(**harmless, prompt_cache_key="k").status == 200


def test_the_form_of_a_completion(served: Served) -> None:
    assert served.complete(response_format={"type": "text"}).status == 200
    assert served.complete(response_format={"type": "json_object"}).status == 200
    assert served.engine.submitted[-1].sampling.grammar


BAD: list[tuple[dict[str, object], int, str | None]] = [
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": 3}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": ["a", 3]}, 400, "prompt"),
    ({"prompt": [3, 99999]}, 400, "prompt"),
    ({"prompt": "x" * 100_000}, 400, "prompt"),
    ({"prompt": ["x"] * 2049}, 400, "prompt"),
    ({"model": "other"}, 404, "model"),
    ({"model": 3}, 400, "model"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "1"}, 400, "temperature"),
    ({"temperature": True}, 400, "temperature"),
    ({"top_p": -0.1}, 400, "top_p"),
    ({"n": 0}, 400, "n"),
    ({"n": 1.5}, 400, "n"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 2048}, 400, "max_tokens"),
    ({"max_tokens": 10**400}, 400, "max_tokens"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"stop": ["x"] * 129}, 400, "stop"),
    ({"stop": {"a": 1}}, 400, "stop"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias.x"),
    *(
        ({"logit_bias": {key: 1}}, 400, "logit_bias")
        for key in ("1.0", "01", "+1", "1_0", " 1", "\uff11", "", "9" * 5000)
    ),
    ({"logit_bias": {"5": 101}}, 400, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, 400, "logit_bias"),
    ({"best_of": 2}, 400, "best_of"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"best_of": True}, 400, "best_of"),
    ({"use_beam_search": True}, 400, "use_beam_search"),
    ({"length_penalty": 1.2}, 400, "length_penalty"),
    ({"typical_p": True}, 400, "typical_p"),
    ({"typical_p": 0.9}, 400, "typical_p"),
    ({"guided_regex": "("}, 400, "guided_regex"),
    ({"logits_processors": ["x"]}, 400, "logits_processors"),
    ({"max_new_tokens": -1}, 400, "max_new_tokens"),
    ({"max_new_tokens": 3, "max_tokens": 4}, 400, "max_new_tokens"),
    ({"rep_pen": 0}, 400, "rep_pen"),
    ({"stopping_strings": 3}, 400, "stopping_strings"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, 400, "structured_outputs"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"include": True}}, 400, "stream_options.include"),
    ({"priority": 2**40}, 400, "priority"),
    ({"cache_salt": ""}, 400, "cache_salt"),
    ({"tempratur": 1}, 400, "tempratur"),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_named(served: Served, body: dict[str, object], status: int, param: str | None) -> None:
    reply = served.complete(**body)
    error = reply.json()["error"]
    assert (reply.status, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] == "invalid_request_error"
    assert served.engine.submitted == []


def test_errors_say_what_helps(served: Served) -> None:
    def message(**body: object) -> str:
        return served.complete(**body).json()["error"]["message"]

    assert "temperature" in message(tempratur=1)  # the most similar name
    assert "/v1/chat/completions" in message(messages=[])
    for name, route in (("prompt", "/v1/completions"), ("input", "/v1/responses")):
        assert route in served.chat(**{name: "x"}).json()["error"]["message"]
    for prompt in (3, {}, [{"text": "x"}], [None]):
        assert "a list of texts" in message(prompt=prompt)
    assert "'other'" in message(model="other") and "demo" in message(model="other")
    too_long = served.complete(prompt=[5] * 2100).json()["error"]
    assert "2100" in too_long["message"] and "2048" in too_long["message"]
    assert too_long["code"] == "context_length_exceeded"
    assert served.complete(best_of=2).json()["error"]["code"] == "unsupported"
    assert message(use_beam_search=True) == "use_beam_search is not supported; beam search is not implemented, use n"
    assert served.complete(model="x").json()["error"]["code"] == "model_not_found"


MALFORMED = [b"{", b"", b"[]", b"3", b"null", b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "\\ud800"}',
             b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 100_000, b'{"prompt": "x", "logit_bias": {"5": Infinity}}',
             b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}"]  # fmt: skip


@pytest.mark.parametrize("body", MALFORMED, ids=lambda body: str(body[:30]))
def test_malformed_json_is_answered(served: Served, body: bytes) -> None:
    reply = served.post("/v1/completions", body)
    assert reply.status == 400 and reply.json()["error"]["message"]


def test_a_body_that_is_too_long_is_refused(served: Served) -> None:
    assert served.post("/v1/completions", b" " * (16 * 2**20 + 1)).status == 413


def test_a_body_of_too_many_values_is_refused_unparsed(served: Served) -> None:
    """Parsing it would stall every stream for seconds."""
    reply = served.post("/v1/completions", b'{"prompt":[' + b"5," * 2**20 + b"5]}")
    assert reply.status == 413 and "values" in reply.json()["error"]["message"]
