"""Groups and links of one rank, built from what its executor told it, and what it makes for others: shared memory
inside a host, torch.distributed between hosts.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from serve_llm.engine.config import Config
from serve_llm.engine.execute.control import LOOPBACK, Begin, Column, Wire, Wired
from serve_llm.engine.execute.wiring import HostWiring
from serve_llm.engine.parallel.comm import Alone, Exchange, Group, Link, Neighbours
from serve_llm.engine.parallel.hosts import interface_of
from serve_llm.engine.parallel.layout import Grid
from serve_llm.engine.parallel.ring import Ring
from serve_llm.engine.parallel.shm import Handle
from serve_llm.engine.parallel.shm_group import PEER_SECONDS, ShmGroup, ShmLink, shm_group
from serve_llm.engine.parallel.staged import StagedGroup, StagedLink

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def make(request: Wire, address: str) -> tuple[Wired, object]:
    """What the rank is asked for, and an object that keeps it in being. address: of this host."""
    store = None
    if request.host_store:
        from serve_llm.engine.parallel.torch_group import host_store

        store = host_store(address or LOOPBACK)
    wiring = HostWiring(Grid(request.tensor, request.pipeline), request.ranks, request.step_bytes)
    rings = {rank: wiring.rings(rank) for rank in request.ranks}
    return Wired(rings, store.port if store is not None else 0), (wiring, store)


def neighbours_of(grid: Grid, rank: int, begin: Begin, address: str) -> Neighbours:
    """address: this host's, for ranks on others. Waits for them; raises EngineError."""
    builder = _Builder(grid, rank, begin, address or LOOPBACK)
    experts = exchange_of(begin.column, begin.config, grid.place(rank))
    return Neighbours(builder.group(), builder.previous(), builder.next(), begin.local_ranks, experts)


def exchange_of(column: Column | None, config: Config, place: int) -> Exchange:
    """With the ranks at this place of the other engines. Waits for them; raises EngineError."""
    if column is None:
        return Alone()
    if column.rings:
        return ShmGroup([Ring.open(ring) for ring in column.rings], config.data_parallel_rank)
    from serve_llm.engine.parallel.torch_group import TorchGroup, join_store

    store = join_store(LOOPBACK, column.store_port, PEER_SECONDS)
    name, rank = f"holders of experts at place {place}", config.data_parallel_rank
    return TorchGroup(store, name, rank, config.data_parallel_size, LOOPBACK, PEER_SECONDS, "nccl")


class _Builder:
    def __init__(self, grid: Grid, rank: int, begin: Begin, address: str) -> None:
        self._grid, self._rank, self._begin, self._address = grid, rank, begin, address
        self._dtype: torch.dtype = getattr(torch, begin.config.dtype)
        self._device = torch.device(begin.config.device)
        # NCCL does not serve ranks that share a card.
        self._backend = "nccl" if begin.config.device == "cuda" and begin.config.ranks_per_gpu == 1 else "gloo"
        self._store: Store | None = None
        if begin.span is not None:
            from serve_llm.engine.parallel.torch_group import join_store

            self._store = join_store(begin.span.store, begin.span.store_port, PEER_SECONDS)
            if self._backend == "nccl" and address != LOOPBACK:  # gloo is told the address itself
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface_of(address)}")

    def group(self) -> Group:
        """On GPUs by NCCL; on CPUs of one host by shared memory; on those of several, first there and then between
        them."""
        rings, span = self._begin.rings, self._begin.span
        peers, place = self._grid.tensor_group(self._rank), self._grid.place(self._rank)
        if len(peers) == 1:
            return Alone()
        opened = [Ring.open(ring) for ring in rings.tensor]
        if span is None:
            return shm_group(opened, place)
        from serve_llm.engine.parallel.torch_group import TorchGroup, spanning_group

        assert self._store is not None
        name = f"tensor-parallel group of stage {self._grid.stage(self._rank)}"
        hosts = [span.host_ids[peer] for peer in peers]
        if self._device.type == "cuda":
            in_order = self._begin.config.batch_invariant
            group = TorchGroup(
                self._store, name, place, len(peers), self._address, PEER_SECONDS, self._backend, in_order
            )
            if self._backend == "gloo":
                return StagedGroup(group)
            if self._begin.config.all_reduce == "nccl":
                return group
            from serve_llm.engine.parallel.symmetric import symmetric_group

            return symmetric_group(self._store, name, group, hosts, torch.device("cuda", torch.cuda.current_device()))
        local = shm_group(opened, hosts[:place].count(hosts[place])) if opened else Alone()
        if len(set(hosts)) == 1:
            return local
        return spanning_group(self._store, name, place, hosts, local, self._address, PEER_SECONDS)

    def previous(self) -> Link | None:
        return self._link(self._rank - self._grid.tensor, self._begin.rings.previous)

    def next(self) -> Link | None:
        return self._link(self._rank + self._grid.tensor, self._begin.rings.next)

    def _link(self, other: int, handle: Handle | None) -> Link | None:
        if handle is not None:
            return ShmLink(Ring.open(handle), self._dtype)
        if not 0 <= other < self._grid.size:
            return None
        from serve_llm.engine.parallel.torch_group import TorchGroup

        assert self._store is not None, "without shared memory there is a store"
        first, second = sorted((self._rank, other))
        place, name = int(self._rank == second), f"link from rank {first} to rank {second}"
        pair = TorchGroup(self._store, name, place, 2, self._address, PEER_SECONDS, self._backend)
        if self._device.type == "cuda" and self._backend == "gloo":
            return StagedLink(pair.link(1 - place, self._dtype), self._device)
        return pair.link(1 - place, self._dtype, self._device)
