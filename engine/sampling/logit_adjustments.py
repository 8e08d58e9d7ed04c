"""Logit biases, bans and penalties: what a request's parameters do to its logits before sampling.

`adjust` defines them for one row, with the formulas and the order of vLLM. `pack_adjustments` packs the same changes of
many rows for one launch of `kernels.sampling.DeviceSampling.adjust`. Rows whose requests ask for none are not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve_llm.common.types import Sampling
from serve_llm.kernels.sampling import BANNED, REPEATED, SPAN_COLUMNS

Ids = Sequence[int] | npt.NDArray[np.int64]
_Int32s = npt.NDArray[np.int32]
_Int64s = npt.NDArray[np.int64]
_Float32s = npt.NDArray[np.float32]
_NO_ENTRIES = np.zeros((0, 4), np.int32)
_NO_SPANS = np.zeros((0, 6), np.int32)


class SampleRow(NamedTuple):
    """One sequence whose next token is to be sampled."""

    sampling: Sampling
    prompt_ids: Ids
    output_ids: Ids  # all so far: their number is the new token's position in the output
    mask: npt.NDArray[np.int32] | None = None  # from a grammar, as in `grammar_mask`; on ranks that sample


def is_adjusted(row: SampleRow) -> bool:
    """Whether biases, bans or penalties may change the logits of the row's next token."""
    sampling = row.sampling
    return bool(
        sampling.logit_bias
        or sampling.allowed_token_ids
        or sampling.bad_words_ids
        or len(row.output_ids) < sampling.min_tokens
        or sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
    )


def adjust(scores: Tensor, row: SampleRow) -> None:
    """Change one row of logits in place. scores: (vocab,) float32.

    In this order: logit_bias is added; ids that are banned or not allowed become -inf; repetition_penalty divides the
    positive and multiplies the negative logits of ids in prompt or output (CTRL, arXiv:1909.05858); frequency_penalty
    times the number of occurrences in the output, and presence_penalty, are subtracted for ids in the output.
    """
    sampling = row.sampling
    if sampling.logit_bias:
        bias = torch.tensor(list(sampling.logit_bias.values()), dtype=scores.dtype, device=scores.device)
        scores[_to_index(sampling.logit_bias, scores)] += bias
    allowed, banned = find_allowed_and_banned(row, len(scores))
    if allowed:
        index = _to_index(allowed, scores)
        kept = scores[index]
        scores.fill_(-torch.inf)
        scores[index] = kept
    elif banned:
        scores[_to_index(banned, scores)] = -torch.inf
    if sampling.repetition_penalty != 1.0:
        index = torch.from_numpy(np.unique(_history(row))).to(scores.device)
        values = scores[index]
        penalty = sampling.repetition_penalty
        scores[index] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        ids, penalties = _output_penalties(row)
        scores[torch.from_numpy(ids).to(scores.device)] -= torch.from_numpy(penalties).to(scores.device)


def find_allowed_and_banned(row: SampleRow, vocab_size: int) -> tuple[set[int], set[int]]:
    """The only possible ids if allowed_token_ids names any; otherwise the ids banned by bad_words_ids and min_tokens.

    Where the bans would leave no id they are dropped: an id that ends the request early or completes a bad word is
    better than none.
    """
    sampling = row.sampling
    banned = find_bad_word_ends(row) if sampling.bad_words_ids else set()
    if len(row.output_ids) < sampling.min_tokens and row.mask is None:  # a mask already takes min_tokens into account
        # a checkpoint may name end ids that it has no embedding for
        banned.update(token_id for token_id in sampling.stop_token_ids if token_id < vocab_size)
    if sampling.allowed_token_ids:
        allowed = set(sampling.allowed_token_ids)
        return (allowed - banned) or allowed, set()
    return set(), banned if len(banned) < vocab_size else set()


