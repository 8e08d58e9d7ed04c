"""POST /v1/decisions: the model's prompts, and how its logprobs become answers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from openai.types import Decision

from support.asgi import Reply
from support.serving import Served

Serve = Callable[..., Served]
PREDICATE = {"type": "predicate", "instructions": "It is raining.", "name": "rain"}
CHOICE = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "Who?"}],
    "choices": [{"value": "billing"}, {"value": True, "description": "others"}, {"value": "true"}],
}
SCORE = {
    "type": "score",
    "instructions": "How?",
    "levels": [{"label": "bad"}, {"label": "good", "description": "fine"}],
}


def ask(served: Served, *questions: object, **fields: object) -> Reply:
    return served.post("/v1/decisions", {"input": "Rain.", "questions": list(questions), **fields})


def softmax(ids: list[int]) -> list[float]:
    """Compute the softmax of the fake engine's values for ids: their negatives."""
    weights = [math.exp(min(ids) - one) for one in ids]
    return [weight / sum(weights) for weight in weights]


def test_answers(served: Served) -> None:
    reply = ask(served, PREDICATE, CHOICE, SCORE)
    assert reply.status == 200, reply.content
    decision = Decision.model_validate(reply.json())
    rain, who, how = decision.answers
    labels = [served.ids(label)[0] for label in "ABC"]
    assert (rain.type, rain.name) == ("predicate", "rain")
    assert rain.probability == pytest.approx(softmax(labels[:2])[0])  # type: ignore[union-attr]
    assert (who.type, who.name, who.choice) == ("choice", None, "billing")  # type: ignore[union-attr]
    assert [one.value for one in who.probabilities] == ["billing", True, "true"]  # type: ignore[union-attr]
    shares = softmax(labels)
    assert [one.probability for one in who.probabilities] == pytest.approx(shares)  # type: ignore[union-attr]
    assert who.confidence == pytest.approx(max(shares))  # type: ignore[union-attr]
    assert how.score == pytest.approx(softmax(labels[:2])[1])  # type: ignore[union-attr]
    assert [(one.value, one.label) for one in how.probabilities] == [(0, "bad"), (1, "good")]  # type: ignore[union-attr]
    assert decision.usage.output_tokens == 3 and decision.usage.input_tokens > 60


def test_what_the_engine_is_asked(served: Served) -> None:
    assert ask(served, PREDICATE, CHOICE).status == 200
    first, second = served.engine.submitted
    labels = tuple(served.ids(label)[0] for label in "ABC")
    assert first.sampling.logprob_token_ids == first.sampling.allowed_token_ids == labels[:2]
    assert second.sampling.logprob_token_ids == labels and second.sampling.max_tokens == 1
    text = served.model.tokenizer.decode(second.prompt_ids, skip_special_tokens=False)
    assert "Rain.\n\nWho?\n\nA) billing\nB) true: others\nC) true\n\nAnswer" in text
    text = served.model.tokenizer.decode(first.prompt_ids, skip_special_tokens=False)
    assert "Is this statement true or false?\nIt is raining.\n\nA) true\nB) false" in text


def test_items_as_input(served: Served) -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]},
    ]
    reply = ask(served, PREDICATE, input=items, safety_identifier="x", surprise=1)
    assert reply.status == 200 and reply.headers["x-ignored-fields"] == "surprise"
    text = served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)
    assert text.index("Hi") < text.index("Yes.") < text.index("It is raining.")


BAD: list[tuple[dict[str, object], str]] = [
    ({"questions": []}, "questions"),
    ({"questions": [{}]}, "questions[0].type"),
    ({"questions": [{"type": "rank", "instructions": "x"}]}, "questions[0].type"),
    ({"questions": [PREDICATE, {**PREDICATE, "choices": []}]}, "questions[1].choices"),
    ({"questions": [{"type": "choice", "instructions": "x"}]}, "questions[0].choices"),
    ({"questions": [{**CHOICE, "choices": [{"value": "a"}]}]}, "questions[0].choices"),
    ({"questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]}, "questions[0].choices"),
    ({"questions": [{**SCORE, "levels": [{"label": str(one)} for one in range(63)]}]}, "questions[0].levels"),
    ({"questions": [{**PREDICATE, "instructions": [{"type": "input_image"}]}]}, "questions[0].instructions[0]"),
    ({"questions": [PREDICATE], "input": []}, "input"),
    ({"questions": [PREDICATE], "input": "x" * 100_000}, "input"),
    ({"questions": [PREDICATE] * 2049}, "questions"),
    ({"questions": [PREDICATE], "model": "other"}, "model"),
]


def test_json_is_shown_as_text(served: Served) -> None:
    data = {"type": "input_json", "data": {"city": "Málaga", "days": [1, None]}}
    listed = {"type": "input_json", "data": [{"rain": True}]}
    question = {**PREDICATE, "instructions": [listed, {"type": "input_text", "text": "It rains."}]}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Look:"}, data]}]
    assert ask(served, question, input=items).status == 200
    text = served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)
    assert 'Look:\n{"city": "Málaga", "days": [1, null]}' in text and '[{"rain": true}]\nIt rains.' in text


@pytest.mark.parametrize("data", ["x", None, 3, [1], [{}, "x"]], ids=str)
def test_json_must_be_objects(served: Served, data: object) -> None:
    part = {"type": "input_json", "data": data}
    reply = ask(served, PREDICATE, input=[{"role": "user", "content": [part]}])
    assert reply.status == 400 and reply.json()["error"]["param"] == "input[0].content[0].data"
    reply = ask(served, {**PREDICATE, "instructions": [part]})
    assert reply.status == 400 and reply.json()["error"]["param"] == "questions[0].instructions[0].data"


@pytest.mark.parametrize(("fields", "param"), BAD, ids=range(len(BAD)))
def test_bad_requests(served: Served, fields: dict[str, object], param: str) -> None:
    reply = ask(served, **fields)
    assert reply.status in (400, 404), reply.content
    assert reply.json()["error"]["param"] == param  # type: ignore[index]
    assert served.engine.submitted == []
