"""Ids that a grammar demands are appended at once, and the output equals sampling them one by one."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, FinishReason
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.sampling.grammar_mask import NOTHING_LEFT
from serve_llm.engine.worker.input_batch import HostInputs
from support.engine import Result, generate, make_engine
from support.gpu_path import graphs_of, make_gpu_engine
from support.grammars import EOS, compile_grammar, constrained, demo, ids_of, text_of
from support.matrix import mostly_slow

OPTIONS: dict[str, object] = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory": "64MiB"}
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "temperature": {"type": "integer", "minimum": 0, "maximum": 99},
        "description": {"type": "string", "maxLength": 10},
        "measurement": {"enum": ["celsius_degrees", "fahrenheit_degrees"]},
    },
    "required": ["temperature", "description", "measurement"],
    "additionalProperties": False,
}
COMPACT = {"json": SCHEMA, "disable_any_whitespace": True}
CALL = (
    r'start: "<tool_call>\n{\"name\": \"get_current_weather\", \"arguments\": {\"city\": \"" /[A-Z][a-z]{2,8}/ "\"}}\n"'
    r' "</tool_call>"'
)


@pytest.fixture(scope="module")
def engine() -> EngineCore:
    return make_engine(demo(), **OPTIONS)


@pytest.fixture(scope="module")
def one_by_one() -> EngineCore:
    return make_engine(demo(), **OPTIONS, jump_forward=False)


def grammars() -> list[str]:
    return [
        compile_grammar(**COMPACT),
        compile_grammar(grammar=CALL),
        compile_grammar(json=SCHEMA),
        compile_grammar(choice=["unconditionally", "never"]),
        "",
    ]


def mixed_requests(count: int) -> list[EngineCoreRequest]:
    styles: list[dict[str, object]] = [
        {},
        {"temperature": 0.0},
        {"logprobs": 2, "logprob_token_ids": (300, 301)},
        {"temperature": 1.0, "top_p": 0.9},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logprobs": 0},
        {"temperature": 0.0, "logprobs": 1, "max_tokens": 7},
        {"min_tokens": 30},
    ]
    known = grammars()
    return [
        constrained(
            number,
            known[number % len(known)],
            "x = 1\n" * (1 + number % 4),
            **({"max_tokens": 60} | styles[number % len(styles)]),
        )
        for number in range(count)
    ]


def count_steps(engine: EngineCore, requests: list[EngineCoreRequest]) -> tuple[dict[int, Result], int]:
    before = engine.scheduler.stats().num_steps
    results = generate(engine, requests)
    return results, engine.step().stats.num_steps - before


def assert_equal(found: dict[int, Result], expected: dict[int, Result]) -> None:
    assert found.keys() == expected.keys()
    for number, result in found.items():
        other = expected[number]
        assert (result.token_ids, result.finish_reason) == (other.token_ids, other.finish_reason), number
        assert [(entry.rank, entry.top_ids) for entry in result.logprobs] == [
            (entry.rank, entry.top_ids) for entry in other.logprobs
        ]
        logprobs = [entry.logprob for entry in other.logprobs]
        assert [entry.logprob for entry in result.logprobs] == pytest.approx(logprobs, abs=1e-4)
        for entry, one in zip(result.logprobs, other.logprobs, strict=True):
            assert entry.top_logprobs == pytest.approx(one.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("load_format", mostly_slow(["auto", "dummy"], ["auto"]))
def test_same_output_as_one_by_one(load_format: str) -> None:
    requests = mixed_requests(20)
    engine = make_engine(demo(), **OPTIONS, load_format=load_format)
    one_by_one = make_engine(demo(), **OPTIONS, load_format=load_format, jump_forward=False)
    assert_equal(generate(engine, requests), generate(one_by_one, requests))


def test_forced_ids_save_steps(engine: EngineCore, one_by_one: EngineCore) -> None:
    for grammar in grammars()[:2]:
        request = constrained(1, grammar)
        found, num_steps = count_steps(engine, [request])
        expected, num_single_steps = count_steps(one_by_one, [request])
        assert_equal(found, expected)
        assert num_single_steps == len(expected[1].token_ids)
        assert num_steps < 0.7 * num_single_steps


@pytest.mark.parametrize(
    "how", mostly_slow([{"tensor": 2}, {"pipeline": 2}, {"max_num_batched_tokens": 9}], [{"tensor": 2}]), ids=str
)
def test_same_output_over_ranks_and_chunks(one_by_one: EngineCore, how: dict[str, int]) -> None:
    requests = mixed_requests(14)
    arrivals = [number // 2 for number in range(14)]
    assert_equal(generate(make_engine(demo(), **OPTIONS, **how), requests, arrivals), generate(one_by_one, requests))


def test_same_output_after_preemption(one_by_one: EngineCore) -> None:
    requests = mixed_requests(14)
    blocks = 9 * one_by_one.kv_cache_config.block_bytes
    small = make_engine(demo(), **(OPTIONS | {"kv_cache_memory": blocks, "max_model_len": 144}))
    expected = make_engine(demo(), **(OPTIONS | {"max_model_len": 144}), jump_forward=False)
    assert_equal(generate(small, requests), generate(expected, requests))
    assert small.scheduler.stats().num_preemptions > 0


@pytest.mark.slow
def test_same_output_with_steps_in_flight(one_by_one: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = mixed_requests(20)
    assert_equal(generate(make_gpu_engine(demo(), monkeypatch, **OPTIONS), requests), generate(one_by_one, requests))


def test_forced_ids_are_part_of_captured_steps(one_by_one: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with forced ids also use graphs."""
    engine = make_gpu_engine(demo(), monkeypatch, **OPTIONS)
    graphs = graphs_of(engine)
    compute_logits = graphs.logits
    sizes: list[int] = []

    def watched_logits(arrays: HostInputs, received: torch.Tensor | None) -> torch.Tensor:
        sizes.append(len(arrays.ids))
        return compute_logits(arrays, received)

    monkeypatch.setattr(graphs, "logits", watched_logits)
    requests = [constrained(number, grammars()[0], temperature=0.0, max_tokens=40) for number in range(3)]
    results, num_steps = count_steps(engine, requests)
    assert_equal(results, generate(one_by_one, requests))
    assert len(sizes) == num_steps - 1, "all but the prompts' step"
    assert max(sizes) > len(requests)


