"""Contracts of the sampling kernels: drawing tokens from logits, log-probabilities, and logit adjustments.

`torch_sampling.py` is the definition in torch. A CPU runs `cpu/sampling.py` (compiled C++), a GPU
`triton/sampling.py`.

Batch invariance: the result of a row depends on that row alone and is deterministic. No kernel sorts the vocabulary.
Every filter is a threshold on the logit, so equal logits are kept or removed together. The draw inverts the cumulative
distribution in order of ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

SPAN_COLUMNS = 1024  # maximum columns, and entries, of one span of `LogitAdjustments`
BANNED = 1  # flags of an entry
REPEATED = 2


class Draw(NamedTuple):
    """How to draw one row's token."""

    temperature: float  # 0: greedy, ignores the other fields; otherwise at least 1e-5
    top_k: int  # 0: off
    top_p: float  # 0 < top_p <= 1
    min_p: float  # fraction of the most likely token's probability; 0: off
    noise: float  # in [0, 1)


class Logprobs(NamedTuple):
    """Natural log-softmax of one row."""

    logprob: float
    rank: int  # 1 + number of strictly larger logits
    top_ids: list[int]  # the k most likely; of equal logits the lower id first
    top_logprobs: list[float]


class LogprobsTensors(NamedTuple):
    """`Logprobs` of all rows, as tensors. rank is 0, and the rest undefined, where a row's maximum is not finite."""

    logprob: Tensor  # (rows,) float64
    rank: Tensor  # (rows,) int64
    top_ids: Tensor  # (rows, k) int64
    top_logprobs: Tensor  # (rows, k) float64


class LogitAdjustments(NamedTuple):
    """Logit biases, bans and penalties of many rows, packed for one launch. float32 values are stored as their bits.

    entries: (n, 4) int32: column; bias, added; flags; penalty, subtracted last. Columns of a row are unique, ascending.
    spans: (m, 6) int32: row; first and one past the last entry, at most SPAN_COLUMNS; repetition penalty; first and one
    past the last of at most SPAN_COLUMNS columns that become -inf except for these entries (equal: none).
    """

    entries: Tensor
    spans: Tensor


class SamplingKernels(Protocol):
    """Kernels that return values to the host. Logits are (rows, vocab) float32 or bfloat16. Only `apply_masks` changes
    them."""

    def sample(self, logits: Tensor, draws: Sequence[Draw], /) -> list[int]:
        """One id per row; -1 for a row whose maximum is not finite (NaN, infinity, all -inf).

        Order of the filters, as in vLLM: temperature, min_p, top_k, then top_p on the remaining tokens, renormalised.
        Values equal to a threshold are all kept. Greedy ties go to the lowest id.
        """

    def logprobs(self, logits: Tensor, ids: Sequence[int], k: int, /) -> list[Logprobs]:
        """Log-softmax at one id per row, and of the k most likely ids. Raises ValueError if a row's maximum is not
        finite."""

    def argmax(self, logits: Tensor, /) -> Tensor:
        """Return the column of each row's largest logit, (rows,) int64: of equal ones the first; the first NaN if there
        is one."""

    def top_k(self, logits: Tensor, k: int, /) -> list[Tensor]:
        """Return per row the ids, ascending, of all logits from the k-th largest up: more than k where some equal it.

        If the maximum is NaN or infinity, only its id. k: 1 to the number of columns.
        """

    def apply_masks(self, scores: Tensor, rows: Sequence[int], masks: Tensor, /) -> None:
        """Like `DeviceSamplingKernels.apply_masks`. scores: (n, columns) rows contiguous. masks: on the host."""


class DeviceSamplingKernels(Protocol):
    """Kernels whose results stay on the device, so that the host does not wait.

    Logits are (rows, columns) float32, bfloat16 or float16 of at most 2**20 columns, and are not changed. Sums whose
    order is not fixed are sums of integers.
    """

    def sample(self, logits: Tensor, draws: Tensor, /, sampled: bool = True, filtered: bool = True) -> Tensor:
        """(rows,) int64, as `SamplingKernels.sample`. draws: (rows, 5) float64, columns as in `Draw`.

        sampled: False if the caller knows that every row is greedy. filtered: False if it knows that no row uses top_k,
        top_p or min_p. Both are optimisations only.
        """

    def log_softmax_gather(self, logits: Tensor, ids: Tensor, k: int, /) -> LogprobsTensors:
        """Log-softmax at each row's id, (rows,) int64, and of the k most likely columns, or of all if fewer than k.
        The value at an id of -1 is undefined."""

    def adjust(self, scores: Tensor, adjustments: LogitAdjustments, /) -> None:
        """Change rows of scores, (rows, columns) float32, in place.

        Per entry, in this order: add the bias; set to -inf if BANNED; if REPEATED divide a positive value and multiply
        a negative one by the repetition penalty; subtract the penalty.
        """

    def apply_masks(self, scores: Tensor, rows: Tensor, masks: Tensor, /) -> None:
        """Set what masks do not allow to -inf, in place. scores: (n, columns). rows: (m,) int64, different. masks:
        (m, ceil(columns / 32)) int32; bit i % 32 of word i // 32 is set where column i is allowed."""
