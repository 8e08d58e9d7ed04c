"""Prefixes of models with linear attention: the same ids and logprob bits after a cached prefix as without a cache."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from serve_llm.kernels import registry
from support.engine import Result, assert_equal, generate, greedy, make_engine
from support.gpu_path import make_gpu_engine
from support.matrix import mostly_slow
from support.speculation import NGRAM, draft_from
from support.tiny import HYBRIDS, make_checkpoint

OFF: dict[str, object] = {"block_size": 8, "enable_prefix_caching": False}
ON: dict[str, object] = {"block_size": 8}
HOWS: dict[str, dict[str, object]] = {
    "one rank": {},
    "chunks": {"max_num_batched_tokens": 11},
    "two ranks": {"tensor": 2},
    "a rank without heads": {"tensor": 7},
    "two stages": {"pipeline": 2},
    "both": {"tensor": 2, "pipeline": 2},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 weights": {"quantization": "int8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    make_checkpoint(path, "qwen3_next")
    return path


def text(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(331) for _ in range(count)]


def make_turns(num_turns: int) -> list[EngineCoreRequest]:
    """Return the turns of a conversation, of which each begins with the one before. Their answers are given, not
    generated, so that turns can be computed alone."""
    ids: list[int] = []
    turns = []
    for number in range(num_turns):
        ids = [*ids, *text(number, 21 + number)]
        sampling = Sampling(max_tokens=6, seed=number, temperature=float(number % 2), logprobs=2)
        turns.append(EngineCoreRequest(id=number, prompt_ids=ids, sampling=sampling))
    return turns


def in_turn(engine: EngineCore, requests: list[EngineCoreRequest]) -> dict[int, Result]:
    results = {}
    for request in requests:
        results |= generate(engine, [request])
        engine.scheduler.check_integrity()
    return results


def check_turns(directory: Path, **options: object) -> EngineCore:
    turns = make_turns(5)
    expected = in_turn(make_engine(directory, **OFF, **options), turns)
    engine = make_engine(directory, **ON, **options)
    found = in_turn(engine, turns)
    assert_equal(found, expected)
    boundaries = [(len(turn.prompt_ids) - 1) // 8 * 8 for turn in turns]
    assert [result.cached_tokens for result in found.values()] == [0, *boundaries[:-1]]
    assert_equal(in_turn(engine, turns), expected)
    assert engine.scheduler.stats().prefix_cache_hits >= sum(boundaries[:-1]) + sum(boundaries)
    return engine


@pytest.mark.pairs("prefix cache + linear attention")
@pytest.mark.parametrize("how", mostly_slow(HOWS, ["one rank", "chunks", "two ranks", "two stages", "bfloat16"]))
def test_turns_of_a_conversation(how: str, directory: Path) -> None:
    check_turns(directory, **HOWS[how])


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_family(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    check_turns(tmp_path)


@pytest.mark.parametrize("how", ["one rank", "chunks", "both"])
def test_random_conversations_at_the_same_time(how: str, directory: Path) -> None:
    """Prefixes are shared, computed by one for others, and evicted."""
    rng = random.Random(7)
    requests: list[EngineCoreRequest] = []
    for number in range(60):
        start = rng.choice(requests).prompt_ids if requests and rng.random() < 0.7 else []
        start = start[: rng.randrange(len(start) + 1)] if rng.random() < 0.3 else start
        ids = (start + text(number, rng.choice([1, 8, 9, 30])))[:70]
        sampling = Sampling(
            max_tokens=rng.randrange(1, 9),
            seed=number,
            temperature=1.0,
            choice=rng.randrange(2),
            logprobs=1,
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        requests.append(EngineCoreRequest(id=number, prompt_ids=ids, sampling=sampling, cache_salt=rng.choice("ab")))
    arrivals = [number // 2 for number in range(len(requests))]
    options = HOWS[how] | {"max_model_len": 80}
    expected = generate(make_engine(directory, **OFF, **options), requests, arrivals)
    engine = make_engine(directory, **ON, **options)
    cache = engine.kv_cache_config
    memory = replace(cache, num_blocks=40).num_bytes
    small = make_engine(directory, **ON, **options, kv_cache_memory=memory)
    assert small.kv_cache_config.num_snapshots == 10
    for one, least_hits in ((engine, 200), (small, 20)):
        for _ in range(2):
            assert_equal(generate(one, requests, arrivals), expected)
        assert one.scheduler.stats().prefix_cache_hits > least_hits


def test_preempted_sequences_continue_from_snapshots(directory: Path) -> None:
    options: dict[str, object] = {"max_model_len": 112, "max_num_batched_tokens": 30}
    requests = [
        EngineCoreRequest(
            id=number,
            prompt_ids=text(number, 25),
            sampling=Sampling(max_tokens=70, seed=number, temperature=float(number % 2), logprobs=1),
        )
        for number in range(8)
    ]
    expected = generate(make_engine(directory, **OFF, **options), requests)
    cache = make_engine(directory, **ON, **options).kv_cache_config
    memory = replace(cache, num_blocks=cache.blocks_per_request(112, 30) + 12).num_bytes
    small = make_engine(directory, **ON, **options, kv_cache_memory=memory)
    for _ in range(2):
        assert_equal(generate(small, requests), expected)
    assert small.scheduler.stats().num_preemptions > 0


def test_drafts_after_a_cached_prefix(directory: Path) -> None:
    turns = make_turns(5)
    expected = in_turn(make_engine(directory, **OFF), turns)
    engine = make_engine(directory, **ON, speculative_config=NGRAM)
    draft_from(engine, turns, expected)
    for _ in range(2):
        found = in_turn(engine, turns)
        assert_equal(found, expected)
        assert found[4].cached_tokens
    assert engine.scheduler.stats().num_accepted_tokens > 0


def test_a_replayed_request_continues_from_a_snapshot(directory: Path) -> None:
    request = make_turns(1)[0]
    request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, max_tokens=30))
    whole = generate(make_engine(directory, **OFF), [request])[0]
    engine = make_engine(directory, **ON)
    for cut in range(1, 30):
        rest = generate(engine, [msgspec.structs.replace(request, output_ids=whole.token_ids[:cut])])[0]
        assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
        assert whole.logprobs[cut:] == rest.logprobs
    assert rest.cached_tokens == 48


def test_choices_of_a_prompt_wait_for_its_snapshot(directory: Path) -> None:
    requests = [greedy(choice, text(3, 40), 5, temperature=1.0, choice=choice, logprobs=1) for choice in range(4)]
    expected = generate(make_engine(directory, **OFF), requests)
    found = generate(make_engine(directory, **ON), requests)
    assert_equal(found, expected)
    assert [result.cached_tokens for result in found.values()] == [0, 32, 32, 32]


def test_a_common_start_is_found_from_the_third_prompt_on(directory: Path) -> None:
    """The second prompt shows where prompts differ."""
    start = text(1, 60)
    requests = [greedy(number, start + text(number + 2, 30), 4, logprobs=1) for number in range(4)]
    expected = in_turn(make_engine(directory, **OFF), requests)
    found = in_turn(make_engine(directory, **ON), requests)
    assert_equal(found, expected)
    assert [result.cached_tokens for result in found.values()] == [0, 0, 56, 56]
    together = generate(make_engine(directory, **ON), requests)
    assert_equal(together, expected)
    assert [result.cached_tokens for result in together.values()] == [0, 0, 56, 56]


def test_a_request_for_prompt_logprobs_computes_all(directory: Path) -> None:
    plain = greedy(0, text(5, 40), 4, prompt_logprobs=1)
    expected = generate(make_engine(directory, **OFF), [plain])[0]
    engine = make_engine(directory, **ON)
    for _ in range(2):
        found = generate(engine, [plain])[0]
        assert (found.prompt_logprobs, found.token_ids) == (expected.prompt_logprobs, expected.token_ids)
        assert found.cached_tokens == 0


def test_aborted_prompts_leave_no_snapshot(directory: Path) -> None:
    engine = make_engine(directory, **ON, max_num_batched_tokens=16)
    request = greedy(0, text(5, 90), 4, logprobs=1)
    engine.add_requests([request])
    engine.step()
    engine.abort_requests([0])
    engine.scheduler.check_integrity()
    expected = generate(make_engine(directory, **OFF), [request])
    for cached in (0, 88):
        found = generate(engine, [request])
        assert_equal(found, expected)
        assert found[0].cached_tokens == cached


def test_as_on_a_gpu(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps start before the results of those before them; kernels get lengths on the device."""
    how: dict[str, object] = {"enforce_eager": True, "kernels": registry.PORTABLE}
    turns = make_turns(4)
    expected = in_turn(make_gpu_engine(directory, monkeypatch, **OFF, **how), turns)
    engine = make_gpu_engine(directory, monkeypatch, **ON, **how)
    for _ in range(2):
        found = in_turn(engine, turns)
        assert {number: one.token_ids for number, one in found.items()} == {
            number: one.token_ids for number, one in expected.items()
        }
        assert found[3].cached_tokens
