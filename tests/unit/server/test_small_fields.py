"""Rarely used fields of completions and chat, each with the features that it combines with."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_llm.common.options.sources import make_options
from serve_llm.server.generate.repetition import RepetitionDetector
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.sampling_params import RepetitionDetection, SamplingParams
from serve_llm.server.schema.chat import ChatCompletion, ChatEvent
from serve_llm.server.schema.completions import Completion
from serve_llm.server.schema.infill import InfillEvent, InfillReply
from support.asgi import Reply
from support.fakes import make_model_info
from support.fill_in_middle import FIM, add_tokens
from support.serving import Served

Serve = Callable[..., Served]
LOOP = "ab ab ab ab ab ab ab ab"
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]


def fold(reply: Reply) -> dict[str, object]:
    """Return the first choice of a completion, streamed or not."""
    assert reply.status == 200, reply.content
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return Completion.model_validate(reply.json(), extra="forbid").choices[0].model_dump()
    choices = [Completion.model_validate(event, extra="forbid").choices[0] for event in reply.events()]
    return choices[-1].model_dump() | {
        "text": "".join(choice.text for choice in choices),
        "token_ids": [one for choice in choices for one in choice.token_ids or ()],
    }


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(2, 4),
)
def test_repetition_is_found_where_it_is(ids: list[int], one: int, other: int, count: int) -> None:
    low, high = sorted((one, other))
    params = RepetitionDetection(min_pattern_size=low, max_pattern_size=high, min_count=count)
    detector = RepetitionDetector(params)
    for length in range(1, len(ids) + 1):
        so_far = ids[:length]
        expected = any(
            length >= size * count and so_far[-size * count :] == so_far[-size:] * count
            for size in range(low, high + 1)
        )
        assert detector.push(ids[length - 1]) == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stop": ["zz"]}], ids=str)
def test_a_text_that_repeats_itself_ends(
    serve: Serve, stream: bool, tokens_per_step: int, more: dict[str, object]
) -> None:
    served = serve(LOOP, tokens_per_step=tokens_per_step)
    ids = served.ids(LOOP)
    detection = {"max_pattern_size": 4, "min_count": 3}
    body = {"stream": stream, "max_tokens": len(ids), "return_token_ids": True, **more}
    found = fold(served.complete(repetition_detection=detection, **body))
    assert found["finish_reason"] == "repetition" and found["stop_reason"] is None
    num_tokens = len(found["token_ids"])
    assert num_tokens < len(ids) and found["token_ids"] == ids[:num_tokens]
    assert found["text"] == served.model.tokenizer.decode(ids[:num_tokens])
    assert not served.engine.open and served.admission.num_open == 0
    later = fold(served.complete(repetition_detection=detection, min_tokens=num_tokens + 2, **body))
    assert len(later["token_ids"]) == num_tokens + 2
    assert fold(served.complete(repetition_detection=detection | {"min_count": 9}, **body))["finish_reason"] == "length"


def test_repetition_in_chat(serve: Serve) -> None:
    reply = serve(LOOP).chat(repetition_detection={"max_pattern_size": 4, "min_count": 3}, max_tokens=20)
    assert ChatCompletion.model_validate(reply.json()).choices[0].finish_reason == "repetition"


def test_tokens_named_by_their_ids(served: Served) -> None:
    options = {"return_tokens_as_token_ids": True, "max_tokens": 2, "return_token_ids": True}
    choice = served.complete(logprobs=2, prompt_logprobs=1, **options).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{one}" for one in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    assert "token_id" not in str(choice["prompt_logprobs"])
    choice = served.chat(logprobs=True, top_logprobs=1, **options).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{one}" for one in choice["token_ids"]]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == choice["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_asked_ids(served: Served, stream: bool) -> None:
    options = {
        "return_tokens_as_token_ids": True,
        "max_tokens": 2,
        "logprob_token_ids": [300, 7, 300],
        "stream": stream,
    }
    reply = served.complete(logprobs=1, **options)
    tops = [
        top
        for body in (reply.events() if stream else [reply.json()])
        for top in body["choices"][0]["logprobs"]["top_logprobs"]
    ]
    assert len(tops) == 2
    assert all((top["token_id:300"], top["token_id:7"]) == (-300.0, -7.0) and 3 <= len(top) <= 4 for top in tops)
    reply = served.chat(logprobs=True, **options)
    entries = [
        entry
        for body in (reply.events() if stream else [reply.json()])
        for entry in (body["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [[top["token"] for top in one["top_logprobs"]] for one in entries] == [["token_id:300", "token_id:7"]] * 2
    for bad, param in (
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [1], "logprobs": 1, "echo": True}, "logprob_token_ids"),
        ({"logprob_token_ids": [10**6], "logprobs": 1}, "logprob_token_ids"),
        ({"logprob_token_ids": list(range(129)), "logprobs": 1}, "logprob_token_ids"),
    ):
        reply = served.complete(**bad)
        assert (reply.status, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
def test_the_times_of_a_request(served: Served, stream: bool) -> None:
    body = {"return_metrics": True, "stream": stream, "max_tokens": 3, "n": 2}
    for call, kind in ((served.complete, Completion), (served.chat, ChatEvent if stream else ChatCompletion)):
        reply = call(**body)
        replies = reply.events() if stream else [reply.json()]
        last = kind.model_validate(replies[-1], extra="forbid").metrics
        assert last.time_to_first_token_ms >= 0 and last.generation_time_ms >= 0 and last.queue_time_ms >= 0
        assert last.tokens_per_second is None or last.tokens_per_second > 0
        assert all("metrics" not in event and "usage" not in event for event in replies[:-1])
    assert "metrics" not in served.complete(max_tokens=1).json()


def test_a_request_names_its_response(served: Served) -> None:
    assert served.complete(request_id="my-1").json()["id"] == "cmpl-my-1"
    assert {event["id"] for event in served.chat(request_id="a/b", stream=True).events()} == {"chatcmpl-a/b"}
    for name in ("", "a b", "x" * 129, "\u00e9", "a\r\nb"):
        reply = served.complete(request_id=name)
        assert (reply.status, reply.json()["error"]["param"]) == (400, "request_id")


@pytest.mark.parametrize(("side", "kept"), [("left", [5, 6]), ("right", [3, 4]), (None, [5, 6])])
def test_the_side_on_which_a_prompt_is_cut(served: Served, side: str | None, kept: list[int]) -> None:
    served.complete(prompt=[3, 4, 5, 6], truncate_prompt_tokens=2, truncation_side=side)
    assert served.engine.submitted[-1].prompt_ids == kept
    with pytest.raises(InvalidRequest, match="truncation_side"):
        SamplingParams(truncation_side="middle")


@pytest.mark.parametrize("content", ["Well, ", [{"type": "text", "text": "Well, "}]])
def test_chat_repeats_the_message_that_it_continues(serve: Serve, content: object) -> None:
    served = serve("yes.<|end|>")
    body = {"messages": [TALK[0], {"role": "assistant", "content": content}], "continue_final_message": True}
    assert served.chat(echo=True, **body).json()["choices"][0]["message"]["content"] == "Well, yes."
    events = served.chat(echo=True, stream=True, **body).events()
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Well, yes."
    assert served.chat(**body).json()["choices"][0]["message"]["content"] == "yes."
    assert served.chat(echo=True).json()["choices"][0]["message"]["content"] == "yes.", "the user spoke last"


def test_documents_reach_templates_that_show_them(serve: Serve, model: ServedModel) -> None:
    documents = [{"title": "a", "text": "b"}]
    refused = serve().chat(documents=documents)
    assert (refused.status, refused.json()["error"]["param"]) == (400, "documents")
    assert refused.json()["error"]["code"] == "unsupported"
    source = "{% for d in documents %}{{ d.title }}={{ d.text }};{% endfor %}{{ messages[0].content }}"
    served = serve(served_model=ServedModel.load(model.directory, make_options("demo", chat_template=source)))
    assert served.chat(documents=documents, max_tokens=1).status == 200
    assert served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids) == "a=b;hi"
    counted = served.post("/tokenize", {"messages": TALK[:1], "documents": documents}).json()
    assert counted["tokens"] == served.engine.submitted[-1].prompt_ids


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "0P1S2"),
        pytest.param(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "0P1S2", marks=pytest.mark.slow),
        pytest.param(
            ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
            "0P1S2",
            marks=pytest.mark.slow,
        ),
        (("[PREFIX]", "[SUFFIX]"), "1S0P"),
        pytest.param(("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), "0P1S2", marks=pytest.mark.slow),
        pytest.param(("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), "0P1S2", marks=pytest.mark.slow),
        pytest.param(("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"), "0P1S2", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_suffix_is_written_as_the_model_knows_it(
    serve: Serve, model: ServedModel, names: tuple[str, ...], order: str
) -> None:
    served = serve(
        "pass", served_model=add_tokens(model, *names, "<|file_sep|>"), model_info=make_model_info(vocab_size=4200)
    )
    assert served.complete(prompt="def f():\n", suffix="\n    return x", max_tokens=2).status == 200
    request = served.engine.submitted[-1]
    texts = {"P": "def f():\n", "S": "\n    return x"} | {str(index): name for index, name in enumerate(names)}
    expected = [one for part in order for one in served.ids(texts[part])]
    assert request.prompt_ids == expected
    assert served.ids("<|file_sep|>")[0] in request.sampling.stop_token_ids
    assert served.complete(prompt="x", suffix="", max_tokens=1).status == 200
    assert served.engine.submitted[-1].prompt_ids == served.ids("x"), "no suffix"
    for body in (
        {"prompt": [3]},
        {"echo": True},
        {"truncate_prompt_tokens": 3},
        {"suffix": "x" * 10**5},
        {"suffix": 3},
    ):
        reply = served.complete(**{"suffix": "x", **body})
        assert (reply.status, reply.json()["error"]["param"]) == (400, "suffix")


def test_a_model_without_such_tokens_refuses_a_suffix(served: Served) -> None:
    error = served.complete(suffix="x").json()["error"]
    assert (error["param"], error["code"]) == ("suffix", "unsupported")


INFILL = {"input_prefix": "def f():\n", "input_suffix": "\n", "n_predict": 8, "top_k": 40, "samplers": ["top_k"]}


def test_infill_is_what_llama_vim_reads(serve: Serve, model: ServedModel) -> None:
    served = serve(
        "pass\nelse", served_model=add_tokens(model, *FIM), model_info=make_model_info(vocab_size=4200), cached_tokens=2
    )
    body = served.post("/infill", INFILL | {"stop": ["\n"], "new_field": 1, "seed": -1}).json()
    found = InfillReply.model_validate(body, extra="forbid")
    assert (found.content, found.stop_type, found.stopping_word) == ("pass", "word", "\n")
    prompt_ids = served.engine.submitted[-1].prompt_ids
    assert prompt_ids == served.ids("<|fim_prefix|>def f():\n<|fim_suffix|>\n<|fim_middle|>")
    assert (found.tokens_evaluated, found.tokens_cached, found.timings.prompt_n) == (
        len(prompt_ids),
        2,
        len(prompt_ids) - 2,
    )
    reply = served.post("/infill", INFILL | {"stream": True, "n_predict": 2, "new_field": 1})
    assert reply.headers["x-ignored-fields"] == "new_field"
    *events, last = [json.loads(line.removeprefix("data: ")) for line in reply.content.decode().split("\n\n")[:-1]]
    assert all(InfillEvent.model_validate(event, extra="forbid") for event in events)
    assert InfillReply.model_validate(last, extra="forbid").stop_type == "limit" and last["tokens_predicted"] == 2
    text = "".join(event["content"] for event in events)
    assert text == model.tokenizer.decode(served.ids("pass\nelse")[:2])
    whole = served.post("/infill", INFILL | {"n_predict": 2}).json()
    assert last | {"content": text, "timings": whole["timings"]} == whole
    assert served.post("/infill", INFILL | {"n_predict": 0}).json()["content"] == ""


@pytest.mark.parametrize("file_token", [(), ("<|file_sep|>",)])
def test_infill_puts_other_files_first(serve: Serve, model: ServedModel, file_token: tuple[str, ...]) -> None:
    served = serve(served_model=add_tokens(model, *FIM, *file_token), model_info=make_model_info(vocab_size=4200))
    extra = [{"filename": "a.py", "text": "x = 1"}, {"text": "y = 2"}]
    assert served.post("/infill", INFILL | {"input_extra": extra, "prompt": "re"}).status == 200
    text = served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)
    files = "<|file_sep|>a.py\nx = 1\n<|file_sep|>snippet\ny = 2\n<|file_sep|>"
    if not file_token:
        files = "--- a.py ---\nx = 1\n\n--- snippet ---\ny = 2\n\n"
    assert text == f"{files}<|fim_prefix|>def f():\n<|fim_suffix|>\n<|fim_middle|>re"


def test_bad_requests_to_fill_in(serve: Serve, model: ServedModel) -> None:
    assert serve().post("/infill", INFILL).json()["error"]["code"] == "unsupported"
    served = serve(served_model=add_tokens(model, *FIM), model_info=make_model_info(vocab_size=4200))
    for body, param in (
        ({"input_prefix": 3}, "input_prefix"),
        ({"input_prefix": "x " * 4000}, "input_prefix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_predict": 4000}, "n_predict"),
        ({"temperature": 3}, "temperature"),
        ({"stop": ["x"] * 129}, "stop"),
    ):
        reply = served.post("/infill", INFILL | body)
        assert (reply.status, reply.json()["error"]["param"]) == (400, param)


def test_invocations_tell_requests_apart(served: Served) -> None:
    chat = served.post("/invocations", {"messages": TALK[:1], "max_tokens": 2}).json()
    assert ChatCompletion.model_validate(chat, extra="forbid").choices[0].message.content
    text = served.post("/invocations", {"prompt": "x", "max_tokens": 2, "stream": True})
    assert [event["object"] for event in text.events()] == ["text_completion"] * 2
    for body, param in (({"input": "x"}, None), ({"query": "x", "documents": ["y"]}, None), ({}, "messages")):
        error = served.post("/invocations", body).json()["error"]
        assert error["param"] == param
    for body in ({"messages": None, "prompt": "x"}, {"prompt": "x", "query": None, "documents": None}):
        assert served.post("/invocations", body | {"max_tokens": 1}).json()["object"] == "text_completion"
    assert served.post("/invocations", {"messages": None, "prompt": None}).status == 400
    assert served.post("/invocations", {"prompt": "x", "n": 0}).json()["error"]["param"] == "n"
    assert served.post("/invocations", b" " * (16 * 2**20 + 1)).status == 413
    assert served.admission.num_open == 0


def test_ping_and_load(serve: Serve) -> None:
    served = serve(options={"api_key": "key"})
    assert served.get("/ping").json() == {"status": "ok"} and served.get("/load").status == 401
    assert served.get("/load", {"x-api-key": "key"}).json() == {"server_load": 0}


BAD = [
    ({"repetition_detection": {}}, "repetition_detection.max_pattern_size"),
    ({"repetition_detection": {"max_pattern_size": 4}}, "repetition_detection.min_count"),
    ({"repetition_detection": {"max_pattern_size": 10**9, "min_count": 2}}, "repetition_detection.max_pattern_size"),
    ({"repetition_detection": {"max_pattern_size": 4, "min_count": 1}}, "repetition_detection.min_count"),
    ({"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}},
     "repetition_detection.min_pattern_size"),
    ({"repetition_detection": {"max_pattern_size": 4, "min_count": 2, "x": 1}}, "repetition_detection.x"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"return_tokens_as_token_ids": 1}, "return_tokens_as_token_ids"),
    ({"return_metrics": "yes"}, "return_metrics"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), BAD, ids=str)
def test_a_bad_field_is_named(served: Served, body: dict[str, object], param: str) -> None:
    for reply in (served.complete(**body), served.chat(**body)):
        assert (reply.status, reply.json()["error"]["param"]) == (400, param)
    assert served.engine.submitted == []


def test_a_body_inside_the_body_is_explained(served: Served) -> None:
    for reply in (served.chat(extra_body={"top_k": 1}), served.complete(extra_body={"top_k": 1})):
        assert reply.status == 400 and "send its fields beside the others" in reply.json()["error"]["message"]  # type: ignore[index]
