"""Builds the process groups of one rank as its executor specifies: shared memory inside a host, torch.distributed
between hosts and between GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from serve_llm.common.errors import OptionError
from serve_llm.common.hosts import find_interface
from serve_llm.engine.config import Config
from serve_llm.engine.distributed.messages import (
    LOAD_SECONDS,
    LOOPBACK,
    ChannelsReady,
    ExpertGroupSetup,
    InitWorker,
    SetupChannels,
)
from serve_llm.engine.distributed.shm_setup import HostSetup
from serve_llm.engine.parallel.groups import AllToAllGroup, PipelineLink, ProcessGroup, ProcessGroups, SingleRankGroup
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.parallel.shm import ShmHandle
from serve_llm.engine.parallel.shm_group import PEER_SECONDS, ShmGroup, ShmLink, build_shm_group
from serve_llm.engine.parallel.shm_ring import ShmRingBuffer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def create_channels(request: SetupChannels, address: str) -> tuple[ChannelsReady, object]:
    """Create the rings and the store that the executor requests. Returns the reply, and an object to keep alive as long
    as other ranks use them. address: of this host."""
    store = None
    if request.host_store:
        from serve_llm.engine.parallel.torch_group import create_store

        store = create_store(address or LOOPBACK)
    setup = HostSetup(ParallelLayout(request.tp_size, request.pp_size), request.ranks, request.step_bytes)
    rings = {rank: setup.rings(rank) for rank in request.ranks}
    return ChannelsReady(rings, store.port if store is not None else 0), (setup, store)


def build_process_groups(parallel: ParallelLayout, rank: int, init: InitWorker, address: str) -> ProcessGroups:
    """Join all groups of this rank; waits for the other members. address: of this host, for ranks on others; "" if
    there are none. Raises EngineError."""
    builder = _GroupBuilder(parallel, rank, init, address or LOOPBACK)
    builder.check_gpus()
    experts, wait_for_engines = build_expert_group(init.expert_group, init.config, rank, address or LOOPBACK)

    def wait_for_all(value: bool) -> bool:
        is_everywhere = builder.wait_for_all(value)
        wait_for_engines()
        return is_everywhere

    return ProcessGroups(
        builder.tensor_parallel_group(),
        builder.link(rank - parallel.tp_size, init.rings.previous),
        builder.link(rank + parallel.tp_size, init.rings.next),
        init.local_ranks,
        experts,
        wait_for_all,
        builder.wait_for_draft_model,
    )


def build_expert_group(
    setup: ExpertGroupSetup | None, config: Config, rank: int, address: str
) -> tuple[AllToAllGroup, Callable[[], object]]:
    """Join the expert-parallel group: the ranks with this number in all data-parallel engines. Waits for them.

    address: of this host, for members on others. Returns the group, and a function that waits until all members have
    loaded their weights. Raises EngineError."""
    if setup is None:
        return SingleRankGroup(), lambda: None
    if setup.rings:
        return ShmGroup([ShmRingBuffer.open(ring) for ring in setup.rings], config.data_parallel_rank), lambda: None
    from serve_llm.engine.parallel.torch_group import TorchGroup, connect_store, gather_values

    store = connect_store(setup.store, setup.store_port, PEER_SECONDS)
    name = f"expert-parallel group of rank {rank}"
    backend = prepare_backend(config, address)
    engine = config.data_parallel_rank
    engines = config.data_parallel_size
    group = TorchGroup(store, name, engine, engines, address, PEER_SECONDS, backend)
    return group, lambda: gather_values(store, f"{name}: weights", engine, engines, seconds=LOAD_SECONDS, who="engine")


def prepare_backend(config: Config, address: str) -> str:
    """Returns torch's backend for groups on this device, and tells NCCL which network interface to use.

    address: of this host in the groups' network.
    """
    if config.device == "cpu":
        return "gloo"
    if address != LOOPBACK:  # gloo takes the address itself
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={find_interface(address)}")
    return "nccl"


def check_own_gpus(gpus: Sequence[str]) -> None:
    """gpus: UUID of each rank's GPU. Raises OptionError."""
    first_ranks: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        first = first_ranks.setdefault(gpu, rank)
        if first != rank:
            raise OptionError(
                f"rank {first} and rank {rank} have the same GPU ({gpu}), and each rank needs its own; check "
                "CUDA_VISIBLE_DEVICES on each host, or use fewer ranks (--tensor-parallel-size, "
                "--pipeline-parallel-size)"
            )


