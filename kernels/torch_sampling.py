"""The definition of the sampling kernels in torch: runs on any device, over all rows at once.

The module implements `kernels.sampling.DeviceSamplingKernels`; the functions' contracts are there. Used in tests, and
where no compiled version runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve_llm.kernels.sampling import (
    BANNED,
    REPEATED,
    DeviceSamplingKernels,
    Draw,
    LogitAdjustments,
    Logprobs,
    LogprobsTensors,
)


def sample(logits: Tensor, draws: Tensor, sampled: bool = True, filtered: bool = True) -> Tensor:
    highest, best = logits.float().max(dim=1, keepdim=True)
    if not sampled:
        return torch.where(highest.isfinite(), best, -1).flatten()
    logits = logits.float()
    temperature, top_k, top_p, min_p, noise = draws.T.unsqueeze(-1)  # (5, rows, 1)
    vocab = logits.shape[1]
    is_sampled = temperature > 0.0
    # a greedy row keeps only its most likely token
    temperature = torch.where(is_sampled, temperature, 1.0)
    min_p = torch.where(is_sampled, min_p, 1.0)

    weights = ((logits - highest).double() / temperature).exp()  # (rows, vocab)
    order = _to_ordered_ints(logits)
    kept = weights >= min_p
    top_k = torch.where(top_k > 0, top_k.clamp(max=vocab), vocab)
    kept &= order >= _find_threshold(order, torch.ones_like(weights), top_k)
    weights = torch.where(kept, weights, 0.0)
    wanted = top_p * weights.sum(1, keepdim=True)
    kept &= (order >= _find_threshold(order, weights, wanted)) | (top_p >= 1.0)
    sums = torch.where(kept, weights, 0.0).cumsum(1)
    total = sums[:, -1:]
    target = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(sums, target, right=True)
    return torch.where(highest.isfinite(), torch.where(is_sampled, ids, best), -1).flatten()


def log_softmax_gather(logits: Tensor, ids: Tensor, k: int) -> LogprobsTensors:
    logits = logits.float()
    vocab = logits.shape[1]
    log_softmax = logits.double().log_softmax(dim=1)
    index = ids.clamp(min=0).unsqueeze(1)
    rank = 1 + (logits > logits.gather(1, index)).sum(1)
    # larger logits first, among equals the lower id
    order = (_to_ordered_ints(logits) << 32) - torch.arange(vocab, device=logits.device)
    top = order.topk(min(k, vocab), dim=1).indices
    rank = torch.where(logits.amax(1).isfinite(), rank, 0)
    return LogprobsTensors(log_softmax.gather(1, index).flatten(), rank, top, log_softmax.gather(1, top))


def adjust(scores: Tensor, adjustments: LogitAdjustments) -> None:
    for span in adjustments.spans:
        row, first, last, _, begin, end = span.tolist()
        repetition = span[3].view(torch.float32)
        columns, bias, flags, penalty = adjustments.entries[first:last].T
        values = scores[row, columns] + _to_floats(bias)
        values = torch.where((flags & BANNED) > 0, -torch.inf, values)
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where((flags & REPEATED) > 0, repeated, values) - _to_floats(penalty)
        scores[row, begin:end] = -torch.inf
        scores[row, columns] = values


class SyncSamplingKernels:
    """`kernels.sampling.SamplingKernels` on top of a `DeviceSamplingKernels`: waits for each result."""

    def __init__(self, kernels: DeviceSamplingKernels) -> None:
        self._kernels = kernels

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        packed = torch.tensor(draws, dtype=torch.float64).to(logits.device)
        sampled = any(draw.temperature for draw in draws)
        filtered = any(draw.top_k or draw.top_p < 1.0 or draw.min_p for draw in draws)
        return self._kernels.sample(logits, packed, sampled=sampled, filtered=filtered).tolist()

    def logprobs(self, logits: Tensor, ids: Sequence[int], k: int) -> list[Logprobs]:
        result = self._kernels.log_softmax_gather(logits, torch.tensor(ids, device=logits.device), k)
        columns = [column.tolist() for column in result]
        if 0 in columns[1]:
            raise ValueError("logits are not finite")
        return [Logprobs(*row) for row in zip(*columns, strict=True)]

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(1)

    def top_k(self, logits: Tensor, k: int) -> list[Tensor]:
        ids = []
        for row in logits:
            highest, best = row.max(0)
            kept = row >= row.topk(k).values[-1]
            ids.append(kept.nonzero().flatten() if highest.isfinite() else best.unsqueeze(0))
        return ids

    def apply_masks(self, scores: Tensor, rows: Sequence[int], masks: Tensor) -> None:
        self._kernels.apply_masks(scores, torch.tensor(rows, device=scores.device), masks.to(scores.device))


def apply_masks(scores: Tensor, rows: Tensor, masks: Tensor) -> None:
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    allowed = (masks.unsqueeze(2) >> shifts & 1).flatten(1)[:, : scores.shape[1]]
    scores[rows] = scores[rows].masked_fill(allowed == 0, -torch.inf)


def _to_floats(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float32)


def _to_ordered_ints(values: Tensor) -> Tensor:
    """int64 in the order of float32 values: their bits, those of negative numbers inverted."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes 0 of -0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def _find_threshold(order: Tensor, masses: Tensor, wanted: Tensor) -> Tensor:
    """The largest number such that the masses of the columns from it up sum to at least `wanted`, by bisection.

    order: (rows, vocab) int64 of 32 bits. masses: (rows, vocab) float64. wanted: (rows, 1), at most a row's sum.
    """
    low = torch.full_like(wanted, -(2**31), dtype=torch.int64)
    high = torch.full_like(wanted, 2**31 - 1, dtype=torch.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        is_enough = torch.where(order >= middle, masses, 0.0).sum(1, keepdim=True) >= wanted
        low = torch.where(is_enough, middle, low)
        high = torch.where(is_enough, high, middle - 1)
    return low
