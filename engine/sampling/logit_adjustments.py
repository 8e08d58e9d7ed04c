"""Logit biases, bans and penalties: what a request's parameters do to its logits before sampling.

`adjust` defines them for one row, with the formulas and the order of vLLM. `pack_adjustments` packs the same changes of
many rows for one launch of `kernels.sampling.DeviceSamplingKernels.adjust`. Rows without such parameters are not
touched.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence, Set
from typing import NamedTuple

import msgspec
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
_NAMED, _IN_PROMPT, _IN_OUTPUT = _KINDS = range(3)  # reasons for which an id has an entry
_NO_ENTRIES = np.zeros((0, 4), np.int32)
_NO_SPANS = np.zeros((0, 6), np.int32)


class SampleRow(msgspec.Struct, frozen=True, gc=False):
    """One sequence whose next token is to be sampled."""

    sampling: Sampling
    prompt_ids: Ids
    output_ids: Ids  # all ids so far; their number is the new token's position in the output
    mask: npt.NDArray[np.int32] | None = None  # from a grammar, as in `grammar_mask`; on ranks that sample


def is_adjusted(row: SampleRow) -> bool:
    """Whether biases, bans or penalties may change the logits of the row's next token."""
    return row.sampling.adjusts_logits or len(row.output_ids) < row.sampling.min_tokens


def adjust(scores: Tensor, row: SampleRow) -> None:
    """Change one row of logits in place. scores: (vocab,) float32.

    In this order: logit_bias is added; ids that are banned or not allowed become -inf; repetition_penalty divides the
    positive and multiplies the negative logits of ids in prompt or output (CTRL, arXiv:1909.05858); frequency_penalty
    times the number of occurrences in the output, and presence_penalty, are subtracted for ids in the output.
    """
    sampling = row.sampling
    if sampling.logit_bias:
        biases = np.fromiter(sampling.logit_bias.values(), np.float32, len(sampling.logit_bias))
        index = _to_index(sampling.logit_bias, scores)
        scores.scatter_add_(0, index, torch.from_numpy(biases).to(scores.device))
    allowed, banned = find_allowed_and_banned(row, len(scores))
    if allowed:
        is_whole = allowed is sampling.allowed_set
        index = _to_index(sampling.allowed_array if is_whole else allowed, scores)
        kept = scores.gather(0, index)
        scores.fill_(-torch.inf)
        scores.scatter_(0, index, kept)
    elif banned:
        scores[_to_index(banned, scores)] = -torch.inf
    if sampling.repetition_penalty != 1.0:
        index = torch.from_numpy(_history(row)).to(scores.device)  # an id that occurs twice gets the same value twice
        values = scores.gather(0, index)
        penalty = sampling.repetition_penalty
        scores.scatter_(0, index, torch.where(values > 0, values / penalty, values * penalty))
    if sampling.frequency_penalty or sampling.presence_penalty:
        ids, penalties = _output_penalties(row)
        index = torch.from_numpy(ids).to(scores.device)
        scores.scatter_add_(0, index, torch.from_numpy(-penalties).to(scores.device))


def find_allowed_and_banned(row: SampleRow, vocab_size: int) -> tuple[Set[int], Set[int]]:
    """The only possible ids if allowed_token_ids names any; otherwise the ids banned by bad_words_ids and min_tokens.

    If the bans would leave no id, they are dropped, because an id that ends the request early or completes a bad word
    is better than none.
    """
    sampling = row.sampling
    banned = find_bad_word_ends(row) if sampling.bad_words_ids else set()
    if len(row.output_ids) < sampling.min_tokens and row.mask is None:  # the mask already takes min_tokens into account
        # a checkpoint may name end ids without an embedding
        banned.update(token_id for token_id in sampling.stop_token_ids if token_id < vocab_size)
    if sampling.allowed_token_ids:
        allowed = sampling.allowed_set
        return (allowed - banned) or allowed if banned else allowed, set()
    return set(), banned if len(banned) < vocab_size else set()


