"""The ids that were sampled last, on the device: the next step reads them there before they have come to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class Carry:
    """One id for each permanent row."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._last = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def fill(self, ids: Tensor, rows: Tensor) -> Tensor:
        """ids: (tokens,), negative where the one that was sampled last for the token's row belongs; rows: (tokens,)."""
        return torch.where(ids < 0, self._last[rows], ids)

    def store(self, ids: Tensor, rows: Tensor) -> None:
        """What was just sampled, (rows,) each. A negative id, of logits that were not finite, is as good as any: what
        comes of it is let go."""
        self._last[rows] = ids.clamp(min=0)
