"""LongRoPE: a sequence uses the short factors up to the original length, and beyond it the long ones, with which it is
recomputed as a whole, as in transformers; whatever else is served."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.registry import apply_engine_config, read_model
from serve_llm.engine.model.rope_spec import RopeSpec
from support.config import CONFIG
from support.engine import Result, generate, greedy, make_engine
from support.gpu_path import make_gpu_engine
from support.matrix import mostly_slow
from support.reference import reference_logprobs
from support.tiny import make_checkpoint

TOLERANCE = 1e-3
ORIGINAL = 64  # of 512
LENGTHS = (5, 60, 63, 64, 65, 70, 130)
Case = tuple[Path, list[list[int]], list[list[tuple[int, float]]]]  # checkpoint, prompts, expected continuations


@pytest.fixture(scope="module", params=mostly_slow([1.0, 0.6], [0.6]))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Compute the expected next tokens from whole sequences in transformers."""
    directory = tmp_path_factory.mktemp("longrope")
    pairs = round(5 * request.param)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "partial_rotary_factor": request.param,
        "short_factor": [1.0, 1.1, 1.3, 1.7, 2.9][:pairs],
        "long_factor": [1.2, 1.9, 3.0, 4.5, 7.0][:pairs],
    }
    vocab_size = make_checkpoint(directory, "phi3", rope_parameters=rope, original_max_position_embeddings=ORIGINAL)
    rng = random.Random(1)
    shared = [rng.randrange(vocab_size) for _ in range(max(LENGTHS))]
    prompts = [shared[:length] for length in LENGTHS]  # the long ones must not use cached blocks of short ones
    expected = []
    for prompt in prompts:
        ids, following = list(prompt), []
        for _ in range(10):
            row = reference_logprobs(directory, ids)[-1]
            ids.append(int(row.argmax()))
            following.append((ids[-1], float(row.max())))
        expected.append(following)
    return directory, prompts, expected


def check(found: dict[int, Result], expected: list[list[tuple[int, float]]]) -> None:
    for number, following in enumerate(expected):
        assert found[number].token_ids == [token for token, _ in following], LENGTHS[number]
        for ours, (_, theirs) in zip(found[number].logprobs, following, strict=True):
            assert abs(ours.logprob - theirs) < TOLERANCE


LAYOUTS = {
    "one rank": {},
    "ranks": {"tensor": 3, "pipeline": 2},
    "chunks": {"max_num_batched_tokens": 11},
    "few at a time": {"max_num_seqs": 2},
}


@pytest.mark.parametrize("layout", mostly_slow(list(LAYOUTS), ["one rank", "ranks"]))
def test_as_transformers(layout: str, case: Case) -> None:
    directory, prompts, expected = case
    engine = make_engine(directory, block_size=8, **LAYOUTS[layout])
    requests = [greedy(number, prompt, 10, logprobs=1) for number, prompt in enumerate(prompts)]
    check(generate(engine, requests, arrivals=[2 * number for number in range(len(requests))]), expected)
    assert engine.scheduler.stats().num_preemptions == 0, "turning is none"
    again = [greedy(100 + number, prompt, 10, logprobs=1) for number, prompt in enumerate(prompts)]
    found = generate(engine, again)
    check({number - 100: result for number, result in found.items()}, expected)
    hits = [found[100 + number].cached_tokens for number in range(len(LENGTHS))]
    assert hits[2] == 56 and hits[-1] == 128, "cached by what they were computed with"


def test_on_the_path_of_a_gpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps begin before the ids of the last one are known, and decode steps are captured."""
    directory, prompts, expected = case
    engine = make_gpu_engine(directory, monkeypatch, block_size=8)
    check(generate(engine, [greedy(number, prompt, 10, logprobs=1) for number, prompt in enumerate(prompts)]), expected)


def test_longrope_in_some_layers_only_is_refused(case: Case) -> None:
    directory, _, _ = case
    spec, _ = read_model(json.loads((directory / "config.json").read_text()))
    assert spec.long_rope_threshold == ORIGINAL
    first = spec.layers[0]
    other = replace(first, attention=replace(first.attention, rope=RopeSpec(500.0)))
    with pytest.raises(ModelError, match=r"^config\.json: longrope in some layers only"):
        apply_engine_config(replace(spec, layers=(other, *spec.layers[1:])), CONFIG)
