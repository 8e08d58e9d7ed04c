"""What `kernels.device_sampling` must compute, in torch; runs on any device. For tests and for reading."""

from __future__ import annotations

import torch
from torch import Tensor

from serve_llm.kernels.device_sampling import BANNED, REPEATED, Edits, LogSoftmax
from serve_llm.kernels.reference.sampling import draw_ids, log_softmax


def choose(logits: Tensor, draws: Tensor, sampled: bool = True, filtered: bool = True) -> Tensor:
    """Same contract as `DeviceSampling.choose`."""
    return draw_ids(logits.float(), draws)


def log_softmax_gather(logits: Tensor, ids: Tensor, k: int) -> LogSoftmax:
    """Same contract as `DeviceSampling.log_softmax_gather`."""
    return LogSoftmax(*log_softmax(logits, ids, k))


def adjust(scores: Tensor, edits: Edits) -> None:
    """Same contract as `DeviceSampling.adjust`."""
    for span in edits.spans:
        row, first, last, _, begin, end = span.tolist()
        repetition = span[3].view(torch.float32)
        entries = edits.entries[first:last]
        columns, bias, flags, penalty = entries[:, 0], _floats(entries[:, 1]), entries[:, 2], _floats(entries[:, 3])
        values = scores[row, columns] + bias
        values = torch.where((flags & BANNED) > 0, -torch.inf, values)
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where((flags & REPEATED) > 0, repeated, values) - penalty
        scores[row, begin:end] = -torch.inf
        scores[row, columns] = values


def _floats(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float32)
