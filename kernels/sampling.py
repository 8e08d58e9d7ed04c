"""Drawing a token from a row of logits, and log-probabilities. Knows tensors only.

What a CPU runs without the compiled kernels of `cpu/sampling.cpp`: each row alone, by NumPy over the tensor's own
memory. On other devices the definition in `reference/sampling.py` runs, which is in torch.

Batch invariance: no operation here sees two rows, and each depends on a row's values and length alone.

Nothing sorts the vocabulary. Every filter is a threshold in value, so equal logits stay or go together:
- top_k: a bound from the maxima of groups leaves few candidates, among which a partition finds the k-th largest.
- top_p: weights that cannot be in the nucleus are dropped, the rest is halved by value until few enough to sort.
The draw is the inverse of the cumulative distribution in the order of ids, summed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve_llm.kernels.reference.sampling import Draw, Logprobs

__all__ = ["Draw", "Logprobs", "SamplingKernels", "choose", "largest", "likeliest", "logprobs"]

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

SORTED_AT_ONCE = 1024  # weights; above it, halving by value is cheaper
SUM_BLOCK = 512  # weights summed together before the cumulative sum


class SamplingKernels(Protocol):
    """One version of each function below; this module is one, and its functions' docstrings are the contracts.

    Logits are float32 or bfloat16, on the version's device, and are not changed.
    """

    def choose(self, logits: Tensor, draws: Sequence[Draw], /) -> list[int]: ...
    def logprobs(self, logits: Tensor, ids: Sequence[int], k: int, /) -> list[Logprobs]: ...
    def likeliest(self, logits: Tensor, /) -> Tensor: ...
    def largest(self, logits: Tensor, k: int, /) -> list[Tensor]: ...


def choose(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """One id per row, drawn as its `Draw` says; -1 for a row whose maximum is not finite (NaN, infinity, all -inf).

    logits: (rows, vocab).
    Order of the filters, as in vLLM: temperature, min_p, top_k, then top_p on what is left, renormalised. Equal values
    at a threshold are all kept. Greedy ties go to the lowest id.
    """
    with np.errstate(over="ignore"):  # a difference too large for float32 becomes -inf: weight 0
        return [_choose(row, draw) for row, draw in zip(logits.float().numpy(), draws, strict=True)]


def logprobs(logits: Tensor, ids: Sequence[int], k: int) -> list[Logprobs]:
    """For each row the natural log-softmax at its id, the id's rank, and the k likeliest.

    logits: (rows, vocab); ids: one per row. Equal logits are listed by ascending id.
    Raises ValueError if a row's maximum is not finite.
    """
    with np.errstate(over="ignore"):
        return [_logprobs(row, token_id, k) for row, token_id in zip(logits.float().numpy(), ids, strict=True)]


def likeliest(logits: Tensor) -> Tensor:
    """(rows,) int64: each row's largest logit, of equal ones the first; the first NaN if there is one."""
    return torch.from_numpy(logits.float().numpy().argmax(1))


def largest(logits: Tensor, k: int) -> list[Tensor]:
    """For each row the ids, ascending, of all logits from the k-th largest up (more than k where some equal it).

    Where a row's maximum is NaN or infinity: that id alone. k: 1 to the number of columns.
    """
    return [torch.from_numpy(_largest(row, k)) for row in logits.float().numpy()]


def _largest(logits: Floats, k: int) -> Ids:
    best = logits.argmax()
    if not math.isfinite(logits[best]):
        return np.array([best])
    return np.flatnonzero(logits >= _kth_largest(logits, k))