def find_bad_word_ends(row: SampleRow) -> set[int]:
    """The last ids of the bad words whose other ids are the latest ones; a word may begin in the prompt."""
    ends = set()
    latest = next((int(ids[-1]) for ids in (row.output_ids, row.prompt_ids) if len(ids)), None)
    for word in row.sampling.bad_words_ids:
        # runs for every word in every step: the first comparison rules out most
        if len(word) == 1 or (word[-2] == latest and _ends_with(row, word[:-1])):
            ends.add(word[-1])
    return ends


def _ends_with(row: SampleRow, ids: tuple[int, ...]) -> bool:
    num_from_prompt = max(0, len(ids) - len(row.output_ids))
    if num_from_prompt > len(row.prompt_ids):
        return False
    prompt_end = row.prompt_ids[len(row.prompt_ids) - num_from_prompt :]
    output_end = row.output_ids[len(row.output_ids) - len(ids) + num_from_prompt :]
    return (*prompt_end, *output_end) == ids


def pack_adjustments(rows: Sequence[SampleRow], vocab_size: int) -> tuple[_Int32s, _Int32s]:
    """Entries (n, 4) and spans (m, 6) of all rows, in the format of `kernels.sampling.LogitAdjustments`."""
    all_entries: list[_Int32s] = []
    all_spans: list[_Int32s] = []
    first = 0
    for index, row in enumerate(rows):
        if not is_adjusted(row):
            continue
        allowed, banned = find_allowed_and_banned(row, vocab_size)
        entries = _pack_entries(row, _to_array(allowed), _to_array(banned))
        begins = np.arange(0, vocab_size if allowed else len(entries), SPAN_COLUMNS)
        spans = np.zeros((len(begins), 6), np.int32)
        spans[:, 0] = index
        if allowed:
            spans[:, 4] = begins
            spans[:, 5] = np.minimum(begins + SPAN_COLUMNS, vocab_size)
            borders = np.searchsorted(entries[:, 0], np.append(begins, vocab_size))
        else:
            borders = np.append(begins, len(entries))
        spans[:, 1] = first + borders[:-1]
        spans[:, 2] = first + borders[1:]
        spans[:, 3] = np.float32(row.sampling.repetition_penalty).view(np.int32)
        all_entries.append(entries)
        all_spans.append(spans)
        first += len(entries)
    if not all_spans:
        return _NO_ENTRIES, _NO_SPANS
    return np.concatenate(all_entries), np.concatenate(all_spans)


def _pack_entries(row: SampleRow, allowed: _Int64s, banned: _Int64s) -> _Int32s:
    sampling = row.sampling
    biased = _to_array(sampling.logit_bias)
    biases = np.array(list(sampling.logit_bias.values()), np.float32)
    repeated = _history(row) if sampling.repetition_penalty != 1.0 else _to_array(())
    penalised, penalties = _output_penalties(row)
    columns = np.unique(allowed if len(allowed) else np.concatenate((biased, banned, repeated, penalised)))
    entries = np.zeros((len(columns), 4), np.int32)
    floats = entries.view(np.float32)
    entries[:, 0] = columns
    entries[np.isin(columns, banned), 2] |= BANNED
    entries[np.isin(columns, repeated), 2] |= REPEATED
    for field, ids, values in ((1, biased, biases), (3, penalised, penalties)):
        is_present = np.isin(ids, columns)  # not all are, where few ids are allowed
        floats[np.searchsorted(columns, ids[is_present]), field] = values[is_present]
    return entries


def _output_penalties(row: SampleRow) -> tuple[_Int64s, _Float32s]:
    """The ids of the output that are penalised, ascending, and what to subtract from their logits."""
    sampling = row.sampling
    is_penalised = sampling.frequency_penalty or sampling.presence_penalty
    output_ids = np.asarray(row.output_ids if is_penalised else (), np.int64)
    ids, counts = np.unique(output_ids, return_counts=True)
    return ids, (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(np.float32)


def _history(row: SampleRow) -> _Int64s:
    return np.concatenate((np.asarray(row.prompt_ids, np.int64), np.asarray(row.output_ids, np.int64)))


def _to_array(ids: Iterable[int]) -> _Int64s:
    return np.array(list(ids), np.int64)


def _to_index(ids: Iterable[int], scores: Tensor) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=scores.device)
