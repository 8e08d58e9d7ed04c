"""Masks of ids, packed 32 to a word, for rows whose text must satisfy a grammar. NumPy only.

Combines a mask with the request's other restrictions. Only ids allowed by both may be sampled. If there are none, the
request fails; the grammar is never relaxed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from serve_llm.engine.sampling.logit_adjustments import SampleRow, find_bad_word_ends

Mask = npt.NDArray[np.int32]  # (ceil(vocab_size / 32),); bit i % 32 of word i // 32: id i is allowed

NOTHING_ALLOWED = "the grammar allows no token of the vocabulary here"
NOTHING_LEFT = (
    "no token is left: the grammar allows none of those that allowed_token_ids, bad_words and the model's "
    "suppress_tokens leave"
)


def unpack_masks(bits: bytes, vocab_size: int) -> Mask:
    """(rows, words), read-only, from the masks of a `SchedulerOutput`."""
    return np.frombuffer(bits, np.int32).reshape(-1, -(-vocab_size // 32))


def intersect(mask: Mask, row: SampleRow) -> tuple[Mask, str]:
    """Return the ids that may be sampled, and why there are none (empty if there are some).

    min_tokens is ignored where the grammar allows only the end of the text.
    """
    sampling = row.sampling
    if not mask.any():
        return mask, NOTHING_ALLOWED
    if sampling.allowed_token_ids:
        mask = mask & _pack(sampling.allowed_array, len(mask))
    if sampling.bad_words_ids:
        mask = mask & ~_pack(find_bad_word_ends(row), len(mask))
    if len(row.output_ids) < sampling.min_tokens:
        longer = mask & ~_pack(sampling.stop_token_ids, len(mask))
        mask = longer if longer.any() else mask
    return mask, "" if mask.any() else NOTHING_LEFT


def _pack(ids: Iterable[int], num_words: int) -> Mask:
    """Ids past the last word are skipped, because a checkpoint may name end ids without an embedding."""
    flags = np.zeros(32 * num_words, np.bool_)
    index = np.array(ids if isinstance(ids, array) else list(ids), np.int64)
    flags[index[index < len(flags)]] = True
    return np.packbits(flags, bitorder="little").view(np.int32)
