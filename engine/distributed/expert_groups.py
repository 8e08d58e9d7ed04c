"""Sets up the expert-parallel groups of the engines on one host: the ranks with the same number in all data-parallel
engines, which are in the same pipeline stage, are one group. On CPUs they use shared memory, on GPUs NCCL.
"""

from __future__ import annotations

import msgspec

from serve_llm.engine.config import Config
from serve_llm.engine.distributed.messages import LOOPBACK, ExpertGroupSetup
from serve_llm.engine.distributed.worker_group import START_SECONDS
from serve_llm.engine.parallel.dp_sync import DPStepSync
from serve_llm.engine.parallel.shm import ShmHandle
from serve_llm.engine.parallel.shm_ring import Ring

RING_BYTES = 1 << 20  # size of a rank's ring in its group


class _EngineOffer(msgspec.Struct, frozen=True):
    """What one engine has created for the groups."""

    rings: list[ShmHandle]  # rings of its own ranks, by rank; empty on GPUs
    store_port: int  # port of the key-value store; 0 unless this is engine 0 on GPUs


class ExpertParallelGroups:
    """This engine's part of all expert-parallel groups. Keep it as long as the engine's ranks run."""

    def __init__(self, rings: list[Ring], store: object, offers: list[_EngineOffer]) -> None:
        """Use `set_up_expert_groups`. rings, store: owned by this engine. offers: of all engines."""
        self._rings = rings
        self._store = store
        self._offers = offers

    def setup(self, rank: int) -> ExpertGroupSetup:
        """How this engine's rank joins its group."""
        rings = [offer.rings[rank] for offer in self._offers if offer.rings]
        return ExpertGroupSetup(rings, self._offers[0].store_port)


def set_up_expert_groups(config: Config, sync: DPStepSync) -> ExpertParallelGroups:
    """Create this engine's part and exchange it with the other engines. Raises EngineError, which names
    the engines that do not join."""
    rings: list[Ring] = []
    store: object = None
    port = 0
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if config.device == "cpu":
        rings = [Ring.create(sync.engines - 1, RING_BYTES) for _ in range(ranks)]
    elif sync.engine == 0:
        from serve_llm.engine.parallel.torch_group import create_store

        tcp_store = create_store(LOOPBACK)
        store = tcp_store
        port = tcp_store.port
    offer = _EngineOffer([ring.memory.handle for ring in rings], port)
    encoded = sync.gather(msgspec.msgpack.encode(offer), START_SECONDS)
    offers = [msgspec.msgpack.decode(frame, type=_EngineOffer) for frame in encoded]
    return ExpertParallelGroups(rings, store, offers)