def test_continued_from_any_id(engine: EngineCore) -> None:
    """As the server continues a request after a crash, also in the middle of forced ids."""
    for grammar in grammars()[:2]:
        for sampling in ({}, {"logprobs": 1, "temperature": 0.0}):
            request = constrained(3, grammar, **sampling)
            whole = generate(engine, [request])[3]
            cuts = range(1, len(whole.token_ids))
            requests = [replace(request, id=cut, output_ids=whole.token_ids[:cut]) for cut in cuts]
            for cut, rest in generate(engine, requests).items():
                assert rest.token_ids == whole.token_ids[cut:] and rest.finish_reason is whole.finish_reason
                assert len(rest.logprobs) == len(whole.logprobs[cut:])


@pytest.mark.pairs("grammar + prefix cache", "prefix cache + logprobs")
def test_choices_and_cached_prefixes(engine: EngineCore, one_by_one: EngineCore) -> None:
    """A prefix cached by another choice does not hide logprobs."""
    request = constrained(0, grammars()[1], "class Stack:\n    pass\n" * 8, logprobs=1)
    choices = [replace(request, id=k, sampling=replace(request.sampling, choice=k)) for k in range(4)]
    expected = generate(one_by_one, choices)
    for _ in range(2):
        found = generate(engine, choices)
        assert_equal(found, expected)
    assert found[0].cached_tokens


def run(engine: EngineCore, request: EngineCoreRequest) -> list[EngineCoreOutput]:
    outputs: list[EngineCoreOutput] = []
    engine.add_requests([request])
    while engine.has_work:
        outputs += engine.step().outputs
    return outputs


@pytest.mark.parametrize("logprobs", [None, 1])
def test_max_tokens_cuts_forced_ids(engine: EngineCore, logprobs: int | None) -> None:
    request = constrained(1, grammars()[1], logprobs=logprobs)
    whole = generate(engine, [request])[1]
    for max_tokens in range(1, len(whole.token_ids) + 2):
        cut = replace(request, sampling=replace(request.sampling, max_tokens=max_tokens))
        outputs = run(engine, cut)
        ids = [token_id for output in outputs for token_id in output.token_ids]
        assert ids == whole.token_ids[:max_tokens]
        is_complete = len(ids) == len(whole.token_ids)
        assert outputs[-1].finish_reason is (FinishReason.STOP if is_complete else FinishReason.LENGTH)
        assert outputs[-1].stop_id is None
        if logprobs is not None:
            assert all(len(output.logprobs or ()) == len(output.token_ids) for output in outputs)


