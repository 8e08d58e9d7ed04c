"""The sampler as the worker uses it: the same request gets the same tokens in any batch."""

import math

import numpy as np
import pytest
import torch
from msgspec import structs

from serve_llm.common.types import Sampling
from serve_llm.engine.sampling.logit_adjustments import SampleRow
from serve_llm.engine.sampling.noise import uniform
from serve_llm.engine.sampling.sampler import SampledToken, Sampler, find_logprobs
from serve_llm.kernels import registry

VOCAB = 1003
KERNELS = registry.choose_sampling(torch.device("cpu"))
STYLES: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "logprobs": 3},
    {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logprobs": 0},
    {"temperature": 0.0, "logit_bias": {5: 3.0}, "frequency_penalty": 0.5, "bad_words_ids": ((1, 2),)},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(0, VOCAB, 3)), "min_tokens": 9, "stop_token_ids": (0, 3)},
]


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken | None]:
    return Sampler(VOCAB, KERNELS).sample(logits, rows)


def row(output: object = (), seed: int = 1, prompt: object = (1, 2, 3), **params: object) -> SampleRow:
    return SampleRow(Sampling(max_tokens=99, seed=seed, **params), prompt, output)


def random_logits(rows: int, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def test_one_row_in_200_random_batches() -> None:
    pick = np.random.default_rng(0)
    for number, style in enumerate(STYLES):
        logits, wanted_row = random_logits(1, number), row([4, 5, 4], seed=number, **style)
        (wanted,) = sample(logits, [wanted_row])
        for trial in range(200):
            count = int(pick.integers(1, 7))
            batch = random_logits(count, 1000 + trial)
            rows = [row([7] * int(pick.integers(9)), trial, **STYLES[pick.integers(len(STYLES))]) for _ in range(count)]
            place = int(pick.integers(count))
            batch[place], rows[place] = logits[0], wanted_row
            assert sample(batch, rows)[place] == wanted


@pytest.mark.parametrize("style", STYLES)
def test_a_cut_request_continues_to_the_same_end(style: dict[str, object]) -> None:
    """The model here is a table from the last token to logits."""
    registry = random_logits(VOCAB, 5)

    def run(output: list[int], length: int) -> list[int]:
        while len(output) < length:
            (found,) = sample(registry[output[-1] if output else 0].unsqueeze(0), [row(output, 3, **style)])
            output = [*output, found.token_id]
        return output

    whole = run([], 12)
    assert all(run(whole[:cut], 12) == whole for cut in range(12))


def test_seed_choice_and_position_each_change_the_draw() -> None:
    logits = random_logits(1, 0).div(3).expand(64, -1)
    for rows in (
        [row(seed=n) for n in range(64)],
        [row(choice=n) for n in range(64)],
        [row(output=[7] * n) for n in range(64)],
    ):
        assert len({found.token_id for found in sample(logits, rows)}) > 10


def test_draw_is_the_inverse_distribution_at_the_noise() -> None:
    logits = random_logits(1, 9)
    borders = logits[0].double().div(0.8).softmax(0).cumsum(0)
    for position in range(50):
        (found,) = sample(logits, [row([7] * position, seed=77, temperature=0.8)])
        assert found.token_id == int(torch.searchsorted(borders, float(uniform([77], [0], [position])[0]), right=True))


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy(temperature: float) -> None:
    logits = random_logits(8, 1)
    found = sample(logits, [row(seed=n, temperature=temperature) for n in range(8)])
    assert [choice.token_id for choice in found] == logits.argmax(1).tolist()
    assert all(choice.logprobs is None for choice in found)


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(1, 2)
    best = int(logits.argmax())
    rows = [row(temperature=0.0, logprobs=2, logit_bias={best: -100.0}, repetition_penalty=1.5, prompt=[best])]
    (found,) = sample(logits, rows)
    assert found.token_id == logits[0].topk(2).indices[1] and found.logprobs is not None
    assert found.logprobs.rank == 2 and found.logprobs.top_ids == logits[0].topk(2).indices.tolist()
    wanted = logits[0].double().log_softmax(0)
    assert found.logprobs.logprob == pytest.approx(float(wanted[found.token_id]), abs=1e-6)
    assert found.logprobs.top_logprobs == pytest.approx(wanted.topk(2).values.tolist(), abs=1e-6)
    (only_chosen,) = sample(logits, [row(temperature=0.0, logprobs=0)])
    assert only_chosen.logprobs is not None and only_chosen.logprobs.top_ids == []


def test_prompt_logprobs() -> None:
    logits, ids = random_logits(4, 3), [5, 6, 7, 1002]
    wanted = logits.double().log_softmax(1)
    for place, found in enumerate(find_logprobs(KERNELS, logits, ids, 2)):
        assert found.logprob == pytest.approx(float(wanted[place, ids[place]]), abs=1e-6)
        assert found.top_ids == logits[place].topk(2).indices.tolist()


def test_columns_past_the_vocabulary_are_never_drawn() -> None:
    logits = random_logits(2, 4, VOCAB + 5)
    logits[:, VOCAB:] = 1000.0
    found = sample(logits, [row(temperature=0.0, logprobs=1), row(seed=2)])
    assert [choice.token_id < VOCAB for choice in found] == [True, True]
    assert found[0].logprobs is not None and found[0].logprobs.rank == 1


def test_bfloat16_rows_are_sampled_as_their_numbers_and_stay_as_they_are() -> None:
    logits = random_logits(len(STYLES), 6).bfloat16()
    rows = [row([4, 5, 4], seed=n, **style) for n, style in enumerate(STYLES)]
    before = logits.clone()
    found = sample(logits, rows)
    assert torch.equal(logits, before)
    assert found == sample(logits.float(), rows)
    assert found == [sample(logits[n : n + 1], rows[n : n + 1])[0] for n in range(len(rows))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("others", [{}, {"logprobs": 2}, {"logit_bias": {3: 1.0}}], ids=["free", "logprobs", "biased"])
def test_masked_rows_beside_others(dtype: torch.dtype, others: dict[str, object]) -> None:
    logits = random_logits(3, 8).to(dtype)
    masks = np.zeros((2, -(-VOCAB // 32)), np.int32)
    masks[:, 1:3] = [[0x0F0F0F0F, 5], [0, 1]]
    masked = [structs.replace(row(seed=n, logprobs=n or None), mask=mask) for n, mask in enumerate(masks)]
    alone = [sample(logits[n : n + 1].clone(), [one])[0] for n, one in enumerate(masked)]
    free = row(seed=9, **others)
    (expected,) = sample(logits[2:].clone(), [free])
    assert sample(logits.clone(), [*masked, free]) == [*alone, expected]
    assert alone[0].token_id % 8 < 4 and alone[1].token_id == 64  # type: ignore[union-attr]
    wanted = logits[1].double().log_softmax(0)[64]  # the model's own distribution
    assert alone[1].logprobs.logprob == pytest.approx(float(wanted), abs=1e-6)  # type: ignore[union-attr]


def test_broken_rows_are_none_and_others_as_without_them() -> None:
    logits = random_logits(4, 5)
    logits[1, 7] = math.nan
    logits[3] = -math.inf
    rows = [row(temperature=0.0), row(temperature=0.0), row(), row(logprobs=1)]
    found = sample(logits, rows)
    assert [choice is None for choice in found] == [False, True, False, True]
    assert [found[0], found[2]] == sample(logits[[0, 2]], [rows[0], rows[2]])


def test_allowed_tokens_that_the_model_excludes() -> None:
    logits = random_logits(1, 6)
    logits[0, 5] = -math.inf
    assert sample(logits, [row(allowed_token_ids=(5,))]) == [None]