class _GroupBuilder:
    """Builds the groups of one rank. They share one connection to the key-value store."""

    def __init__(self, parallel: ParallelLayout, rank: int, init: InitWorker, address: str) -> None:
        self._parallel = parallel
        self._rank = rank
        self._init = init
        self._address = address
        self._dtype: torch.dtype = getattr(torch, init.config.dtype)
        self._device = torch.device(init.config.device)
        self._backend = prepare_backend(init.config, address)
        self._store: Store | None = None
        if init.rendezvous is not None:
            from serve_llm.engine.parallel.torch_group import connect_store

            self._store = connect_store(init.rendezvous.store, init.rendezvous.store_port, PEER_SECONDS)

    def check_gpus(self) -> None:
        """Exchange which GPU each rank has. Raises OptionError if two ranks share one, which NCCL does not support."""
        if self._store is None or self._backend != "nccl":
            return
        from serve_llm.engine.parallel.torch_group import gather_values

        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        check_own_gpus(gather_values(self._store, "GPUs", self._rank, self._parallel.size, gpu, PEER_SECONDS))

    def wait_for_all(self, value: bool) -> bool:
        """Wait until all ranks have loaded their weights. Collectives on GPUs would time out during a slow load.

        Returns whether `value` is true on all ranks; on CPUs, `value`. Raises EngineError."""
        return self._wait("weights", self._rank, self._parallel.size, value)

    def wait_for_draft_model(self, value: bool) -> bool:
        """The same for the ranks of the last stage, each of which has loaded its shard of the draft model."""
        return self._wait("draft model", self._parallel.tp_rank(self._rank), self._parallel.tp_size, value)

    def _wait(self, what: str, rank: int, size: int, value: bool) -> bool:
        if self._store is None or self._backend != "nccl":
            return value
        from serve_llm.engine.parallel.torch_group import gather_values

        values = gather_values(self._store, what, rank, size, str(value), seconds=LOAD_SECONDS)
        return values == [str(True)] * size

    def tensor_parallel_group(self) -> ProcessGroup:
        """NCCL on GPUs, shared memory on CPUs of one host; on CPUs of several hosts shared memory first, then gloo."""
        ranks = self._parallel.tp_group(self._rank)
        if len(ranks) == 1:
            return SingleRankGroup()
        rendezvous = self._init.rendezvous
        if rendezvous is None:
            rings = [ShmRingBuffer.open(ring) for ring in self._init.rings.tensor]
            return build_shm_group(rings, self._parallel.tp_rank(self._rank))
        name = f"tensor-parallel group of stage {self._parallel.pp_rank(self._rank)}"
        hosts = rendezvous.host_ids
        return self._gpu_group(name, hosts) if self._device.type == "cuda" else self._cpu_group(name, hosts)

    def _gpu_group(self, name: str, hosts: list[str]) -> ProcessGroup:
        """hosts: host id of each member."""
        from serve_llm.engine.parallel.torch_group import TorchGroup

        assert self._store is not None
        config = self._init.config
        tp_rank = self._parallel.tp_rank(self._rank)
        group = TorchGroup(
            self._store,
            name,
            tp_rank,
            len(hosts),
            self._address,
            PEER_SECONDS,
            self._backend,
            in_order=config.batch_invariant,
        )
        if config.all_reduce == "nccl":
            return group
        from serve_llm.engine.parallel.symmetric import build_fastest_group, build_symmetric_group

        device = torch.device("cuda", torch.cuda.current_device())
        build = build_symmetric_group if config.all_reduce == "symmetric" else build_fastest_group
        return build(self._store, name, group, hosts, device)

    def _cpu_group(self, name: str, hosts: list[str]) -> ProcessGroup:
        """hosts: host id of each member."""
        from serve_llm.engine.parallel.torch_group import build_hierarchical_group

        assert self._store is not None
        tp_rank = self._parallel.tp_rank(self._rank)
        rings = [ShmRingBuffer.open(ring) for ring in self._init.rings.tensor]
        local_rank = hosts[:tp_rank].count(hosts[tp_rank])
        local = build_shm_group(rings, local_rank) if rings else SingleRankGroup()
        if len(set(hosts)) == 1:
            return local
        return build_hierarchical_group(self._store, name, tp_rank, hosts, local, self._address, PEER_SECONDS)

    def link(self, other: int, handle: ShmHandle | None) -> PipelineLink | None:
        """Build the link to or from rank `other`; None if there is no such rank. handle: of its ring on the same
        host."""
        if handle is not None:
            return ShmLink(ShmRingBuffer.open(handle), self._dtype)
        if not 0 <= other < self._parallel.size:
            return None
        from serve_llm.engine.parallel.torch_group import TorchGroup

        assert self._store is not None, "without shared memory there is a store"
        first, second = sorted((self._rank, other))
        own_index = int(self._rank == second)
        name = f"link from rank {first} to rank {second}"
        pair = TorchGroup(self._store, name, own_index, 2, self._address, PEER_SECONDS, self._backend)
        return pair.link(1 - own_index, self._dtype, self._device)
