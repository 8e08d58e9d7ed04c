"""What `kernels.sampling` must compute, in torch over all rows at once; runs on any device. For tests, for reading, and
for devices without a version of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Draw(NamedTuple):
    """How one row's token is drawn."""

    temperature: float  # 0: greedy, and nothing else counts; otherwise at least 1e-5
    top_k: int  # 0: off
    top_p: float  # 0 < top_p <= 1
    min_p: float  # share of the likeliest token's probability, 0: off
    noise: float  # in [0, 1)


class Logprobs(NamedTuple):
    """Natural log-softmax at one position."""

    logprob: float
    rank: int  # 1 + number of strictly larger logits
    top_ids: list[int]
    top_logprobs: list[float]


def choose(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Same contract as `kernels.sampling.choose`."""
    if all(draw.temperature == 0.0 for draw in draws):
        highest, best = logits.max(dim=1)
        return torch.where(highest.isfinite(), best, -1).tolist()
    return draw_ids(logits.float(), torch.tensor(draws, dtype=torch.float64, device=logits.device)).tolist()


def draw_ids(logits: Tensor, draws: Tensor) -> Tensor:
    """(rows,) int64: what `choose` lists. logits: float32; draws: (rows, 5) float64, columns as in `Draw`."""
    highest, best = logits.max(dim=1, keepdim=True)
    temperature, top_k, top_p, min_p, noise = draws.T.unsqueeze(-1)  # (5, rows, 1)
    vocab = logits.shape[1]
    sampled = temperature > 0.0
    # a greedy row keeps its likeliest token only
    temperature = torch.where(sampled, temperature, 1.0)
    min_p = torch.where(sampled, min_p, 1.0)

    weights = ((logits - highest).double() / temperature).exp()  # (rows, vocab)
    order = ordered(logits)
    kept = weights >= min_p
    kept &= order >= _threshold(order, torch.ones_like(weights), torch.where(top_k > 0, top_k.clamp(max=vocab), vocab))
    weights = torch.where(kept, weights, 0.0)
    wanted = top_p * weights.sum(1, keepdim=True)
    kept &= (order >= _threshold(order, weights, wanted)) | (top_p >= 1.0)
    sums = torch.where(kept, weights, 0.0).cumsum(1)
    total = sums[:, -1:]
    target = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(sums, target, right=True)
    return torch.where(highest.isfinite(), torch.where(sampled, drawn, best), -1).flatten()


def likeliest(logits: Tensor) -> Tensor:
    """Same contract as `kernels.sampling.likeliest`."""
    return logits.argmax(1)


def largest(logits: Tensor, k: int) -> list[Tensor]:
    """Same contract as `kernels.sampling.largest`."""
    found = []
    for row in logits:
        highest, best = row.max(0)
        kept = row >= row.topk(k).values[-1]
        found.append(kept.nonzero().flatten() if highest.isfinite() else best.unsqueeze(0))
    return found


def logprobs(logits: Tensor, ids: Sequence[int], k: int) -> list[Logprobs]:
    """Same contract as `kernels.sampling.logprobs`."""
    columns = [column.tolist() for column in log_softmax(logits, torch.tensor(ids, device=logits.device), k)]
    if 0 in columns[1]:
        raise ValueError("logits are not finite")
    return [Logprobs(*row) for row in zip(*columns, strict=True)]


def log_softmax(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Logprobs` for all rows, in tensors; rank 0 where a row's maximum is not finite.

    ids: (rows,) int64; -1 gives any number.
    """
    logits = logits.float()
    vocab = logits.shape[1]
    wide = logits.double().log_softmax(dim=1)
    index = ids.clamp(min=0).unsqueeze(1)
    rank = 1 + (logits > logits.gather(1, index)).sum(1)
    # larger logits first, among equals the lower id
    order = (ordered(logits) << 32) - torch.arange(vocab, device=logits.device)
    top = order.topk(min(k, vocab), dim=1).indices
    rank = torch.where(logits.amax(1).isfinite(), rank, 0)
    return wide.gather(1, index).flatten(), rank, top, wide.gather(1, top)


def ordered(values: Tensor) -> Tensor:
    """int64 in the order of float32 values: their bits, those of negative numbers turned round."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes 0 of -0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def _threshold(order: Tensor, masses: Tensor, wanted: Tensor) -> Tensor:
    """The largest number such that the masses of the places from it up sum to at least `wanted`; by bisection.

    order: (rows, vocab) int64 of 32 bits. masses: (rows, vocab) float64. wanted: (rows, 1), at most a row's sum.
    """
    low = torch.full_like(wanted, -(2**31), dtype=torch.int64)
    high = torch.full_like(wanted, 2**31 - 1, dtype=torch.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        enough = torch.where(order >= middle, masses, 0.0).sum(1, keepdim=True) >= wanted
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle - 1)
    return low