def _choose(logits: Floats, draw: Draw) -> int:
    if draw.temperature == 0.0:
        best = int(logits.argmax())  # the first of equals; the first NaN if there is one
        return best if math.isfinite(logits[best]) else -1
    highest = logits.max()
    if not math.isfinite(highest):
        return -1
    threshold = np.float32(-math.inf)
    if 0 < draw.top_k < len(logits):
        threshold = _kth_largest(logits, draw.top_k)
    if draw.min_p > 0.0:
        threshold = max(threshold, np.float32(float(highest) + draw.temperature * math.log(draw.min_p)))
    ids = None if threshold == -math.inf else np.flatnonzero(logits >= threshold)
    weights = (logits if ids is None else logits[ids]) - highest
    weights /= np.float32(draw.temperature)
    np.exp(weights, out=weights)
    if draw.top_p < 1.0:
        nucleus = np.flatnonzero(weights >= _nucleus_floor(weights, draw.top_p))
        ids = nucleus if ids is None else ids[nucleus]
        weights = weights[nucleus]
    place = _draw(weights, draw.noise)
    return place if ids is None else int(ids[place])


def _kth_largest(values: Floats, k: int) -> np.float32:
    """The k-th largest value, k at most len(values). The k-th largest maximum of disjoint groups cannot be above it."""
    size = len(values) // max(4 * k, 1024)  # of a group
    if size > 1:
        maxima = values[: len(values) // size * size].reshape(size, -1).max(axis=0)
        values = values[np.flatnonzero(values >= np.partition(maxima, len(maxima) - k)[len(maxima) - k])]
    return np.float32(np.partition(values, len(values) - k)[len(values) - k])


def _nucleus_floor(weights: Floats, top_p: float) -> np.float32:
    """The largest weight such that the weights from it up hold at least the share top_p of their sum."""
    total = weights.sum(dtype=np.float64)
    wanted = top_p * total
    # All weights below this one together hold less than the share 1 - top_p, so it lies at or below the floor.
    bound = np.float32((1.0 - top_p) * total / len(weights))
    rest, above = weights[np.flatnonzero(weights >= bound)], 0.0  # above: the sum of weights over those in rest
    while len(rest) > SORTED_AT_ONCE:
        bits = rest.view(np.int32)  # in the order of the weights, since none is negative
        low, high = int(bits.min()), int(bits.max())
        if low == high:
            break
        middle = (low + high + 1) // 2
        upper = rest[np.flatnonzero(bits >= middle)]
        mass = upper.sum(dtype=np.float64)
        if above + mass >= wanted:
            rest = upper
        else:
            rest, above = rest[np.flatnonzero(bits < middle)], above + mass
    if len(rest) > SORTED_AT_ONCE:
        return np.float32(rest[0])  # all equal
    falling = np.sort(rest)[::-1]
    place = int(np.searchsorted(above + np.cumsum(falling, dtype=np.float64), wanted))
    return np.float32(falling[min(place, len(falling) - 1)])


def _draw(weights: Floats, noise: float) -> int:
    """The first place whose cumulative weight exceeds noise * (sum of weights). Never a place of weight 0."""
    wide = weights.astype(np.float64)
    sums = np.cumsum(np.add.reduceat(wide, np.arange(0, len(wide), SUM_BLOCK)))
    target = min(noise * sums[-1], np.nextafter(sums[-1], 0.0))
    block = int(np.searchsorted(sums, target, side="right"))
    inside = np.cumsum(wide[block * SUM_BLOCK : (block + 1) * SUM_BLOCK])
    if block > 0:
        target -= sums[block - 1]
    target = min(target, np.nextafter(inside[-1], 0.0))  # both sums of a block round differently
    return block * SUM_BLOCK + int(np.searchsorted(inside, target, side="right"))


def _logprobs(logits: Floats, token_id: int, k: int) -> Logprobs:
    highest = logits.max()
    if not math.isfinite(highest):
        raise ValueError("logits are not finite")
    log_sum = float(highest) + math.log(np.exp(logits - highest).sum(dtype=np.float64))
    value = logits[token_id]
    rank = 1 + int(np.count_nonzero(logits > value))
    ids: Ids = np.empty(0, np.intp)
    if k > 0:
        ids = np.flatnonzero(logits >= _kth_largest(logits, min(k, len(logits))))
        ids = ids[np.argsort(-logits[ids], kind="stable")][:k]
    return Logprobs(float(value) - log_sum, rank, ids.tolist(), (logits[ids].astype(np.float64) - log_sum).tolist())