def find_bad_word_ends(row: SampleRow) -> set[int]:
    """Find the last ids of bad words whose other ids are the latest ones; a word may begin in the prompt."""
    ends = set()
    latest = next((int(ids[-1]) for ids in (row.output_ids, row.prompt_ids) if len(ids)), None)
    for word in row.sampling.bad_words_ids:
        # runs for every word in every step; the first comparison rules out most
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
    adjusted = [index for index, row in enumerate(rows) if is_adjusted(row)]
    if not adjusted:
        return _NO_ENTRIES, _NO_SPANS
    named = [_name_ids(rows[index], vocab_size) for index in adjusted]
    is_limited = np.array([ids.is_limited for ids in named])
    rows = [rows[index] for index in adjusted]
    samplings = [row.sampling for row in rows]
    entries, places, keys = _pack_entries(rows, named, is_limited)
    borders = np.searchsorted(places, np.arange(len(rows) + 1))  # where the entries of each row begin and end

    num_columns = np.where(is_limited, vocab_size, np.diff(borders))  # or entries, covered by the row's spans
    num_spans = -(-num_columns // SPAN_COLUMNS)
    owners = np.repeat(np.arange(len(rows)), num_spans)
    begins = (np.arange(len(owners)) - np.repeat(np.cumsum(num_spans) - num_spans, num_spans)) * SPAN_COLUMNS
    ends = np.minimum(begins + SPAN_COLUMNS, num_columns[owners])
    spans = np.zeros((len(owners), 6), np.int32)
    spans[:, 0] = np.array(adjusted)[owners]
    spans[:, 3] = np.array([sampling.repetition_penalty for sampling in samplings], np.float32).view(np.int32)[owners]
    limited = is_limited[owners]
    for field, limits in ((1, begins), (2, ends)):
        by_column = np.searchsorted(keys, _to_keys(owners, limits))
        spans[:, field] = np.where(limited, by_column, borders[owners] + limits)
        spans[limited, field + 3] = limits[limited]
    return entries, spans


class _NamedIds(NamedTuple):
    """The ids named in a row's parameters."""

    allowed: Set[int]
    banned: Set[int]
    biases: dict[int, float]

    @property
    def is_limited(self) -> bool:
        """Whether only allowed ids may be sampled; other parameters then matter for these only."""
        return bool(self.allowed)

    @property
    def entries(self) -> Iterable[int]:
        """The ids that need an entry."""
        return self.allowed or [*self.banned, *self.biases]


def _name_ids(row: SampleRow, vocab_size: int) -> _NamedIds:
    return _NamedIds(*find_allowed_and_banned(row, vocab_size), row.sampling.logit_bias)


def _pack_entries(
    rows: Sequence[SampleRow], named: Sequence[_NamedIds], is_limited: npt.NDArray[np.bool_]
) -> tuple[_Int32s, _Int64s, _Int64s]:
    """The entries of all rows, the number of each entry's row, and their keys (`_to_keys`), ascending.

    Every occurrence of an id becomes a number: the key with the kind of occurrence in its lowest bits. One sort groups
    them by row and id, named ids first and those of the output last.
    """
    samplings = [row.sampling for row in rows]
    is_repeated = np.array([sampling.repetition_penalty != 1.0 for sampling in samplings])
    frequency = np.array([sampling.frequency_penalty for sampling in samplings])
    presence = np.array([sampling.presence_penalty for sampling in samplings])
    reads_output = is_repeated | (frequency != 0.0) | (presence != 0.0)
    sources: tuple[Sequence[Ids], ...] = (
        [_to_array(ids.entries) for ids in named],
        [row.prompt_ids if reads else () for row, reads in zip(rows, is_repeated, strict=True)],
        [row.output_ids if reads else () for row, reads in zip(rows, reads_output, strict=True)],
    )
    occurrences = np.concatenate([_join(ids) << 2 | kind for kind, ids in zip(_KINDS, sources, strict=True)])
    occurrences.sort()
    all_keys = occurrences >> 2
    firsts = np.flatnonzero(np.diff(all_keys, prepend=-1))
    lasts = np.append(firsts, len(all_keys))[1:] - 1
    counts = np.add.reduceat(occurrences & 3 == _IN_OUTPUT, firsts, dtype=np.int64) if len(firsts) else firsts
    keys = all_keys[firsts]
    places = keys >> 32
    kept = ~is_limited[places] | (occurrences[firsts] & 3 == _NAMED)
    is_in_history = (occurrences[lasts] & 3 != _NAMED)[kept]
    counts = counts[kept]
    keys = keys[kept]
    places = places[kept]

    entries = np.zeros((len(keys), 4), np.int32)
    floats = entries.view(np.float32)
    entries[:, 0] = keys & 0xFFFFFFFF
    entries[is_in_history & is_repeated[places], 2] |= REPEATED
    floats[:, 3] = np.where(counts > 0, frequency[places] * counts + presence[places], 0.0)
    banned = _join([_to_array(ids.banned) for ids in named])
    entries[np.searchsorted(keys, banned), 2] |= BANNED
    biased = _join([_to_array(ids.biases) for ids in named])
    biases = np.array([bias for ids in named for bias in ids.biases.values()], np.float32)
    columns = np.searchsorted(keys, biased)
    found = np.append(keys, -1)[columns] == biased  # not all are if few ids are allowed
    floats[columns[found], 1] = biases[found]
    return entries, places, keys


def _join(ids_of_rows: Sequence[Ids]) -> _Int64s:
    """The keys of the ids of all rows."""
    places = np.repeat(np.arange(len(ids_of_rows)), [len(ids) for ids in ids_of_rows])
    return _to_keys(places, np.concatenate([np.asarray(ids, np.int64) for ids in ids_of_rows]))


def _to_keys(places: _Int64s, ids: _Int64s) -> _Int64s:
    """Numbers that order ids by the rows that they belong to."""
    return places << 32 | ids


def _output_penalties(row: SampleRow) -> tuple[_Int64s, _Float32s]:
    """The penalised ids of the output, ascending, and what to subtract from their logits."""
    sampling = row.sampling
    is_penalised = sampling.frequency_penalty or sampling.presence_penalty
    output_ids = np.asarray(row.output_ids if is_penalised else (), np.int64)
    ids, counts = np.unique(output_ids, return_counts=True)
    return ids, (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(np.float32)


def _history(row: SampleRow) -> _Int64s:
    return np.concatenate((np.asarray(row.prompt_ids, np.int64), np.asarray(row.output_ids, np.int64)))


def _to_array(ids: Iterable[int]) -> _Int64s:
    return np.array(list(ids), np.int64)


def _to_index(ids: Collection[int], scores: Tensor) -> Tensor:
    index = np.array(ids) if isinstance(ids, array) else np.fromiter(ids, np.int64, len(ids))
    return torch.from_numpy(index).to(scores.device)
