"""What `penalties.adjust` does to many rows, packed for one launch on a device. NumPy alone; same formulas, same order.

A row's changes are entries, one per column that is changed, and spans of entries; the format stands at
`kernels.device_sampling.Edits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from serve_llm.engine.sample.penalties import Ids, is_adjusted, masked
from serve_llm.engine.sample.sampler import SampleRow
from serve_llm.engine.types import Sampling
from serve_llm.kernels.device_sampling import BANNED, EDIT_COLUMNS, REPEATED

Ints = npt.NDArray[np.int32]
Columns = npt.NDArray[np.int64]


def pack(rows: Sequence[SampleRow], vocab_size: int) -> tuple[Ints, Ints]:
    """Entries (n, 4) and spans (m, 6) of all rows; none where nothing is changed."""
    entries: list[Ints] = []
    spans: list[Ints] = []
    first = 0
    for number, row in enumerate(rows):
        if not is_adjusted(row.sampling, len(row.output_ids)):
            continue
        allowed, banned = masked(*row, vocab_size)
        own = _entries(row, _array(allowed), _array(banned))
        begins = np.arange(0, vocab_size if allowed else len(own), EDIT_COLUMNS)
        span = np.zeros((len(begins), 6), np.int32)
        span[:, 0] = number
        if allowed:
            span[:, 4] = begins
            span[:, 5] = np.minimum(begins + EDIT_COLUMNS, vocab_size)
            borders = np.searchsorted(own[:, 0], np.append(begins, vocab_size))
        else:
            borders = np.append(begins, len(own))
        span[:, 1], span[:, 2] = first + borders[:-1], first + borders[1:]
        span[:, 3] = np.float32(row.sampling.repetition_penalty).view(np.int32)
        entries.append(own)
        spans.append(span)
        first += len(own)
    return _joined(entries, 4), _joined(spans, 6)


def _entries(row: SampleRow, allowed: Columns, banned: Columns) -> Ints:
    sampling = row.sampling
    biased = _array(sampling.logit_bias)
    repeated = _history(row.prompt_ids, row.output_ids) if sampling.repetition_penalty != 1.0 else _array(())
    output, penalties = _output_penalties(sampling, row.output_ids)
    columns = allowed if len(allowed) else np.concatenate((biased, banned, repeated, output))
    columns = np.unique(columns)
    entries = np.zeros((len(columns), 4), np.int32)
    floats = entries.view(np.float32)
    entries[:, 0] = columns
    entries[np.isin(columns, banned), 2] |= BANNED
    entries[np.isin(columns, repeated), 2] |= REPEATED
    for ids, numbers, field in (
        (biased, np.array(list(sampling.logit_bias.values()), np.float32), 1),
        (output, penalties, 3),
    ):
        there = np.isin(ids, columns)  # not all, where few are allowed
        floats[np.searchsorted(columns, ids[there]), field] = numbers[there]
    return entries


def _output_penalties(sampling: Sampling, output_ids: Ids) -> tuple[Columns, npt.NDArray[np.float32]]:
    if not (sampling.frequency_penalty or sampling.presence_penalty):
        output_ids = ()
    output, counts = np.unique(np.asarray(output_ids, np.int64), return_counts=True)
    return output, (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(np.float32)


def _history(prompt_ids: Ids, output_ids: Ids) -> Columns:
    return np.concatenate((np.asarray(prompt_ids, np.int64), np.asarray(output_ids, np.int64)))


def _array(ids: Iterable[int]) -> Columns:
    return np.array(list(ids), np.int64)


def _joined(parts: list[Ints], width: int) -> Ints:
    return np.concatenate(parts) if parts else np.zeros((0, width), np.int32)
