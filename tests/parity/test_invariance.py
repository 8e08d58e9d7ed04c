"""Batch invariance: results do not depend on the rest of the batch, on chunks, on prefix hits or on interruptions.

One request, sampled at temperature 1 with logprobs, runs in 200 random batches: its ids and the bits of its logprobs
are always the same. Interrupted at any token and continued, it ends in the same way.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from serve_llm.common.types import EngineCoreRequest, Sampling
from support.engine import Result, generate, make_engine
from support.matrix import mostly_slow
from support.tiny import make_checkpoint

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
CASES = [  # attention has a compiled kernel for a head_dim of 16, and plain torch operations for others
    pytest.param(("llama", "float32", {"head_dim": 16}), marks=pytest.mark.slow),
    ("qwen3", "bfloat16", {"head_dim": 16}),
    pytest.param(("qwen3", "bfloat16", {}), marks=pytest.mark.long),
    pytest.param(("deepseek_v3", "float32", {}), marks=pytest.mark.slow),
    pytest.param(("deepseek_v2", "bfloat16", {"kv_lora_rank": 27}), marks=pytest.mark.long),
    pytest.param(("llama", "float32", {}), marks=pytest.mark.long),
    pytest.param(("gpt2", "float32", {}), marks=pytest.mark.slow),
    pytest.param(("mistral", "bfloat16", {"head_dim": 16}), marks=pytest.mark.slow),
    pytest.param(("mixtral", "bfloat16", {"head_dim": 16}), marks=pytest.mark.slow),
]
SAMPLED = Sampling(max_tokens=14, seed=1234, temperature=1.0, logprobs=2)
PENALISED = Sampling(
    max_tokens=14,
    seed=99,
    choice=3,
    temperature=0.8,
    top_p=0.9,
    top_k=40,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
    min_tokens=3,
    logprobs=0,
)


@pytest.fixture(
    scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2].get('head_dim', 'plain')}"
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, dtype, overrides = request.param
    directory = tmp_path_factory.mktemp(family)
    make_checkpoint(directory, family, dtype=dtype, **overrides)
    return directory


def random_request(number: int, rng: random.Random) -> EngineCoreRequest:
    prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 40))]
    if rng.random() < 0.3:  # shares the prefix
        prompt = PROMPT[: rng.randrange(8, len(PROMPT))] + prompt
    sampling = Sampling(
        max_tokens=rng.randrange(1, 12),
        seed=rng.randrange(1000),
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([0, 0, 1, 5, 50]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, 1]),
    )
    return EngineCoreRequest(id=number, prompt_ids=prompt, sampling=sampling, priority=rng.choice([0, 0, -1, 1]))


def alone(directory: Path, sampling: Sampling, output_ids: list[int] | None = None) -> Result:
    engine = make_engine(directory, block_size=8)
    request = EngineCoreRequest(id=0, prompt_ids=PROMPT, output_ids=output_ids or [], sampling=sampling)
    return generate(engine, [request])[0]


@pytest.mark.parametrize("sampling", mostly_slow([SAMPLED, PENALISED], [PENALISED]), ids=["sampled", "penalised"])
def test_200_random_co_batches_one_output(directory: Path, sampling: Sampling) -> None:
    expected = alone(directory, sampling)
    rng = random.Random(11)
    engines = [
        make_engine(directory, block_size=8, max_num_batched_tokens=budget, enable_prefix_caching=caching)
        for budget, caching in ((2048, True), (7, True), (64, False))
    ]
    for trial in range(100):  # times two samplings: 200 batches
        others = [random_request(number, rng) for number in range(1, rng.randrange(2, 7))]
        requests = [EngineCoreRequest(id=0, prompt_ids=PROMPT, sampling=sampling), *others]
        arrivals = [rng.randrange(6) for _ in requests]
        result = generate(engines[trial % 3], requests, arrivals)[0]
        assert result.token_ids == expected.token_ids
        assert result.logprobs == expected.logprobs  # to the last bit


@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED], ids=["sampled", "penalised"])
def test_cut_at_every_token_and_continued(directory: Path, sampling: Sampling) -> None:
    whole = alone(directory, sampling)
    for cut in range(1, len(whole.token_ids)):
        rest = alone(directory, sampling, whole.token_ids[:cut])
        assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
        assert whole.logprobs[cut:] == rest.logprobs


def test_seed_choice_and_nothing_else_change_the_tokens(directory: Path) -> None:
    first = alone(directory, SAMPLED).token_ids
    assert alone(directory, SAMPLED).token_ids == first
    assert alone(directory, msgspec.structs.replace(SAMPLED, seed=1235)).token_ids != first
    assert alone(directory, msgspec.structs.replace(SAMPLED, choice=1)).token_ids != first
