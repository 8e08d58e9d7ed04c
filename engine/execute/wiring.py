"""The shared memory of the ranks on one host: one ring per rank of a tensor-parallel group, one per link between
stages; and what a step needs to reach every rank. Rings are made by one process of their host, and opened by the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from serve_llm.engine.execute.control import LOOPBACK, RingEnds, Rings, Span, StepsUrl, Wire, Wired
from serve_llm.engine.execute.steps import RingSteps, SocketSteps, SpanningSteps, StepChannel
from serve_llm.engine.parallel.encrypted import Endpoint
from serve_llm.engine.parallel.layout import Grid
from serve_llm.engine.parallel.ring import Ring

MESSAGE_BYTES = 1 << 20  # of a ring for steps or answers; longer ones pass through in pieces
GROUP_BYTES = 1 << 20  # of a rank's ring in its group: half of it stays in a core's cache
NO_RINGS = Rings([], None, None)
LEAST_LINK, MOST_LINK = 1 << 16, 1 << 26  # bytes


class HostWiring:
    """All rings between the ranks `ranks` of a grid, which run on this host."""

    def __init__(self, grid: Grid, ranks: Sequence[int], step_bytes: int) -> None:
        """step_bytes: what the largest step sends from stage to stage; a link holds as many steps as are under way."""
        self._grid = grid
        self._ranks = ranks
        self._group: dict[int, Ring] = {}
        self._from: dict[int, Ring] = {}
        link_bytes = min(max(step_bytes * grid.pipeline, LEAST_LINK), MOST_LINK)
        for rank in ranks:
            if (others := len(self._peers(rank)) - 1) > 0:
                self._group[rank] = Ring.create(others, GROUP_BYTES)
            if rank + grid.tensor in ranks:
                self._from[rank] = Ring.create(1, link_bytes)

    def _peers(self, rank: int) -> list[int]:
        """The ranks of its tensor-parallel group on this host, itself included."""
        return [peer for peer in self._grid.tensor_group(rank) if peer in self._ranks]

    def rings(self, rank: int) -> Rings:
        """What this rank opens."""
        previous, following = self._from.get(rank - self._grid.tensor), self._from.get(rank)
        return Rings(
            tensor=[self._group[peer].memory.handle for peer in self._peers(rank)] if rank in self._group else [],
            previous=previous.memory.handle if previous is not None else None,
            next=following.memory.handle if following is not None else None,
        )

    def close(self) -> None:
        """End every wait on any of them."""
        for ring in self._all():
            ring.close()

    def _all(self) -> Iterator[Ring]:
        yield from (*self._group.values(), *self._from.values())


class Wiring:
    """The engine's part: its step channel, its own host's rings, and what every rank is told of how to reach others.

    requests()   what has to be made elsewhere, by which ranks
    take(wired)  their answers
    steps, rings, span   parts of each rank's Begin
    """

    def __init__(
        self,
        grid: Grid,
        host_ids: Sequence[str],
        here: str,
        step_bytes: int,
        endpoint: Endpoint | None,
        on_gpus: bool = False,
    ) -> None:
        """host_ids: of all ranks. here: the engine's. endpoint: where ranks on other hosts connect to. on_gpus: tensors
        go by NCCL, which finds the best way inside a host as well, and not through shared memory."""
        self._grid, self._host_ids, self._step_bytes = grid, list(host_ids), step_bytes
        self._on_gpus = on_gpus
        self._local = [rank for rank, host in enumerate(host_ids) if host == here]
        self._remote = [rank for rank, host in enumerate(host_ids) if host != here]
        self._host = HostWiring(grid, [] if on_gpus else self._local, step_bytes)
        self._rings = {rank: self._host.rings(rank) for rank in self._local}
        self._span: Span | None = None
        self._step_rings: RingSteps | None = None
        self._step_socket: SocketSteps | None = None
        if self._local:
            self._step_rings = RingSteps(Ring.create(len(self._local), MESSAGE_BYTES), Ring.create(1, MESSAGE_BYTES))
        if self._remote:
            assert endpoint is not None, "ranks on other hosts need an address to connect to"
            self._step_socket = SocketSteps(endpoint, self._remote)

    @property
    def needs_store(self) -> bool:
        """Whether ranks exchange tensors in other ways than through one host's memory, for which they have to meet."""
        return self._grid.size > 1 and (self._on_gpus or len(set(self._host_ids)) > 1)

    @property
    def tensor_groups_that_span(self) -> list[range]:
        groups = [self._grid.tensor_group(self._grid.rank(stage, 0)) for stage in range(self._grid.pipeline)]
        return [group for group in groups if len({self._host_ids[rank] for rank in group}) > 1]

    def channel(self) -> StepChannel:
        if self._step_socket is None:
            assert self._step_rings is not None, "there is at least one rank"
            return self._step_rings
        return SpanningSteps(self._step_rings, self._step_socket, self._grid.output_rank in self._local)

    def connect(self, seconds: float) -> None:
        """Wait for the step connections of ranks on other hosts. Raises EngineError."""
        if self._step_socket is not None:
            self._step_socket.connect(seconds)

    def requests(self) -> dict[int, Wire]:
        """By rank: the first one of each other host makes its rings, rank 0 the store where all meet."""
        found = {}
        for host in dict.fromkeys(self._host_ids):
            ranks = [rank for rank, own in enumerate(self._host_ids) if own == host]
            store = ranks[0] == 0 and self.needs_store
            if store or ranks[0] in self._remote:
                made = ranks if ranks[0] in self._remote and not self._on_gpus else []
                found[ranks[0]] = Wire(self._grid.tensor, self._grid.pipeline, made, self._step_bytes, store)
        return found

    def take(self, wired: Mapping[int, Wired], addresses: Sequence[str]) -> None:
        """addresses: of all ranks' hosts."""
        for said in wired.values():
            self._rings |= said.rings
        if 0 in wired and self.needs_store:
            self._span = Span(self._host_ids, addresses[0] or LOOPBACK, wired[0].store_port)

    def steps(self, rank: int) -> RingEnds | StepsUrl:
        if self._step_socket is not None and rank in self._remote:
            return StepsUrl(self._step_socket.url)
        assert self._step_rings is not None, "the rank is on this host"
        steps, answers = self._step_rings.handles
        return RingEnds(steps, self._local.index(rank), answers if rank == self._grid.output_rank else None)

    def rings(self, rank: int) -> Rings:
        return self._rings.get(rank, NO_RINGS)

    @property
    def span(self) -> Span | None:
        return self._span

    def local_ranks(self, rank: int) -> list[int]:
        """All ranks on this rank's host."""
        return [other for other, host in enumerate(self._host_ids) if host == self._host_ids[rank]]

    def close(self) -> None:
        """End all waits of the engine and of the ranks on its host. May be called by any thread."""
        self._host.close()
        for channel in (self._step_rings, self._step_socket):
            if channel is not None:
                channel.close()