def test_a_forced_text_takes_two_steps_at_most(engine: EngineCore) -> None:
    ids = ids_of("unconditionally yes")
    request = constrained(1, compile_grammar(choice=["unconditionally yes"]))
    results, num_steps = count_steps(engine, [request])
    assert results[1].token_ids == ids and num_steps == 1
    with_logprobs, num_steps = count_steps(engine, [constrained(1, request.sampling.grammar, logprobs=2)])
    assert with_logprobs[1].token_ids == ids and len(with_logprobs[1].logprobs) == len(ids) and num_steps == 2


def test_logprobs_of_forced_ids_are_the_models_own(engine: EngineCore) -> None:
    """They equal those of the same ids in a prompt."""
    prompt = "def main():\n"
    forced = generate(engine, [constrained(1, compile_grammar(choice=["unconditionally yes"]), prompt, logprobs=3)])[1]
    whole = constrained(2, "", prompt + "unconditionally yes", max_tokens=1, prompt_logprobs=3)
    assert whole.prompt_ids == ids_of(prompt) + forced.token_ids
    expected = generate(engine, [whole])[2].prompt_logprobs[-len(forced.token_ids) :]
    for found, other in zip(forced.logprobs, expected, strict=True):
        assert (found.rank, found.top_ids) == (other.rank, other.top_ids)
        assert found.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_forced_stop_id_ends_the_text(engine: EngineCore, one_by_one: EngineCore) -> None:
    stop_id = ids_of("unconditionally yes")[2]
    request = constrained(1, compile_grammar(choice=["unconditionally yes"]), stop_token_ids=(EOS, stop_id))
    for chosen in (engine, one_by_one):
        outputs = run(chosen, request)
        assert [one for output in outputs for one in output.token_ids][-1] == stop_id
        assert outputs[-1].finish_reason is FinishReason.STOP and outputs[-1].stop_id == stop_id
        later = replace(request, sampling=replace(request.sampling, min_tokens=50))
        assert text_of(generate(chosen, [later])[1].token_ids) == "unconditionally yes"


def test_forced_ids_meet_the_requests_restrictions(engine: EngineCore) -> None:
    first, *others = ids_of("yes")
    grammar = compile_grammar(choice=["yes"])
    for restriction in ({"allowed_token_ids": (first,)}, {"bad_words_ids": tuple((other,) for other in others)}):
        outputs = run(engine, constrained(1, grammar, **restriction))
        assert [token_id for output in outputs for token_id in output.token_ids] == [first]
        assert NOTHING_LEFT in (outputs[-1].error or "")
    allowed = constrained(1, grammar, allowed_token_ids=(first, *others, 77))
    assert generate(engine, [allowed])[1].token_ids == [first, *others]


def test_banned_ids_that_the_grammar_does_not_force_stop_no_jump(engine: EngineCore, one_by_one: EngineCore) -> None:
    ids = ids_of("unconditionally yes")
    other = next(token_id for token_id in range(100) if token_id not in ids)
    grammar = compile_grammar(choice=["unconditionally yes"])
    steps = {}
    for name, words in (("none", ()), ("other", ((other,),)), ("longer", ((other, other),))):
        for chosen in (engine, one_by_one):
            outputs = run(chosen, constrained(1, grammar, bad_words_ids=words))
            assert [token_id for output in outputs for token_id in output.token_ids][: len(ids)] == ids
        steps[name] = len(run(engine, constrained(1, grammar, bad_words_ids=words)))
    assert steps["other"] == steps["none"] < steps["longer"]


def test_bursts_of_forced_ids_keep_other_streams_going() -> None:
    """Every step computes a token of each stream, even if forced ids exceed the step's budget."""
    engine = make_engine(demo(), **OPTIONS, max_num_batched_tokens=16)
    free = [constrained(100 + number, "", "x", max_tokens=60, stop_token_ids=()) for number in range(2)]
    run_until_decoding(engine, free)
    engine.add_requests([constrained(number, grammars()[1], "x") for number in range(12)])
    while engine.scheduler.num_running + engine.scheduler.num_waiting > len(free):
        outputs = {output.id: output.token_ids for output in engine.step().outputs}
        assert all(len(outputs[request.id]) == 1 for request in free)
    engine.abort_requests([request.id for request in free])


def run_until_decoding(engine: EngineCore, requests: list[EngineCoreRequest]) -> None:
    engine.add_requests(requests)
    while sum(bool(output.token_ids) for output in engine.step().outputs) < len(requests):
        pass
