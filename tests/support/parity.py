"""Checkpoints in other formats, compared with the same numbers in floating point."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from serve_llm.engine.model.spec import ModelSpec
from support.engine import generate, greedy, make_engine
from support.forward import Harness, load
from support.reference import reference_logprobs


def random_prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in (1, 17, 60)]


def check_logprobs(directory: Path, plain: Path, prompts: Sequence[list[int]]) -> ModelSpec:
    """Assert that log-probabilities in float32 equal those that transformers computes from `plain`. Returns the model's
    spec."""
    spec, decoder = load(directory)
    for prompt, ours in zip(prompts, Harness(spec, decoder, torch.float32).logprobs(prompts), strict=True):
        assert (ours - reference_logprobs(plain, prompt)).abs().max() < 5e-4
    return spec


def check_greedy(
    directory: Path, plain: Path, prompts: Sequence[list[int]], grids: Iterable[dict[str, Any]], num_tokens: int = 6
) -> None:
    """Assert that engines with these ranks generate the greedy tokens of one rank from `plain`, in float32."""
    requests = [greedy(number, prompt, num_tokens, logprobs=0) for number, prompt in enumerate(prompts)]
    expected = generate(make_engine(plain, dtype="float32"), requests)
    for grid in grids:
        found = generate(make_engine(directory, dtype="float32", **grid), requests)
        assert [found[number].token_ids for number in expected] == [one.token_ids for one in expected.values()]
