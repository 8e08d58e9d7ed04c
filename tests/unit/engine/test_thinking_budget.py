"""A request's reasoning is closed when its budget is spent, and nothing else is cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from serve_llm.common.types import EngineCoreRequest, FinishReason, Sampling, ThinkingBudget
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.structured_output.thinking import ThinkingTracker
from support.engine import generate, make_engine
from support.gpu_path import make_gpu_engine
from support.grammars import EOS, demo, ids_of, text_of, tokenizer

OPTIONS: dict[str, object] = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory": "64MiB"}
OPEN = ids_of("<think>")
CLOSE = ids_of("</think>")
CALL = ids_of("<call>")
# Reasoning without "<", its end, then a short answer, as llguidance writes a grammar.
TURN = 'start: /[^<]*/ "</think>" /[a-z]{3}/'


@pytest.fixture(scope="module")
def engine() -> EngineCore:
    return make_engine(demo(), **OPTIONS)


def budget(num_tokens: int, **how: object) -> ThinkingBudget:
    return ThinkingBudget(num_tokens=num_tokens, close_ids=tuple(CLOSE), **({"is_open": True} | how))


def thinking(number: int, chosen: ThinkingBudget, grammar: str = "", **sampling: object) -> EngineCoreRequest:
    given = {"max_tokens": 40, "seed": number, "temperature": 0.0} | sampling
    if grammar:
        grammar = json.dumps({"grammars": [{"lark_grammar": grammar}]})
    return EngineCoreRequest(
        id=number, prompt_ids=ids_of("import os\n"), sampling=Sampling(grammar=grammar, thinking=chosen, **given)
    )


def test_a_spent_budget_closes_the_reasoning(engine: EngineCore) -> None:
    free = generate(engine, [thinking(1, budget(1000))])[1]
    for num_tokens in (0, 1, 5, 12):
        for sampling in ({}, {"logprobs": 1}, {"allowed_token_ids": (*range(4096),)}):
            found = generate(engine, [thinking(1, budget(num_tokens), **sampling)])[1]
            assert found.token_ids[:num_tokens] == free.token_ids[:num_tokens]
            assert found.token_ids[num_tokens : num_tokens + len(CLOSE)] == CLOSE
            assert len(found.token_ids) == 40 and found.finish_reason is FinishReason.LENGTH
            assert len(found.logprobs) == (40 if "logprobs" in sampling else 0)
            assert text_of(found.token_ids).count("</think>") == 1


@pytest.mark.slow
def test_it_is_the_same_one_by_one_over_ranks_and_with_steps_in_flight(
    engine: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        thinking(number, budget(number), temperature=1.0, logprobs=number % 2 or None, max_tokens=25)
        for number in range(8)
    ]
    expected = {number: result.token_ids for number, result in generate(engine, requests).items()}
    others = [
        make_engine(demo(), **OPTIONS, jump_forward=False),
        make_engine(demo(), **OPTIONS, tensor=2),
        make_engine(demo(), **OPTIONS, pipeline=2),
        make_gpu_engine(demo(), monkeypatch, **OPTIONS),
    ]
    for other in others:
        assert {number: result.token_ids for number, result in generate(other, requests).items()} == expected


def test_the_choices_of_requests_that_are_preempted(engine: EngineCore) -> None:
    requests = [
        thinking(
            4 * number + choice,
            budget(20 + 10 * number),
            "" if number % 2 else TURN,
            temperature=1.0,
            choice=choice,
            max_tokens=60,
        )
        for number in range(4)
        for choice in range(4)
    ]
    expected = {number: result.token_ids for number, result in generate(engine, requests).items()}
    assert len(set(map(tuple, expected.values()))) > 4
    small = make_engine(
        demo(), **(OPTIONS | {"kv_cache_memory": 9 * engine.kv_cache_config.block_bytes, "max_model_len": 144})
    )
    assert {number: result.token_ids for number, result in generate(small, requests).items()} == expected
    assert small.scheduler.stats().num_preemptions > 0


def test_continued_from_any_id(engine: EngineCore) -> None:
    request = thinking(3, budget(6), temperature=1.0)
    whole = generate(engine, [request])[3].token_ids
    requests = [replace(request, id=cut, output_ids=whole[:cut]) for cut in range(1, len(whole))]
    for cut, rest in generate(engine, requests).items():
        assert rest.token_ids == whole[cut:]


def test_a_grammar_takes_the_end_in(engine: EngineCore) -> None:
    for num_tokens in (0, 4, 9):
        requests = [
            thinking(number, budget(num_tokens), TURN, temperature=1.5, logit_bias={CLOSE[0]: -100.0})
            for number in range(5)
        ]
        for result in generate(engine, requests).values():
            reasoning, _, answer = text_of(result.token_ids).partition("</think>")
            assert len(answer) == 3 and answer.isalpha() and result.finish_reason is FinishReason.STOP
            assert "<" not in reasoning


def test_an_end_that_the_grammar_does_not_allow_waits(engine: EngineCore) -> None:
    """For example inside a call. The budget is spent after 2 tokens; the end may come after 12 characters."""
    grammar = 'start: /[a-z]{12}/ "</think>" /[a-z]{3}/'
    result = generate(engine, [thinking(1, budget(2), grammar)])[1]
    reasoning, _, answer = text_of(result.token_ids).partition("</think>")
    assert (len(reasoning), len(answer)) == (12, 3)


def test_forbidden_ids_of_the_end_are_an_error(engine: EngineCore) -> None:
    request = thinking(1, budget(2), bad_words_ids=((CLOSE[1],),))
    engine.add_requests([request])
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    assert "bad_words" in (outputs[-1].error or "")


def follow(chosen: ThinkingBudget, text: str) -> list[int]:
    """Return the ids that must follow a text."""
    tracker = ThinkingTracker(chosen, lambda ids: text_of(ids).encode())
    tracker.push(ids_of(text))
    return tracker.find_close_ids()


def test_reasoning_opens_at_the_start_of_the_text_alone() -> None:
    second = tuple(ids_of("Thoughts:"))
    chosen = budget(3, open_ids=(tuple(OPEN), second), call_open_ids=(tuple(CALL),), ends_at_call=True, is_open=False)
    assert follow(chosen, "a b c d e f") == []
    assert follow(chosen, " <think>") == []
    assert follow(chosen, "\n <think>a b c d e f") == CLOSE
    assert follow(chosen, "Thoughts: a b c d e f") == CLOSE
    assert follow(chosen, "<think>a b c d</think> e f g h") == []
    assert follow(chosen, "<think>a b c d<call> e f g h") == []
    assert follow(chosen, "<think>a b c d</think> the tag <think> opens it, e f g") == []
    assert follow(chosen, "the tag <think> opens it, e f g") == []


def test_reasoning_that_repeats_opens_outside_calls() -> None:
    chosen = budget(
        3,
        open_ids=(tuple(OPEN),),
        is_open=False,
        repeats=True,
        call_open_ids=(tuple(CALL),),
        call_close_ids=(tuple(ids_of("</call>")),),
    )
    assert follow(chosen, "x<think>a b c d e f") == CLOSE
    assert follow(chosen, "<think>a b c d</think> e<think>") == CLOSE
    assert follow(chosen, "x<call>a <think> b c d e f") == []
    assert follow(chosen, "x<call>a <think> b</call> c d e f") == []
    assert follow(chosen, "x<call>a</call><think>b c d e f") == CLOSE
    assert follow(chosen, "<think>a b c d<call> e f g h") == CLOSE, "calls do not end it"


def test_a_part_of_the_closing_delimiter_is_not_written_again() -> None:
    tracker = ThinkingTracker(budget(2), lambda ids: text_of(ids).encode())
    tracker.push([*ids_of("a b c"), CLOSE[0]])
    assert tracker.find_close_ids() == CLOSE[1:]


def test_a_character_is_completed_before_the_reasoning_closes() -> None:
    pieces = [b"a ", "\N{ROCKET}".encode()[:1], "\N{ROCKET}".encode()[1:3], "\N{ROCKET}".encode()[3:], b"b"]
    for spent, expected in ((0, [9]), (1, [9]), (2, []), (3, []), (4, [9]), (5, [9])):
        chosen = ThinkingBudget(num_tokens=0, close_ids=(9,), is_open=True)
        tracker = ThinkingTracker(chosen, lambda ids: b"".join(b"</t>" if one == 9 else pieces[one] for one in ids))
        tracker.push(range(spent))
        assert tracker.find_close_ids() == expected, spent
    tracker.push([1, 4])  # incomplete characters delay nothing
    assert tracker.find_close_ids() == [9]


@given(st.lists(st.sampled_from([*OPEN, *CLOSE, *ids_of("ab <call>")]), max_size=30), st.integers(0, 30))
def test_pushing_in_parts_is_pushing_at_once(ids: list[int], cut: int) -> None:
    chosen = budget(4, open_ids=(tuple(OPEN),), repeats=True, ends_at_call=True, call_open_ids=(tuple(CALL),))
    whole = ThinkingTracker(chosen, lambda ids: text_of(ids).encode())
    parts = ThinkingTracker(chosen, lambda ids: text_of(ids).encode())
    whole.push(ids)
    parts.push(ids[:cut])
    parts.push(ids[cut:])
    assert whole.find_close_ids() == parts.find_close_ids()


def test_a_delimiter_that_is_one_token(tmp_path: Path) -> None:
    """As in reasoning models: an added token, which never appears in ordinary text."""
    for path in demo().iterdir():
        (tmp_path / path.name).symlink_to(path)
    raw = json.loads((demo() / "tokenizer.json").read_text())
    (special,) = (token for token in raw["added_tokens"] if token["content"] == "<|tool|>")
    special["content"] = "</think>"
    raw["model"]["vocab"]["</think>"] = raw["model"]["vocab"].pop("<|tool|>")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    close = special["id"]
    chosen = ThinkingBudget(num_tokens=3, close_ids=(close,), is_open=True)
    engine = make_engine(tmp_path, **OPTIONS)
    lark = "start: /(?s:.*)/ </think> /[a-z]{3}/"
    results = generate(engine, [thinking(1, chosen), thinking(2, chosen, lark, logit_bias={EOS: -100.0})])
    assert [result.token_ids.index(close) for result in results.values()] == [3, 3]
    assert tokenizer().decode(results[2].token_ids[4:]).isalpha()
