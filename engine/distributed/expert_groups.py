"""Sets up the expert-parallel groups. A group consists of the ranks with the same number in all data-parallel engines,
which are in the same pipeline stage.

On GPUs a group uses NCCL. On CPUs it uses shared memory if all its ranks are on the engines' host, otherwise gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from serve_llm.common.hosts import host_id
from serve_llm.engine.config import Config
from serve_llm.engine.distributed.messages import LOOPBACK, ExpertGroupSetup
from serve_llm.engine.distributed.multihost.leader import DOWNLOAD_SECONDS, JOIN_SECONDS
from serve_llm.engine.distributed.worker_group import START_SECONDS
from serve_llm.engine.parallel.dp_sync import DPStepSync
from serve_llm.engine.parallel.shm import ShmHandle
from serve_llm.engine.parallel.shm_ring import ShmRingBuffer

RING_BYTES = 1 << 20  # size of a rank's ring in its group


class _EngineOffer(msgspec.Struct, frozen=True):
    """What one engine has created for the groups, and the hosts of its ranks."""

    host_ids: list[str]  # by rank
    rings: list[ShmHandle | None]  # by rank; None on GPUs and for ranks on other hosts
    store: str  # address of the key-value store; "" unless this is engine 0 and a group may need it
    store_port: int


class ExpertParallelGroups:
    """This engine's part of all expert-parallel groups. Must live as long as the engine's ranks."""

    def __init__(self, config: Config, sync: DPStepSync, address: str = "") -> None:
        """sync: with the other engines. address: of the engines' host, for ranks on other hosts; "" if there are
        none."""
        self.address = address
        self.sync = sync
        self._on_gpus = config.device != "cpu"
        self._rings: list[ShmRingBuffer | None] = []
        self._store: object = None

    def join(self, host_ids: Sequence[str], check: Callable[[], object] = lambda: None) -> list[ExpertGroupSetup]:
        """Exchange with the other engines what each has created. Returns how each rank of this engine joins its group.

        host_ids: of this engine's ranks. check: called repeatedly while waiting, to raise failures. Raises EngineError,
        which names the engines that do not join.
        """
        here = host_id()
        self._rings = [
            ShmRingBuffer.create(self.sync.engines - 1, RING_BYTES) if host == here and not self._on_gpus else None
            for host in host_ids
        ]
        rings = [ring.memory.handle if ring else None for ring in self._rings]
        offer = _EngineOffer(list(host_ids), rings, *self._open_store())
        # An engine with ranks on other hosts waits for these first.
        seconds = JOIN_SECONDS + DOWNLOAD_SECONDS if self.address else START_SECONDS
        encoded = self.sync.gather(msgspec.msgpack.encode(offer), seconds, check)
        offers = [msgspec.msgpack.decode(frame, type=_EngineOffer) for frame in encoded]
        return [self._build_setup(offers, rank) for rank in range(len(host_ids))]

    def _open_store(self) -> tuple[str, int]:
        """Host the key-value store for the ranks' rendezvous, in engine 0. Returns its address and port."""
        if self.sync.engine != 0 or not (self._on_gpus or self.address):
            return "", 0
        from serve_llm.engine.parallel.torch_group import create_store

        address = self.address or LOOPBACK
        store = create_store(address)
        self._store = store
        return address, int(store.port)

    def _build_setup(self, offers: Sequence[_EngineOffer], rank: int) -> ExpertGroupSetup:
        rings = [ring for offer in offers if (ring := offer.rings[rank]) is not None]
        if len(rings) < len(offers):
            rings = []
        return ExpertGroupSetup(rings, offers[0].store, offers[0].store_port)
