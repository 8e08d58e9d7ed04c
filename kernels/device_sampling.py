"""Sampling that stays on the device: nothing here waits for it, and what comes out are tensors on it. Contracts.

`reference/device_sampling.py` is the definition in torch, `triton/sampling.py` is what a GPU runs. `kernels.sampling`
is for who wants numbers at once; `ListSampling` makes one of these into one of those. Knows tensors only.

Every result depends on its own row alone, and is the same each time: where many numbers are summed in no fixed order
they are integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from serve_llm.kernels.reference import sampling as reference
from serve_llm.kernels.reference.sampling import Draw, Logprobs

EDIT_COLUMNS = 1024  # that one part of a row has at the most, and entries that one span has
BANNED, REPEATED = 1, 2  # flags of an entry


class Edits(NamedTuple):
    """What `DeviceSampling.adjust` does to rows of logits. float32 numbers stand here as their bits.

    entries: (n, 4) int32: column; bias, added; flags; penalty, subtracted last. Columns of a row occur once, ascending.
    spans: (m, 6) int32: row; first entry and the one past the last, at most EDIT_COLUMNS of them; repetition penalty;
    begin and end of columns, at most EDIT_COLUMNS, all of which become -inf but for these entries: equal where none do.
    """

    entries: Tensor
    spans: Tensor


class LogSoftmax(NamedTuple):
    """Natural log-softmax of rows. Where a row's maximum is not finite, rank is 0 and the rest means nothing."""

    logprob: Tensor  # (rows,) float64
    rank: Tensor  # (rows,) int64: 1 + number of strictly larger logits
    top_ids: Tensor  # (rows, k) int64: the k likeliest, of equal ones the lower id first
    top_logprobs: Tensor  # (rows, k) float64


class DeviceSampling(Protocol):
    """One version of each function.

    Logits are (rows, columns) float32, bfloat16 or float16 of at most 2**20 columns, and are not changed.
    """

    def choose(self, logits: Tensor, draws: Tensor, /, sampled: bool = True, filtered: bool = True) -> Tensor:
        """(rows,) int64: `kernels.sampling.choose`, with draws (rows, 5) float64 on the device, columns as in `Draw`.

        sampled: False if the caller knows that all rows are greedy; filtered: if it knows that none has top_k, top_p
        or min_p. They save work and change no result.
        """
        ...

    def log_softmax_gather(self, logits: Tensor, ids: Tensor, k: int, /) -> LogSoftmax:
        """Log-softmax at each row's id, (rows,) int64, and of the k likeliest, or of all columns where they are fewer.
        An id of -1 gives any number."""
        ...

    def adjust(self, scores: Tensor, edits: Edits, /) -> None:
        """Change rows of scores, (rows, columns) float32, in place. In this order: the bias is added; a banned one
        becomes -inf; of a repeated one what is positive is divided and what is negative multiplied by the repetition
        penalty; the penalty is subtracted."""
        ...


class ListSampling:
    """`kernels.sampling.SamplingKernels` by means of a `DeviceSampling`: waits for each result."""

    likeliest = staticmethod(reference.likeliest)
    largest = staticmethod(reference.largest)

    def __init__(self, kernels: DeviceSampling) -> None:
        self._kernels = kernels

    def choose(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        wanted = torch.tensor(draws, dtype=torch.float64).to(logits.device)
        sampled = any(draw.temperature for draw in draws)
        filtered = any(draw.top_k or draw.top_p < 1.0 or draw.min_p for draw in draws)
        return self._kernels.choose(logits, wanted, sampled=sampled, filtered=filtered).tolist()

    def logprobs(self, logits: Tensor, ids: Sequence[int], k: int) -> list[Logprobs]:
        found = self._kernels.log_softmax_gather(logits, torch.tensor(ids, device=logits.device), k)
        columns = [column.tolist() for column in found]
        if 0 in columns[1]:
            raise ValueError("logits are not finite")
        return [Logprobs(*row) for row in zip(*columns, strict=True)]
