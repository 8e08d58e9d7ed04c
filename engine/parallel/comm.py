"""How ranks talk: what a worker needs of its neighbours. Implementations differ by where the ranks run.

Every rank of a group makes the same calls in the same order, with tensors of the same shape and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """Ranks that share out every layer: one tensor-parallel group."""

    @property
    def rank(self) -> int:
        """This one's place in the group."""

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, added in rank order in float32 and rounded once: the same bits on every rank, and for a
        row whatever other rows stand in x. x is contiguous and may be overwritten."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in rank order; what is returned is the caller's."""


class Exchange(Protocol):
    """Ranks that share out the experts of every layer, each of another engine: they bring different rows."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """As in `Group`."""

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """x: (sum of rows[rank], ...), contiguous, receiver after receiver. rows[a][b]: how many a sends to b, the same
        on all ranks. What all have sent to this one, sender after sender."""


class Link(Protocol):
    """A one-way connection from a rank of one stage to the rank at the same place of the next stage. In order."""

    def send(self, x: Tensor) -> None:
        """May return before the other side has received; x may then be overwritten. Waits while the link is full."""

    def receive(self, shape: tuple[int, ...]) -> Tensor:
        """The next tensor; its dtype and shape are known to both sides (the model's dtype)."""


@dataclass(frozen=True)
class Alone:
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
class Neighbours:
    """Everyone that one rank exchanges tensors with."""

    tensor: Group = Alone()
    previous: Link | None = None  # None: the first stage
    next: Link | None = None  # None: the last stage
    local_ranks: int = 1  # that share this host's cores and memory, those of other engines included
    experts: Exchange = Alone()  # the ranks at this one's place in all engines that share out the experts
