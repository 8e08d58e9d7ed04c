"""Sampling from logits that are sharded over ranks: exactly what one rank would draw from whole rows."""

from __future__ import annotations

import math

import pytest
import torch

from serve_llm.common.types import Sampling
from serve_llm.engine.parallel.layout import split_range
from serve_llm.engine.sampling.logit_adjustments import SampleRow
from serve_llm.engine.sampling.sampler import SampledToken, Sampler
from serve_llm.engine.sampling.vocab_parallel import VocabParallelLogits, VocabParallelSampler
from serve_llm.kernels import registry
from support.ranks import Meeting, MemoryGroup, run_together

KERNELS = registry.choose_sampling(torch.device("cpu"))
STYLES: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logit_bias": {0: 9.0}},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 60, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 9, "presence_penalty": 0.5},
    {"temperature": 1.0, "top_k": 129},
]


def rows(count: int, seed: int) -> list[SampleRow]:
    return [
        SampleRow(Sampling(max_tokens=9, seed=seed + n, **STYLES[n % len(STYLES)]), [1, 2], [3] * (n % 4))
        for n in range(count)
    ]


def split_sample(logits: torch.Tensor, wanted: list[SampleRow], borders: list[range]) -> list[SampledToken | None]:
    meeting = Meeting(len(borders))

    def work(rank: int) -> list[SampledToken | None]:
        group = MemoryGroup(meeting, rank)
        own = borders[rank]
        sampler = VocabParallelSampler(Sampler(logits.shape[1], KERNELS), VocabParallelLogits(borders, group, KERNELS))
        return sampler.sample(logits[:, own.start : own.stop], wanted)

    return run_together(len(borders), work, meeting.abort)[0]


@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("vocab", [5, 331, 4096])
@pytest.mark.parametrize("levels", [None, 40, 2])  # number of distinct values: bfloat16 has many ties
def test_as_from_whole_rows(levels: int | None, vocab: int, ranks: int) -> None:
    for seed in range(5):
        logits = torch.randn(27, vocab, generator=torch.Generator().manual_seed(seed)) * 3
        if levels is not None:
            logits = (logits * levels / 12).round() * 12 / levels
        wanted = rows(27, seed)
        expected = Sampler(vocab, KERNELS).sample(logits, wanted)
        for weights in (None, [1.0, *[3.0] * (ranks - 1)]):
            assert split_sample(logits, wanted, list(split_range(vocab, ranks, weights))) == expected


def test_some_ranks_have_no_columns() -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(1))
    expected = Sampler(50, KERNELS).sample(logits, rows(9, 4))
    assert split_sample(logits, rows(9, 4), [range(0), range(49), range(49, 49), range(49, 50)]) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_rows(value: float) -> None:
    logits = torch.randn(18, 60, generator=torch.Generator().manual_seed(1))
    logits[:9, 41] = value
    logits[9] = -math.inf
    expected = Sampler(60, KERNELS).sample(logits, rows(18, 0))
    assert [row is None for row in expected] == [True] * 10 + [False] * 8
    assert split_sample(logits, rows(18, 0), list(split_range(60, 3))) == expected


def test_ties_go_to_the_lowest_id_across_ranks() -> None:
    logits = torch.zeros(1, 9)
    logits[0, [2, 4, 8]] = 1.0
    greedy = [SampleRow(Sampling(max_tokens=1, seed=0, temperature=0.0), [], [])]
    assert split_sample(logits, greedy, list(split_range(9, 3))) == [SampledToken(2, None)]
    logits[0, 2] = 0.0
    assert split_sample(logits, greedy, list(split_range(9, 3))) == [SampledToken(4, None)]
