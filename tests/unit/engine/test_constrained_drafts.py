"""Drafts under a grammar or a thinking budget: the text, its end and its logprobs are those without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_llm.common.types import EngineCoreRequest, ThinkingBudget, TokenLogprobs
from serve_llm.engine.scheduler import speculation
from serve_llm.engine.scheduler.output import RunnerOutput
from serve_llm.engine.structured_output import state
from support.eagle import Served, build_head, write_head
from support.engine import Result, assert_equal, generate, make_engine
from support.gpu_path import make_gpu_engine
from support.grammars import EOS, SCHEMA, compile_grammar, constrained, demo, ids_of
from support.matrix import mostly_slow
from support.speculation import NGRAM, assert_drafted, draft_freely, draft_from

OPTIONS: dict[str, object] = {
    "dtype": "float32",
    "max_model_len": 512,
    "kv_cache_memory": "64MiB",
    "speculative_config": "none",
}
ON = OPTIONS | {"speculative_config": NGRAM}
HOWS: dict[str, dict[str, object]] = {
    "plain": {},
    "one by one": {"jump_forward": False},
    "two ranks": {"tensor": 2},
    "two stages": {"pipeline": 2},
    "chunks": {"max_num_batched_tokens": 9},
}
STYLES: list[dict[str, object]] = [
    {},
    {"temperature": 0.0},
    {"logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logprobs": 0},
    {"max_tokens": 7},
    {"min_tokens": 30},
    {"bad_words_ids": ((5, 6), (7,))},
]


def make_requests(count: int = 20) -> list[EngineCoreRequest]:
    grammars = [
        compile_grammar(json=SCHEMA),
        compile_grammar(json=SCHEMA, disable_any_whitespace=True),
        compile_grammar(regex="[a-z]{2,12}( [a-z]{2,12})?"),
        compile_grammar(choice=["unconditionally", "never"]),
        "",
    ]
    requests = []
    for number in range(count):
        style = {"max_tokens": 60} | STYLES[number % len(STYLES)]
        if number % 7 == 3:
            budget = ThinkingBudget(num_tokens=4, close_ids=tuple(ids_of("</think>")), is_open=True)
            style |= {"thinking": budget}
        requests.append(constrained(number, grammars[number % 5] if number % 7 != 3 else "", "x = 1\n" * 3, **style))
    return requests


@pytest.fixture(autouse=True)
def masks_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat masks as cheap even if the machine is busy."""
    monkeypatch.setattr(state, "COSTLY_SECONDS", 1000.0)


@pytest.fixture(scope="module")
def expected() -> dict[int, Result]:
    return generate(make_engine(demo(), **OPTIONS), make_requests())


@pytest.mark.pairs("speculation + grammar")
@pytest.mark.parametrize("how", mostly_slow(HOWS, ["plain", "two ranks"]))
def test_same_output(how: str, expected: dict[int, Result]) -> None:
    engine = draft_from(make_engine(demo(), **(ON | HOWS[how])), make_requests(), expected)
    arrivals = [number // 3 for number in range(20)]
    assert_equal(generate(engine, make_requests(), arrivals), expected, is_exact=how not in ("two ranks", "one by one"))
    assert_drafted(engine)


@pytest.mark.parametrize("how", mostly_slow(HOWS, ["plain", "two ranks"]))
def test_thinking_budgets_without_a_grammar(how: str) -> None:
    """Drafts are verified up to the end of the budget, which is forced, and after it."""
    styles: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "logprobs": 2},
        {"temperature": 1.0, "bad_words_ids": ((5, 6),)},  # no token is forced
    ]
    requests = []
    for number in range(24):
        budget = ThinkingBudget(num_tokens=number // 2, close_ids=tuple(ids_of("</think>")), is_open=True)
        style = {"max_tokens": 40, "thinking": budget} | styles[number % 3]
        requests.append(constrained(number, "", "x = 1\n" * 3, **style))
    expected = generate(make_engine(demo(), **OPTIONS), requests)
    engine = draft_from(make_engine(demo(), **(ON | HOWS[how])), requests, expected)
    assert_equal(generate(engine, requests), expected, is_exact=how not in ("two ranks", "one by one"))
    assert_drafted(engine)
    assert engine.scheduler.stats().num_accepted_tokens > 200


@pytest.mark.slow
def test_same_output_with_steps_in_flight(expected: dict[int, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = draft_from(make_gpu_engine(demo(), monkeypatch, **ON), make_requests(), expected)
    assert_equal(generate(engine, make_requests()), expected, is_exact=False)
    assert_drafted(engine)


def test_same_output_after_preemption() -> None:
    options = {"max_model_len": 144}
    roomy = make_engine(demo(), **(OPTIONS | options))
    expected = generate(roomy, make_requests())
    memory = {"kv_cache_memory": 9 * roomy.kv_cache_config.block_bytes}
    engine = draft_from(make_engine(demo(), **(ON | options | memory)), make_requests(), expected)
    assert_equal(generate(engine, make_requests()), expected)
    assert_drafted(engine)
    assert engine.scheduler.stats().num_preemptions > 0


def test_right_drafts_of_a_grammar_are_accepted_up_to_the_end_of_the_text() -> None:
    """A text ends where its grammar allows nothing more, even if the model would then write a stop id."""
    requests = [constrained(1, compile_grammar(regex="[a-z]{20,24}"), max_tokens=60, logprobs=1)]
    expected = generate(make_engine(demo(), **OPTIONS), requests)
    engine = draft_from(make_engine(demo(), **ON), requests, expected, wrong_every=1000)
    assert_equal(generate(engine, requests), expected)
    stats = engine.scheduler.stats()
    num_ids = len(expected[1].token_ids)
    assert stats.num_accepted_tokens == num_ids - 2 >= 3, "all but the first id, and the one that is sampled after them"
    assert expected[1].token_ids[-1] != EOS


def test_costly_grammars_have_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [constrained(1, compile_grammar(regex="[a-z]{20,24}"), max_tokens=60)]
    expected = generate(make_engine(demo(), **OPTIONS), requests)
    monkeypatch.setattr(state, "COSTLY_SECONDS", -1.0)
    engine = draft_from(make_engine(demo(), **ON), requests, expected)
    assert_equal(generate(engine, requests), expected)
    assert engine.scheduler.stats().num_draft_tokens == 0


def test_a_result_is_cut_with_its_logprobs() -> None:
    entries = [TokenLogprobs(-float(number), 1, [], []) for number in range(4)]
    result = RunnerOutput(9, entries[3], accepted_ids=[6, 7, 8], known_logprobs=entries[:3])
    result.cut(1)
    assert (result.accepted_ids, result.token_id) == ([6], 7)
    assert (result.known_logprobs, result.logprobs) == (entries[:1], entries[1])


def test_drafts_of_a_head(expected: dict[int, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MIN_RATE", 0.0)  # guesses of a random head are wrong
    head = write_head(build_head(Served(demo()), 200), tmp_path / "head")
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    engine = draft_freely(make_engine(demo(), **(OPTIONS | {"speculative_config": config})))
    found = generate(engine, make_requests(), [number // 3 for number in range(20)])
    assert_equal(found, expected)
    assert engine.scheduler.stats().num_draft_tokens > 100
