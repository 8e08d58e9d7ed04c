"""Interfaces for communication between ranks. Implementations differ by where the ranks run.

Every rank of a group makes the same calls in the same order, with tensors of the same shape and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class ProcessGroup(Protocol):
    """A tensor-parallel group: ranks that split every layer."""

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, added in rank order in float32 and rounded once: the same bits on every rank, and for
        each row independent of the other rows of x. x is contiguous and may be overwritten."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Gather every rank's x, in rank order. The caller owns the result."""


class AllToAllGroup(Protocol):
    """An expert-parallel group: ranks of different engines, which split the experts and have different tokens."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """As in `ProcessGroup`."""

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """Send rows to all ranks; returns the rows sent to this one, in rank order of the senders.

        x: (sum of rows[rank], ...), contiguous, in rank order of the receivers. rows[a][b]: number of rows that rank a
        sends to rank b, the same on all ranks."""


class PipelineLink(Protocol):
    """A one-way, ordered connection from a rank of one pipeline stage to the rank with its tp_rank in the next."""

    def send(self, x: Tensor) -> None:
        """Send x, which may be overwritten afterwards. May return before it is received; blocks while the link is
        full."""

    def receive(self, shape: tuple[int, ...]) -> Tensor:
        """Receive the next tensor, of this shape and of the model's dtype."""


@dataclass(frozen=True)
class SingleRankGroup:
    """The group of one rank."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        return x


@dataclass(frozen=True)
class ProcessGroups:
    """All groups and links of one rank."""

    tensor: ProcessGroup = SingleRankGroup()
    previous: PipelineLink | None = None  # None: the first stage
    next: PipelineLink | None = None  # None: the last stage
    local_ranks: int = 1  # ranks that share this host's cores and memory, including those of other engines
    experts: AllToAllGroup = SingleRankGroup()  # the expert-parallel group
    # Waits until all ranks have loaded, as operations time out. Returns whether its argument is true on all of them.
    wait_for_all: Callable[[bool], bool] = bool
    wait_for_draft_model: Callable[[bool], bool] = bool  # the same for the ranks of the last stage and a draft model
