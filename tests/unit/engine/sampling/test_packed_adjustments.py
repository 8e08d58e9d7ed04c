"""The packed form of bias, bans and penalties changes logits exactly as `adjust` does, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_llm.common.types import Sampling
from serve_llm.engine.sampling.logit_adjustments import SampleRow, adjust, pack_adjustments
from serve_llm.kernels import torch_sampling as sampling
from serve_llm.kernels.sampling import SPAN_COLUMNS, LogitAdjustments

VOCAB = 12
ids = st.integers(0, VOCAB - 1)
samplings = st.builds(
    Sampling,
    max_tokens=st.just(99),
    seed=st.just(0),
    presence_penalty=st.sampled_from([0.0, -1.5, 0.3]),
    frequency_penalty=st.sampled_from([0.0, 0.25, 1.7]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    logit_bias=st.dictionaries(ids, st.floats(-100.0, 100.0), max_size=5),
    allowed_token_ids=st.one_of(st.just(()), st.lists(ids, max_size=4).map(tuple)),
    bad_words_ids=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    stop_token_ids=st.lists(st.integers(0, VOCAB + 3), max_size=VOCAB).map(tuple),
    min_tokens=st.sampled_from([0, 2, 9]),
)
sample_rows = st.builds(SampleRow, samplings, st.lists(ids, max_size=6), st.lists(ids, max_size=6).map(np.array))


def assert_packed_is_adjust(rows: list[SampleRow], vocab: int) -> None:
    wanted = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(len(rows))) * 3
    found = wanted.clone()
    entries, spans = pack_adjustments(rows, vocab)
    sampling.adjust(found, LogitAdjustments(torch.from_numpy(entries), torch.from_numpy(spans)))
    for scores, row in zip(wanted, rows, strict=True):
        adjust(scores, row)
    assert torch.equal(found, wanted)
    assert entries.dtype == spans.dtype == np.int32
    for row, first, last, _, begin, end in spans:
        columns = entries[first:last, 0]
        assert (np.diff(columns) > 0).all() and len(columns) <= SPAN_COLUMNS and end - begin <= SPAN_COLUMNS
        assert begin == end or ((begin <= columns) & (columns < end)).all(), row


@settings(max_examples=150)
@given(rows=st.lists(sample_rows, min_size=1, max_size=4))
def test_any_parameters(rows: list[SampleRow]) -> None:
    assert_packed_is_adjust(rows, VOCAB)


def test_more_entries_and_columns_than_one_span_has() -> None:
    pick, vocab = np.random.default_rng(1), 5 * SPAN_COLUMNS + 17
    prompt, output = pick.integers(0, vocab, 4000), pick.integers(0, vocab, 1500)
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {vocab - 1: 5.0, 0: -math.pi}}
    allowed = tuple(pick.integers(0, vocab, 3000).tolist())
    rows = [
        SampleRow(Sampling(max_tokens=9, seed=0, **penalties), prompt, output),
        SampleRow(Sampling(max_tokens=9, seed=0), prompt, output),
        SampleRow(Sampling(max_tokens=9, seed=0, allowed_token_ids=allowed, **penalties), prompt, output),
        SampleRow(Sampling(max_tokens=9, seed=0, allowed_token_ids=(vocab - 1,)), [], []),
    ]
    assert_packed_is_adjust(rows, vocab)


def test_nothing_asked_nothing_packed() -> None:
    entries, spans = pack_adjustments([SampleRow(Sampling(max_tokens=9, seed=0), [1], [2])], VOCAB)
    assert entries.shape == (0, 4) and spans.shape == (0, 6)
