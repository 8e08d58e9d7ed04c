"""The shared memory of the ranks on one host: a ring for steps, one for answers, one per rank of a tensor-parallel
group, one per link between stages. Made by one process of that host, opened by the ranks from the handles in `Rings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from serve_llm.engine.execute.control import Rings
from serve_llm.engine.execute.steps import RingSteps
from serve_llm.engine.parallel.layout import Grid
from serve_llm.engine.parallel.ring import Ring

MESSAGE_BYTES = 1 << 20  # of a ring for steps or answers; longer ones pass through in pieces
GROUP_BYTES = 1 << 20  # of a rank's ring in its group: half of it stays in a core's cache
LEAST_LINK, MOST_LINK = 1 << 16, 1 << 26  # bytes


class HostWiring:
    """All rings between the ranks `ranks` of a grid, which run on this host."""

    def __init__(self, grid: Grid, ranks: Sequence[int], step_bytes: int) -> None:
        """step_bytes: what the largest step sends from stage to stage; a link holds as many steps as are under way."""
        self._grid = grid
        self._readers = {rank: index for index, rank in enumerate(ranks)}
        self.steps = Ring.create(len(ranks), MESSAGE_BYTES)
        self.answers = Ring.create(1, MESSAGE_BYTES)
        self._group: dict[int, Ring] = {}
        self._from: dict[int, Ring] = {}
        link_bytes = min(max(step_bytes * grid.pipeline, LEAST_LINK), MOST_LINK)
        for rank in ranks:
            if grid.tensor > 1 and all(peer in self._readers for peer in grid.tensor_group(rank)):
                self._group[rank] = Ring.create(grid.tensor - 1, GROUP_BYTES)
            if rank + grid.tensor in self._readers:
                self._from[rank] = Ring.create(1, link_bytes)

    def channel(self) -> RingSteps:
        """The engine's end of steps and answers."""
        return RingSteps(self.steps, self.answers)

    def rings(self, rank: int) -> Rings:
        """What this rank opens."""
        grid = self._grid
        previous, following = self._from.get(rank - grid.tensor), self._from.get(rank)
        return Rings(
            steps=self.steps.memory.handle,
            reader=self._readers[rank],
            answers=self.answers.memory.handle if rank == grid.output_rank else None,
            tensor=[self._group[peer].memory.handle for peer in grid.tensor_group(rank)] if rank in self._group else [],
            previous=previous.memory.handle if previous is not None else None,
            next=following.memory.handle if following is not None else None,
        )

    def close(self) -> None:
        """End every wait on any of them."""
        for ring in self._all():
            ring.close()

    def _all(self) -> Iterator[Ring]:
        yield from (self.steps, self.answers, *self._group.values(), *self._from.values())
