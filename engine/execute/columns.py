"""How ranks of several engines reach each other that share out experts: those at the same place of every engine are a
group, a column. On CPUs they meet in shared memory, on GPUs by NCCL. All engines are on one host.
"""

from __future__ import annotations

import msgspec

from serve_llm.engine.config import Config
from serve_llm.engine.execute.control import LOOPBACK, Column
from serve_llm.engine.execute.roster import START_SECONDS
from serve_llm.engine.parallel.lockstep import Lockstep
from serve_llm.engine.parallel.ring import Ring
from serve_llm.engine.parallel.shm import Handle

RING_BYTES = 1 << 20  # of a rank's ring in its column


class _Offer(msgspec.Struct, frozen=True):
    """What one engine has made for the columns."""

    rings: list[Handle]  # by place, of its own ranks; none on GPUs
    store_port: int  # where all meet; 0 except of the first engine on GPUs


class Columns:
    """This engine's part of all columns; must be kept as long as its ranks run."""

    def __init__(self, config: Config, lockstep: Lockstep) -> None:
        """Waits for the other engines. Raises EngineError naming those that do not come."""
        self._rings: list[Ring] = []
        self._store: object = None
        port = 0
        if config.device == "cpu":
            others = lockstep.engines - 1
            self._rings = [Ring.create(others, RING_BYTES) for _ in range(config.tensor_parallel_size)]
        elif lockstep.engine == 0:
            from serve_llm.engine.parallel.torch_group import host_store

            self._store = store = host_store(LOOPBACK)
            port = store.port
        own = _Offer([ring.memory.handle for ring in self._rings], port)
        offers = lockstep.gather(msgspec.msgpack.encode(own), START_SECONDS)
        self._offers = [msgspec.msgpack.decode(offer, type=_Offer) for offer in offers]

    def of(self, place: int) -> Column:
        """What the rank at this place is told."""
        rings = [offer.rings[place] for offer in self._offers if offer.rings]
        return Column(rings, self._offers[0].store_port)
