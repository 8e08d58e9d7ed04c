"""Bias, bans and penalties, against their formulas and against transformers' processors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_llm.common.types import Sampling
from serve_llm.engine.sampling.logit_adjustments import SampleRow, adjust

VOCAB = 12


def adjusted(prompt: object = (), output: object = (), scores: torch.Tensor | None = None, **params: object):
    scores = torch.linspace(-3.0, 3.0, VOCAB) if scores is None else scores.clone()
    adjust(scores, SampleRow(Sampling(max_tokens=9, seed=0, **params), prompt, output))
    return scores


def banned(*args: object, **params: object) -> set[int]:
    return set(torch.nonzero(adjusted(*args, **params) == -math.inf).flatten().tolist())


def test_nothing_asked_nothing_changed() -> None:
    assert torch.equal(adjusted([1, 2], [3, 3]), torch.linspace(-3.0, 3.0, VOCAB))


def test_bias_comes_before_penalties() -> None:
    start = torch.linspace(-3.0, 3.0, VOCAB)
    scores = adjusted([0], [11], logit_bias={0: 10.0, 5: -1.5}, repetition_penalty=2.0)
    assert scores[0] == (start[0] + 10.0) / 2.0  # the bias made it positive, so the penalty divides
    assert scores[5] == start[5] - 1.5
    assert torch.equal(scores[6:11], start[6:11])


def test_presence_and_frequency_count_the_output_only() -> None:
    start = torch.linspace(-3.0, 3.0, VOCAB)
    scores = adjusted([1, 1, 1], [2, 3, 3], presence_penalty=0.5, frequency_penalty=0.25)
    wanted = start.clone()
    wanted[2] -= 0.75
    wanted[3] -= 1.0
    torch.testing.assert_close(scores, wanted)
    assert scores[1] == start[1]
    assert torch.equal(adjusted([1], [], presence_penalty=2.0), start)


@pytest.mark.parametrize("make", [list, lambda ids: np.array(ids, np.int64), tuple])
def test_ids_may_be_any_sequence(make: object) -> None:
    parameters = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "bad_words_ids": ((1, 2, 9),)}
    wanted = adjusted([0, 1], [2], **parameters)
    assert torch.equal(adjusted(make([0, 1]), make([2]), **parameters), wanted)
    assert wanted[9] == -math.inf


def test_an_id_that_occurs_often_is_penalised_once_for_repetition() -> None:
    wanted = adjusted([3, 9], [10], repetition_penalty=1.7)
    assert torch.equal(adjusted([3, 9, 3, 3, 9], [10, 10, 3], repetition_penalty=1.7), wanted)


def test_allowed_ids_may_repeat() -> None:
    assert torch.equal(adjusted(allowed_token_ids=(5, 3, 5, 5)), adjusted(allowed_token_ids=(3, 5)))
    assert banned([7], [], allowed_token_ids=(5, 3, 5), bad_words_ids=((5,),)) == set(range(VOCAB)) - {3}


def test_allowed_ids() -> None:
    assert banned(allowed_token_ids=(3, 5)) == set(range(VOCAB)) - {3, 5}
    assert adjusted(allowed_token_ids=(3,))[3] == torch.linspace(-3.0, 3.0, VOCAB)[3]


@pytest.mark.parametrize(
    ("prompt", "output", "ends"),
    [
        ([], [], {4}),
        ([9, 1], [], {4}),
        ([9], [1, 2], {4, 3}),
        ([9, 1], [2], {4, 3}),  # the word begins in the prompt
        ([9, 1, 2], [], {4, 3}),
        ([2], [1], {4}),
        ([2], [], {4}),  # the text is shorter than the word
        ([1, 2], [9], {4}),
        ([1, 2, 0], [1, 2], {4, 3}),
    ],
)
def test_bad_words(prompt: list[int], output: list[int], ends: set[int]) -> None:
    assert banned(prompt, output, bad_words_ids=((4,), (1, 2, 3))) == ends


def test_min_tokens_holds_back_stop_ids() -> None:
    assert banned([7], [], min_tokens=2, stop_token_ids=(0, 2, 999)) == {0, 2}
    assert banned([7], [1], min_tokens=2, stop_token_ids=(0, 2)) == {0, 2}
    assert banned([7], [1, 1], min_tokens=2, stop_token_ids=(0, 2)) == set()


def test_bans_give_way_where_nothing_else_is_left() -> None:
    parameters = {"allowed_token_ids": (4, 5), "min_tokens": 3, "stop_token_ids": (4, 5)}
    assert banned(**parameters) == set(range(VOCAB)) - {4, 5}
    assert banned(**parameters | {"stop_token_ids": (4,)}) == set(range(VOCAB)) - {5}
    assert banned(bad_words_ids=tuple((i,) for i in range(VOCAB))) == set()


ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)


@given(prompt=ids, output=st.lists(st.integers(0, VOCAB - 1), max_size=20), seed=st.integers(0, 99))
def test_same_as_transformers(prompt: list[int], output: list[int], seed: int) -> None:
    from transformers.generation import logits_process as theirs

    scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))
    history, rows = torch.tensor([prompt + output]), scores.unsqueeze(0)
    ours = adjusted(prompt, output, scores, repetition_penalty=1.7)
    assert torch.equal(ours, theirs.RepetitionPenaltyLogitsProcessor(1.7)(history, rows)[0])
    words = [[1], [2, 3], [0, 0, 4], [1, 2, 3, 5]]
    ours = adjusted(prompt, output, scores, bad_words_ids=tuple(map(tuple, words)))
    assert torch.equal(ours, theirs.NoBadWordsLogitsProcessor(words, eos_token_id=None)(history, rows)[0])
    early = theirs.MinNewTokensLengthLogitsProcessor(len(prompt), 5, [2, 7], device="cpu")
    ours = adjusted(prompt, output, scores, min_tokens=5, stop_token_ids=(2, 7))
    assert torch.equal(ours, early(history, rows)[0])
    bias = theirs.SequenceBiasLogitsProcessor([[[3], 2.5], [[4], -100.0]])
    assert torch.equal(adjusted(prompt, output, scores, logit_bias={3: 2.5, 4: -100.0}), bias(history, rows)[0])


@pytest.mark.parametrize(
    "reads, params",
    [
        (False, {}),
        (False, {"min_tokens": 5, "stop_token_ids": (1,)}),
        (False, {"logit_bias": {1: 2.0}, "allowed_token_ids": (1, 2)}),
        (False, {"bad_words_ids": ((1,), (2,))}),
        (True, {"bad_words_ids": ((1,), (2, 3))}),
        (True, {"repetition_penalty": 1.1}),
        (True, {"frequency_penalty": -0.1}),
        (True, {"presence_penalty": 0.1}),
    ],
)
def test_what_reads_the_ids_before_a_token(reads: bool, params: dict[str, object]) -> None:
    assert Sampling(max_tokens=9, seed=0, **params).reads_history is reads
    if not reads:  # ids that are not known yet stand as -1
        assert torch.equal(adjusted([0], [3, 4], **params), adjusted([0], [-1, -1], **params))
