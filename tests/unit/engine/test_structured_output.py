"""Texts satisfy their grammar, whatever else a request asks for and however its steps are computed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from msgspec.structs import replace

from serve_llm.common.grammar import build_matcher, build_tokenizer
from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, FinishReason, Sampling
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.sampling.grammar_mask import NOTHING_ALLOWED, NOTHING_LEFT, intersect
from serve_llm.engine.sampling.logit_adjustments import SampleRow
from serve_llm.engine.structured_output import builder
from serve_llm.engine.structured_output.builder import MatcherBuilder
from serve_llm.engine.structured_output.state import ConstraintState
from support.engine import Result, generate, make_engine
from support.gpu_path import make_gpu_engine
from support.grammars import EOS, SCHEMA, VOCAB_SIZE, compile_grammar, constrained, demo, ids_of, text_of
from support.matrix import mostly_slow

OPTIONS: dict[str, object] = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory": "64MiB"}
WORD = "[a-z]{2,12}( [a-z]{2,12})?"


@pytest.fixture(scope="module")
def engine() -> EngineCore:
    return make_engine(demo(), **OPTIONS)


def run(engine: EngineCore, requests: list[EngineCoreRequest]) -> dict[int, list[EngineCoreOutput]]:
    """Return all outputs of requests that may end with an error."""
    outputs: dict[int, list[EngineCoreOutput]] = {request.id: [] for request in requests}
    engine.add_requests(requests)
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.id].append(output)
        engine.scheduler.check_integrity()
    return outputs


def mixed_requests(count: int) -> list[EngineCoreRequest]:
    """Return requests with and without a grammar, with every kind of sampling; several differ only in their seed."""
    grammars = [compile_grammar(json=SCHEMA), compile_grammar(regex=WORD), "", compile_grammar(choice=["red", "blue"])]
    styles: list[dict[str, object]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.001},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"logprobs": 2},
        {"logit_bias": {20: 5.0, 30: -5.0}, "min_tokens": 3},
        {"bad_words_ids": ((5, 6), (7,))},
    ]
    requests = []
    for number in range(count):
        style = styles[number % len(styles)]
        prompt = "import os\n" * (1 + number % 5)
        requests.append(constrained(number, grammars[number % len(grammars)], prompt, **({"max_tokens": 90} | style)))
    return requests


def assert_valid(request: EngineCoreRequest, result: Result) -> None:
    grammar = request.sampling.grammar
    ids = result.token_ids
    text = text_of(ids)
    if result.finish_reason is FinishReason.LENGTH or not grammar:
        assert len(ids) <= request.sampling.max_tokens
    elif '"lark_grammar":null' in grammar:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif grammar == compile_grammar(regex=WORD):
        assert re.fullmatch(WORD, text)
    else:
        assert text in ("red", "blue")


def assert_equal(found: dict[int, Result], expected: dict[int, Result]) -> None:
    assert found.keys() == expected.keys()
    for number, result in found.items():
        other = expected[number]
        assert (result.token_ids, result.finish_reason) == (other.token_ids, other.finish_reason), number
        ranks = [(entry.rank, entry.top_ids) for entry in result.logprobs]
        assert ranks == [(entry.rank, entry.top_ids) for entry in other.logprobs]


def test_every_text_is_valid_at_a_high_temperature(engine: EngineCore) -> None:
    requests = [constrained(number, compile_grammar(json=SCHEMA)) for number in range(60)]
    results = generate(engine, requests)
    assert sum(result.finish_reason is FinishReason.STOP for result in results.values()) > 50
    for request in requests:
        assert_valid(request, results[request.id])


def test_every_text_of_random_weights_is_valid() -> None:
    random_engine = make_engine(demo(), **OPTIONS, load_format="dummy")
    requests = [constrained(number, compile_grammar(json=SCHEMA)) for number in range(60)]
    results = generate(random_engine, requests)
    assert sum(result.finish_reason is FinishReason.STOP for result in results.values()) > 50
    for request in requests:
        assert_valid(request, results[request.id])


def test_a_complete_text_ends_without_an_end_token(engine: EngineCore) -> None:
    request = constrained(1, compile_grammar(choice=["yes"]))
    outputs = run(engine, [request])[1]
    assert text_of([one for output in outputs for one in output.token_ids]) == "yes"
    assert outputs[-1].finish_reason is FinishReason.STOP and outputs[-1].stop_id is None
    assert EOS not in outputs[-1].token_ids


SENTENCES: list[tuple[dict[str, object], str]] = [
    ({"json": SCHEMA}, '{"name": "bob", "count": 3, "tags": ["a"], "size": null}'),
    ({"json": {"type": "string", "maxLength": 3}}, '"abc"'),
    ({"json": {"type": "integer", "minimum": 10, "maximum": 99}}, "12"),
    ({"json": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}}, "[1, 2]"),
    ({"json_object": True}, '{"a": 1}'),
    ({"choice": ["red", "redder", "blue"]}, "redder"),
    ({"regex": "[a-z]{2,4}!"}, "abcd!"),
    ({"grammar": 'start: "a" b?\nb: "b"'}, "ab"),
    ({"grammar": 'start: "<t>" j "</t>"\nj: %json {"enum": [1, 2]}'}, "<t>1</t>"),
    ({"grammar": 'start: "x " A\nA: %regex {"substring_words": "the quick fox"}'}, "x quick fox"),
    ({"grammar": "start: A\nA: /[a-z]{3}/ & ~/.*z.*/"}, "abc"),
    ({"grammar": 'root ::= "x" [0-9] [0-9]'}, "x12"),
]


@pytest.mark.parametrize(("wanted", "text"), SENTENCES, ids=lambda value: str(value)[:30])
def test_a_complete_text_is_known_with_its_last_id(wanted: dict[str, object], text: str) -> None:
    """Thus no step is needed for an end token."""
    tokenizer = build_tokenizer((demo() / "tokenizer.json").read_text(), VOCAB_SIZE)
    matcher = build_matcher(tokenizer, compile_grammar(**wanted))
    state = ConstraintState(matcher, tokenizer, VOCAB_SIZE, Sampling(max_tokens=99, seed=0), [])
    for token_id in ids_of(text):
        assert not state.is_complete
        state.advance(token_id)
    assert state.is_complete


def test_a_text_that_may_go_on_ends_by_the_end_token(engine: EngineCore) -> None:
    request = constrained(1, compile_grammar(regex="(ab)+"), logit_bias={EOS: 100.0})
    outputs = run(engine, [request])[1]
    assert outputs[-1].finish_reason is FinishReason.STOP and outputs[-1].stop_id == EOS
    assert re.fullmatch("(ab)+", text_of([one for output in outputs for one in output.token_ids if one != EOS]))


def test_end_tokens_are_the_requests(engine: EngineCore) -> None:
    """The tokenizer's own end-of-sequence token does not end a request that does not name it."""
    request = constrained(1, compile_grammar(regex="a*"), stop_token_ids=(5,), logit_bias={EOS: 100.0}, max_tokens=9)
    (outputs,) = run(engine, [request]).values()
    assert EOS not in [one for output in outputs for one in output.token_ids]


