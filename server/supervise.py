"""Keeps the engine processes running: starts them, and replaces one that dies or hangs. Used by the daemon and by the
offline `LLM` alike.

Open requests survive (`server.replicas` holds them); what a dead engine had received or computed is computed again.
"""

from __future__ import annotations

import asyncio
import logging

from serve_llm.engine.errors import ServeError
from serve_llm.engine.options import Options
from serve_llm.server.metrics import Meter
from serve_llm.server.process import STOP_SECONDS, Death, EngineProcess
from serve_llm.server.replicas import SUSPECT, Replicas
from serve_llm.server.restarts import Restarts

logger = logging.getLogger(__name__)


class Supervisor:
    """All engine processes. Make it inside the event loop that uses them."""

    def __init__(self, options: Options, directory: str) -> None:
        """`directory`: the local checkpoint. They start at once, so that their imports overlap the caller's."""
        self._options = options
        self._directory = directory
        self._engines = [EngineProcess(options, directory, index) for index in range(options.data_parallel_size)]
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
        starting = [asyncio.ensure_future(engine.start()) for engine in self._engines]
        try:
            await asyncio.gather(*starting)
        finally:
            for future in starting:
                future.cancel()
        clients = [engine.client for engine in self._engines]
        self._replicas = Replicas(clients, prefix_caching=self._options.enable_prefix_caching)
        self._keeping = [asyncio.ensure_future(self._keep(index)) for index in range(len(self._engines))]

    async def watch(self) -> ServeError:
        """Returns the first cause when engines have died too often; every open request has ended with it by then."""
        done, _ = await asyncio.wait(self._keeping, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def stop(self, patience: float = STOP_SECONDS) -> None:
        """End all engine processes, after so many seconds by force. Idempotent."""
        for future in self._keeping:
            future.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*(engine.stop(patience) for engine in self._engines))

    async def _keep(self, index: int) -> ServeError:
        """Replace an engine whenever it dies. Returns the first cause when that was too often."""
        meter = self.replicas.engines[index].meter
        while True:
            death = await self._engines[index].watch()
            began = Meter.clock()
            if self.replicas.lose(index, self._engines[index].client.pulse.under_way(), death.error):
                self._restarts.forgive(SUSPECT)  # the deaths before this one
            try:
                await self._replace(index, death)
            except ServeError as first:
                self.replicas.give_up(first)
                return first
            meter.recovery.observe(Meter.clock() - began)
            logger.info("The engine is ready again after %.1f s", Meter.clock() - began)
            self.replicas.join(index, self._engines[index].client)

    async def _replace(self, index: int, death: Death) -> None:
        """Returns when another process is ready. Raises the first cause when that would be one too many."""
        meter = self.replicas.engines[index].meter
        while True:
            pause = self._restarts.after(death.error, Meter.clock(), self.replicas.num_finished)
            meter.restarts[death.reason] += 1
            self.replicas.num_restarts += 1
            self.replicas.first_cause = str(death.error)
            logger.error("%s; it is replaced%s", death.error, f" in {pause:.1f} s" if pause else "")
            await self._engines[index].stop()
            await asyncio.sleep(pause)
            engine = self._engines[index] = EngineProcess(self._options, self._directory, index, replaces=True)
            try:
                await engine.start()
            except ServeError as error:
                death = Death(error, "start")
            else:
                return
