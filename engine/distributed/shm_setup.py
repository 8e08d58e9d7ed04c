"""Creates the shared memory of the ranks on one host, and decides how each rank reaches the engine and other ranks.

One process per host creates the rings, one per rank of a tensor-parallel group and one per link between pipeline
stages. The ranks open them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serve_llm.common.curve_zmq import Endpoint
from serve_llm.engine.distributed.messages import (
    LOOPBACK,
    ChannelsReady,
    RankRings,
    Rendezvous,
    SetupChannels,
    StepRings,
    StepsUrl,
)
from serve_llm.engine.distributed.step_channels import (
    MultiHostStepChannel,
    ShmStepChannel,
    SocketStepChannel,
    StepChannel,
)
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.parallel.shm_ring import ShmRingBuffer

MESSAGE_BYTES = 1 << 20  # size of a ring for steps or results; longer messages are sent in pieces
GROUP_BYTES = 1 << 20  # size of a rank's ring in its group: half of it stays in a core's cache
MIN_LINK_BYTES = 1 << 16
MAX_LINK_BYTES = 1 << 26
NO_RINGS = RankRings([], None, None)


class HostSetup:
    """All rings between the ranks `ranks` of an engine, which run on this host."""

    def __init__(self, parallel: ParallelLayout, ranks: Sequence[int], step_bytes: int) -> None:
        """step_bytes: the most that a step sends between stages; a link holds as many steps as are in flight."""
        self._parallel = parallel
        self._ranks = frozenset(ranks)
        self._group_rings: dict[int, ShmRingBuffer] = {}
        self._link_rings: dict[int, ShmRingBuffer] = {}  # by the sending rank
        link_bytes = min(max(step_bytes * parallel.pp_size, MIN_LINK_BYTES), MAX_LINK_BYTES)
        for rank in ranks:
            num_readers = len(self._local_tp_group(rank)) - 1
            if num_readers > 0:
                self._group_rings[rank] = ShmRingBuffer.create(num_readers, GROUP_BYTES)
            if rank + parallel.tp_size in self._ranks:
                self._link_rings[rank] = ShmRingBuffer.create(1, link_bytes)

    def _local_tp_group(self, rank: int) -> list[int]:
        """The ranks of its tensor-parallel group on this host, including itself."""
        return [peer for peer in self._parallel.tp_group(rank) if peer in self._ranks]

    def rings(self, rank: int) -> RankRings:
        """The rings that this rank opens."""
        previous = self._link_rings.get(rank - self._parallel.tp_size)
        following = self._link_rings.get(rank)
        group = self._local_tp_group(rank) if rank in self._group_rings else []
        return RankRings(
            tensor=[self._group_rings[peer].memory.handle for peer in group],
            previous=previous.memory.handle if previous is not None else None,
            next=following.memory.handle if following is not None else None,
        )

    def close(self) -> None:
        """End all waits on these rings."""
        for ring in [*self._group_rings.values(), *self._link_rings.values()]:
            ring.close()


class RankSetup:
    """The engine's part: its step channel, its own host's rings, and how every rank reaches others.

    Send `requests()` and pass the replies to `add_replies`; then `steps`, `rings` and `rendezvous` are complete.
    """

    def __init__(
        self,
        parallel: ParallelLayout,
        host_ids: Sequence[str],
        engine_host_id: str,
        step_bytes: int,
        endpoint: Endpoint | None,
        on_gpus: bool = False,
    ) -> None:
        """host_ids: of all ranks. endpoint: where ranks on other hosts connect. on_gpus: tensors use NCCL, which also
        finds the best path inside a host, instead of shared memory."""
        self._parallel = parallel
        self._host_ids = list(host_ids)
        self._step_bytes = step_bytes
        self._on_gpus = on_gpus
        self._local = [rank for rank, host in enumerate(host_ids) if host == engine_host_id]
        self._reader_of = {rank: index for index, rank in enumerate(self._local)}
        self._ranks_of: dict[str, list[int]] = {}  # by host
        for rank, host in enumerate(host_ids):
            self._ranks_of.setdefault(host, []).append(rank)
        self._remote = [rank for rank, host in enumerate(host_ids) if host != engine_host_id]
        self._host = HostSetup(parallel, [] if on_gpus else self._local, step_bytes)
        self._rings = {rank: self._host.rings(rank) for rank in self._local}
        self._shm_channel: ShmStepChannel | None = None
        self._socket_channel: SocketStepChannel | None = None
        self._store: tuple[str, int] | None = None  # address and port
        if self._local:
            self._shm_channel = ShmStepChannel(
                ShmRingBuffer.create(len(self._local), MESSAGE_BYTES), ShmRingBuffer.create(1, MESSAGE_BYTES)
            )
        if self._remote:
            assert endpoint is not None, "ranks on other hosts need an address to connect to"
            self._socket_channel = SocketStepChannel(endpoint, self._remote)

    @property
    def needs_store(self) -> bool:
        """Whether ranks exchange tensors through torch.distributed, which needs a key-value store for the
        rendezvous."""
        return self._parallel.size > 1 and (self._on_gpus or len(set(self._host_ids)) > 1)

    @property
    def tp_groups_across_hosts(self) -> list[range]:
        first_ranks = [self._parallel.rank(pp_rank, 0) for pp_rank in range(self._parallel.pp_size)]
        groups = [self._parallel.tp_group(rank) for rank in first_ranks]
        return [group for group in groups if len({self._host_ids[rank] for rank in group}) > 1]

    def step_channel(self) -> StepChannel:
        if self._socket_channel is None:
            assert self._shm_channel is not None, "there is at least one rank"
            return self._shm_channel
        return MultiHostStepChannel(self._shm_channel, self._socket_channel, self._parallel.output_rank in self._local)

    @property
    def has_remote_ranks(self) -> bool:
        """Whether some ranks are not on the engine's host."""
        return bool(self._remote)

    def connect(self, seconds: float) -> None:
        """Wait for the step connections of ranks on other hosts. Raises EngineError."""
        if self._socket_channel is not None:
            self._socket_channel.connect(seconds)

    def requests(self) -> dict[int, SetupChannels]:
        """Requests by rank: the first rank of each other host creates its rings, and rank 0 hosts the store."""
        requests = {}
        for ranks in self._ranks_of.values():
            first = ranks[0]
            hosts_store = first == 0 and self.needs_store
            if hosts_store or first in self._remote:
                ring_ranks = ranks if first in self._remote and not self._on_gpus else []
                requests[first] = SetupChannels(
                    self._parallel.tp_size, self._parallel.pp_size, ring_ranks, self._step_bytes, hosts_store
                )
        return requests

    def add_replies(self, replies: Mapping[int, ChannelsReady], addresses: Sequence[str]) -> None:
        """replies: to `requests`, by rank. addresses: of all ranks' hosts."""
        for reply in replies.values():
            self._rings |= reply.rings
        if 0 in replies and self.needs_store:
            self._store = (addresses[0] or LOOPBACK, replies[0].store_port)

    def rendezvous(self, rank: int) -> Rendezvous | None:
        """How this rank joins its groups through torch.distributed; None if it needs no store."""
        if self._store is None:
            return None
        address, port = self._store
        return Rendezvous([self._host_ids[peer] for peer in self._parallel.tp_group(rank)], address, port)

    def steps(self, rank: int) -> StepRings | StepsUrl:
        """Where this rank reads steps."""
        if self._socket_channel is not None and rank in self._remote:
            return StepsUrl(self._socket_channel.url)
        assert self._shm_channel is not None, "the rank is on this host"
        steps, answers = self._shm_channel.handles
        return StepRings(steps, self._reader_of[rank], answers if rank == self._parallel.output_rank else None)

    def rings(self, rank: int) -> RankRings:
        """The rings that this rank opens."""
        return self._rings.get(rank, NO_RINGS)

    def local_ranks(self, rank: int) -> list[int]:
        """All ranks on this rank's host."""
        return self._ranks_of[self._host_ids[rank]]

    def close(self) -> None:
        """End all waits of the engine and of the ranks on its host. Safe to call from any thread."""
        self._host.close()
        for channel in (self._shm_channel, self._socket_channel):
            if channel is not None:
                channel.close()
