"""Keeps the engine processes running: starts them, and replaces one that dies or hangs. Used by the daemon and by the
offline `LLM` alike.

Open requests survive (`server.replicas` holds them); what a dead engine had received or computed is computed again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from serve_llm.engine.errors import PeerLost, ServeError
from serve_llm.engine.options import Options
from serve_llm.server.metrics import Meter
from serve_llm.server.process import STOP_SECONDS, Death, EngineProcess
from serve_llm.server.replicas import SUSPECT, Replicas
from serve_llm.server.restarts import Restarts

logger = logging.getLogger(__name__)


SETTLE_SECONDS = 1.0  # for the first cause to arrive behind its consequence, that another engine was lost


class Supervisor:
    """All engine processes. Make it inside the event loop that uses them."""

    def __init__(self, options: Options, directory: str) -> None:
        """`directory`: the local checkpoint. They start at once, so that their imports overlap the caller's."""
        self._options = options
        self._directory = directory
        count = options.data_parallel_size
        # Those that share out experts cannot work without each other, and are replaced together.
        self._groups = [range(count)] if options.experts_span_engines else [range(n, n + 1) for n in range(count)]
        self._engines: dict[int, EngineProcess] = {}
        for group in self._groups:
            self._launch(group)
        self._restarts = Restarts(options.max_restarts)
        self._keeping: list[asyncio.Future[ServeError]] = []
        self._replicas: Replicas | None = None

    @property
    def replicas(self) -> Replicas:
        """The engines as one, once `start` has returned."""
        assert self._replicas is not None, "start() comes first"
        return self._replicas

    async def start(self) -> None:
        """Wait until all engines are ready. Raises the ServeError that the first one failed with, or EngineDead."""
        await self._start(self._engines)
        clients = [engine.client for engine in self._engines.values()]
        self._replicas = Replicas(clients, prefix_caching=self._options.enable_prefix_caching)
        self._keeping = [asyncio.ensure_future(self._keep(group)) for group in self._groups]

    async def watch(self) -> ServeError:
        """Returns the first cause when engines have died too often; every open request has ended with it by then."""
        done, _ = await asyncio.wait(self._keeping, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def stop(self, patience: float = STOP_SECONDS) -> None:
        """End all engine processes, after so many seconds by force. Idempotent."""
        for future in self._keeping:
            future.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*(engine.stop(patience) for engine in self._engines.values()))

    def _launch(self, group: range, *, replaces: bool = False) -> None:
        meeting = None
        for index in group:
            made = EngineProcess(self._options, self._directory, index, replaces=replaces, meeting=meeting)
            self._engines[index], meeting = made, made.meeting

    async def _start(self, indexes: Iterable[int]) -> None:
        """Wait until these engines are ready. Raises what the first of them failed with."""
        starting = [asyncio.ensure_future(self._engines[index].start()) for index in indexes]
        try:
            await asyncio.gather(*starting)
        finally:
            for future in starting:
                future.cancel()

    async def _keep(self, group: range) -> ServeError:
        """Replace engines whenever one of them dies. Returns the first cause when that was too often."""
        while True:
            index, death = await self._first_death(group)
            began = Meter.clock()
            suspected = self._engines[index].client.pulse.under_way()
            if self.replicas.lose({other: suspected if other == index else () for other in group}, death.error):
                self._restarts.forgive(SUSPECT)  # the deaths before this one
            try:
                await self._replace(group, index, death)
            except ServeError as first:
                self.replicas.give_up(first)
                return first
            for other in group:
                self.replicas.engines[other].meter.recovery.observe(Meter.clock() - began)
            what = "The engine is" if len(group) == 1 else "The engines are"
            logger.info("%s ready again after %.1f s", what, Meter.clock() - began)
            self.replicas.join({other: self._engines[other].client for other in group})

    async def _first_death(self, group: range) -> tuple[int, Death]:
        """Which of these engines has died, or the first if several have, and of what."""
        watches = {asyncio.ensure_future(self._engines[index].watch()): index for index in group}
        try:
            done, others = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            if others and all(isinstance(watch.result().error, PeerLost) for watch in done):
                done |= (await asyncio.wait(others, timeout=SETTLE_SECONDS))[0]
        finally:
            for watch in watches:
                watch.cancel()
        first = min(done, key=lambda watch: isinstance(watch.result().error, PeerLost))
        return watches[first], first.result()

    async def _replace(self, group: range, index: int, death: Death) -> None:
        """Returns when other processes are ready. index: of the engine that died first. Raises the first cause when
        that would be one death too many."""
        replicas = self.replicas
        while True:
            pause = self._restarts.after(death.error, Meter.clock(), replicas.num_finished)
            for other in group:
                replicas.engines[other].meter.restarts[death.reason if other == index else "peer"] += 1
                self._engines[other].client.fail(death.error)  # so that none is asked to end: it waits for this one
            replicas.num_restarts += len(group)
            replicas.first_cause = str(death.error)
            what = "it is replaced" if len(group) == 1 else "it and the engines that share experts with it are replaced"
            logger.error("%s; %s%s", death.error, what, f" in {pause:.1f} s" if pause else "")
            await asyncio.gather(*(self._engines[other].stop() for other in group))
            await asyncio.sleep(pause)
            self._launch(group, replaces=True)
            try:
                await self._start(group)
            except ServeError as error:
                death = Death(error, "start")
            else:
                return