def test_as_alone_in_a_batch_of_all_kinds(engine: EngineCore) -> None:
    requests = mixed_requests(28)
    together = generate(engine, requests, arrivals=[number // 3 for number in range(28)])
    for request in requests:
        assert_valid(request, together[request.id])
    for request in requests[:8]:
        assert_equal(generate(engine, [request]), {request.id: together[request.id]})


@pytest.mark.parametrize(
    "how", mostly_slow([{"tensor": 2}, {"pipeline": 2}, {"max_num_batched_tokens": 13}], [{"tensor": 2}])
)
def test_same_texts_over_ranks_and_chunks(engine: EngineCore, how: dict[str, int]) -> None:
    requests = mixed_requests(14)
    other = make_engine(demo(), **OPTIONS, **how)
    assert_equal(generate(other, requests), generate(engine, requests))


def test_same_texts_after_preemption(engine: EngineCore) -> None:
    requests = mixed_requests(14)
    blocks = 9 * engine.kv_cache_config.block_bytes
    small = make_engine(demo(), **(OPTIONS | {"kv_cache_memory": blocks, "max_model_len": 144}))
    assert_equal(generate(small, requests), generate(engine, requests))
    assert small.scheduler.stats().num_preemptions > 0


def test_each_grammar_is_compiled_once_while_many_wait(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the least recently used grammars, and those of preempted requests."""
    built: list[str] = []
    build = MatcherBuilder._build
    monkeypatch.setattr(MatcherBuilder, "_build", lambda self, grammar: built.append(grammar) or build(self, grammar))
    monkeypatch.setattr(builder, "RECENT_GRAMMARS", 2)
    grammars = [compile_grammar(regex=f"[a-m]{{{40 + number}}}") for number in range(20)]
    blocks = 9 * engine.kv_cache_config.block_bytes
    small = make_engine(demo(), **(OPTIONS | {"kv_cache_memory": blocks, "max_model_len": 144}))
    aborted = constrained(99, compile_grammar(regex="[a-z]+"))
    small.add_requests([aborted])
    small.abort_requests([99])
    generate(small, [constrained(number, grammar) for number, grammar in enumerate(grammars)])
    assert small.scheduler.stats().num_preemptions > 0
    assert sorted(filter(None, built)) == sorted([aborted.sampling.grammar, *grammars])
    assert len(small.grammars._compiler._matchers) <= 2, "those of requests that have ended are dropped"


@pytest.mark.slow
def test_same_texts_with_steps_in_flight(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = mixed_requests(14)
    asynchronous = make_gpu_engine(demo(), monkeypatch, **OPTIONS)
    assert_equal(generate(asynchronous, requests), generate(engine, requests))


def test_continued_from_any_token(engine: EngineCore) -> None:
    """As the server continues a request after a crash: the request includes the ids received so far."""
    request = constrained(3, compile_grammar(json=SCHEMA))
    whole = generate(engine, [request])[3]
    for cut in range(1, len(whole.token_ids), 4):
        rest = generate(engine, [replace(request, output_ids=whole.token_ids[:cut])])[3]
        assert rest.token_ids == whole.token_ids[cut:] and rest.finish_reason is whole.finish_reason


def test_choices_and_cached_prefixes(engine: EngineCore) -> None:
    prompt = "class Stack:\n    pass\n" * 8
    grammar = compile_grammar(json=SCHEMA)
    request = constrained(0, grammar, prompt)
    choices = [replace(request, id=k, sampling=replace(request.sampling, choice=k)) for k in range(4)]
    first = generate(engine, choices)
    again = generate(engine, choices)
    assert_equal(again, first)
    assert len({tuple(result.token_ids) for result in first.values()}) > 1
    assert again[0].cached_tokens


@pytest.mark.pairs("grammar + logprobs")
def test_logprobs_are_the_models_own(engine: EngineCore) -> None:
    free = generate(engine, [constrained(1, "", temperature=0.0, logprobs=3, max_tokens=1)])[1]
    bound = generate(engine, [constrained(1, compile_grammar(choice=["zebra"]), logprobs=3, max_tokens=1)])[1]
    assert bound.logprobs[0].top_ids == free.logprobs[0].top_ids
    assert bound.logprobs[0].top_logprobs == pytest.approx(free.logprobs[0].top_logprobs, abs=1e-5)
    assert bound.logprobs[0].rank > 1


def test_max_tokens_cuts(engine: EngineCore) -> None:
    result = generate(engine, [constrained(1, compile_grammar(json=SCHEMA), max_tokens=4)])[1]
    assert result.finish_reason is FinishReason.LENGTH and len(result.token_ids) == 4


def test_allowed_ids_and_bad_words_meet_the_grammar(engine: EngineCore) -> None:
    digits = [ids_of(digit)[0] for digit in "0123456789"]
    grammar = compile_grammar(regex="[0-9]{3}")
    requests = [
        constrained(1, grammar, allowed_token_ids=(*digits[:5], ids_of("x")[0])),
        constrained(2, grammar, allowed_token_ids=(*digits,), bad_words_ids=((digits[7],), (digits[1], digits[2]))),
        constrained(3, grammar, allowed_token_ids=(*digits,), min_tokens=2),
    ]
    texts = [text_of(result.token_ids) for result in generate(engine, requests).values()]
    assert re.fullmatch("[0-4]{3}", texts[0])
    assert re.fullmatch("[0-9]{3}", texts[1]) and "7" not in texts[1] and "12" not in texts[1]
    assert re.fullmatch("[0-9]{3}", texts[2])


def test_nothing_left_is_an_error_with_its_cause(engine: EngineCore) -> None:
    x = ids_of("x")[0]
    requests = [
        constrained(1, compile_grammar(regex="[0-9]{3}"), allowed_token_ids=(x,)),
        constrained(2, compile_grammar(choice=["x"]), bad_words_ids=((x,),)),
        constrained(3, compile_grammar(choice=["x"])),
    ]
    outputs = run(engine, requests)
    for number in (1, 2):
        assert outputs[number][-1].finish_reason is FinishReason.ERROR
        assert "allowed_token_ids, bad_words" in (outputs[number][-1].error or "")
        assert outputs[number][-1].token_ids == [] and outputs[number][-1].is_contradiction
    assert outputs[3][-1].finish_reason is FinishReason.STOP


def test_the_end_wins_over_min_tokens(engine: EngineCore) -> None:
    requests = [
        constrained(1, compile_grammar(choice=["yes"]), min_tokens=50),
        constrained(2, compile_grammar(regex="a{4,40}"), min_tokens=4, logit_bias={EOS: 100.0}),
    ]
    results = generate(engine, requests)
    assert text_of(results[1].token_ids) == "yes" and results[1].finish_reason is FinishReason.STOP
    assert len(results[2].token_ids) >= 4


def test_a_grammar_that_does_not_compile_ends_its_request_alone(engine: EngineCore) -> None:
    outputs = run(engine, [constrained(1, "start: nowhere"), constrained(2, compile_grammar(choice=["yes"]))])
    assert outputs[1][-1].finish_reason is FinishReason.ERROR and "cannot be compiled" in (outputs[1][-1].error or "")
    assert outputs[2][-1].finish_reason is FinishReason.STOP


def test_output_that_the_grammar_does_not_allow(engine: EngineCore) -> None:
    request = replace(constrained(1, compile_grammar(choice=["yes"])), output_ids=ids_of("no"))
    (outputs,) = run(engine, [request]).values()
    assert outputs[-1].finish_reason is FinishReason.ERROR and "cannot be followed" in (outputs[-1].error or "")


def test_abort_while_compiling_and_while_running(engine: EngineCore) -> None:
    request = constrained(1, compile_grammar(regex="[a-z]{100,900}"))
    engine.add_requests([request])
    engine.abort_requests([1])
    assert not engine.has_work
    engine.add_requests([request])
    while not engine.scheduler.num_running:
        engine.step()
    engine.abort_requests([1])
    while engine.has_work:
        engine.step()
    assert engine.step().outputs == []


def test_no_tokenizer_is_an_error_of_the_request(tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(demo() / name)
    outputs = run(make_engine(tmp_path, **OPTIONS), [constrained(1, compile_grammar(choice=["yes"]))])
    assert outputs[1][-1].finish_reason is FinishReason.ERROR and "has no tokenizer" in (outputs[1][-1].error or "")


def test_masks_meet_other_restrictions() -> None:
    mask = np.array([0b1111, 0], np.int32)

    def restrict(mask: np.ndarray, prompt_ids: tuple[int, ...] = (), **params: object) -> tuple[list[int], str]:
        row = SampleRow(Sampling(max_tokens=9, seed=0, **params), prompt_ids, ())
        found, error = intersect(mask, row)
        return found.tolist(), error

    assert restrict(mask) == ([0b1111, 0], "")
    assert restrict(np.zeros(2, np.int32))[1] == NOTHING_ALLOWED
    assert restrict(mask, allowed_token_ids=(1, 2, 40)) == ([0b110, 0], "")
    assert restrict(mask, (9,), bad_words_ids=((9, 3),)) == ([0b111, 0], "")
    assert restrict(mask, stop_token_ids=(0, 99), min_tokens=1) == ([0b1110, 0], "")
    assert restrict(mask, allowed_token_ids=(5,))[1] == NOTHING_LEFT
