"""Starts the engine processes, and replaces any that die or hang. Used by the daemon and the offline `LLM`.

Open requests survive: `replicas` keeps them and resubmits them with the ids received so far.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from serve_llm.common.curve_zmq import BEAT_SECONDS, LOST_SECONDS
from serve_llm.common.errors import HostLost, ModelError, PeerLost, ServeError
from serve_llm.common.options.schema import Options
from serve_llm.server.engines.checkpoint_stamp import CheckpointStamp
from serve_llm.server.engines.process import STOP_SECONDS, EngineDeath, EngineProcess
from serve_llm.server.engines.quarantine import SUSPECT_DEATHS
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.engines.restarts import RestartPolicy, RestartRecord
from serve_llm.server.metrics.meter import Clock, Meter
from serve_llm.server.metrics.stats_log import StatsLogger

logger = logging.getLogger(__name__)

CHANGED_POLL_SECONDS = 5.0  # between two looks at a checkpoint that has changed
DRAIN_POLL_SECONDS = 0.1  # between two checks of a draining engine
# After the loss of a peer, wait this long for its cause, such as the loss of another host.
SETTLE_SECONDS = LOST_SECONDS + 4 * BEAT_SECONDS


class Supervisor:
    """All engine processes. Create it inside the event loop that uses them."""

    def __init__(self, options: Options, directory: str) -> None:
        """Launch the processes at once, so that their imports overlap the caller's. directory: the local checkpoint."""
        self._options = options
        self._directory = directory
        self._checkpoint = CheckpointStamp(Path(directory))
        count = options.data_parallel_size
        # Engines of an expert-parallel group cannot work without each other and are replaced together.
        groups = [range(count)] if options.experts_span_engines else [range(n, n + 1) for n in range(count)]
        self._clock = Clock()
        self._meters = [Meter(self._clock) for _ in range(options.max_engines)]
        self._engines: dict[int, EngineProcess] = {}
        self._launch_failure: ServeError | None = None  # `start` raises it, so that `stop` ends what was launched
        try:
            for group in groups:
                self._launch(group)
        except ServeError as error:
            self._launch_failure = error
        self._restarts = RestartPolicy(options.max_restarts)
        self._keeping: dict[range, asyncio.Task[ServeError] | None] = dict.fromkeys(groups)  # `_keep` for each group
        self._given_up: asyncio.Future[ServeError] = asyncio.get_running_loop().create_future()
        self._logging: asyncio.Task[None] | None = None
        self._replicas: Replicas | None = None

    @property
    def replicas(self) -> Replicas:
        """The engines, once `start` has returned."""
        assert self._replicas is not None, "start() comes first"
        return self._replicas

    async def start(self) -> None:
        """Wait until all engines are ready. Raises the ServeError of the first failure."""
        if self._launch_failure is not None:
            raise self._launch_failure
        await self._start(self._engines)
        clients = [engine.client for engine in self._engines.values()]
        self._replicas = Replicas(
            clients,
            prefix_caching=self._options.enable_prefix_caching is not False,
            spare_meters=self._meters[self.num_engines :],
        )
        # Engines started from now on wait for GPUs that are gone rather than compute on the CPU.
        self._options = replace(self._options, device=self._replicas.model_info.device)
        for group in self._keeping:
            self._start_keeping(group)
        self._logging = asyncio.create_task(StatsLogger(self._replicas.engines).run())

    async def watch(self) -> ServeError:
        """Return the first cause once engines have died too often. By then, every open request has ended with it."""
        return await asyncio.shield(self._given_up)

    async def stop(self, patience: float = STOP_SECONDS) -> None:
        """Stop all engine processes, after `patience` seconds by force. Idempotent."""
        tasks: list[asyncio.Task[Any]] = [task for task in self._keeping.values() if task is not None]
        if self._logging is not None:
            tasks.append(self._logging)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(engine.stop(patience) for engine in self._engines.values()))

    # Scaling

    @property
    def num_engines(self) -> int:
        """The number of engines, including those being added or drained."""
        return len(self._engines)

    async def add_engines(self, count: int) -> None:
        """Start further engines until there are `count`. Raises the ServeError of the first failure; in this case none
        is added."""
        added = range(self.num_engines, count)
        self._checkpoint.check()
        try:
            self._launch(added, replaces=True)
            await self._start(added)
        except BaseException:
            launched = [self._engines.pop(index) for index in added if index in self._engines]
            await asyncio.gather(*(engine.stop() for engine in launched))
            raise
        self.replicas.join({index: self._engines[index].client for index in added})
        for index in added:
            self._start_keeping(range(index, index + 1))

    async def remove_engine(self, seconds: float) -> None:
        """Drain the last engine and stop it. Requests still open after `seconds` continue on the others. As long as all
        others are being replaced, it serves on, but not longer than `seconds` either."""
        index = self.num_engines - 1
        await self._wait_for_others(index, seconds)
        self.replicas.drain(index)
        keeping = self._keeping.pop(range(index, index + 1))
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        engine = self._engines[index]
        if not self.replicas.engines[index].is_lost:
            await self._drain(index, engine, seconds)
        self.replicas.retire(index)
        await engine.stop()
        del self._engines[index]

    async def _wait_for_others(self, index: int, seconds: float) -> None:
        """Return when an engine below this index takes requests, or the time is up."""
        deadline = self._clock.read() + seconds
        others = self.replicas.engines[:index]
        while not any(replica.accepts for replica in others) and self._clock.read() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def _drain(self, index: int, engine: EngineProcess, seconds: float) -> None:
        """Return when the engine has no requests left, has died, or the time is up."""
        watching = asyncio.ensure_future(engine.watch())
        deadline = self._clock.read() + seconds
        try:
            while self.replicas.count_open(index) and self._clock.read() < deadline and not watching.done():
                await asyncio.wait([watching], timeout=DRAIN_POLL_SECONDS)
        finally:
            watching.cancel()
        if watching.done() and not watching.cancelled():
            error = watching.result().error
            logger.error("%s; it will not be replaced, because it was being removed", error)
            self.replicas.drop_lost({index: engine.client.heartbeat.read_running_ids()}, error)

    # Replacement

    def _start_keeping(self, group: range) -> None:
        task = asyncio.create_task(self._keep(group))
        task.add_done_callback(self._end_keeping)
        self._keeping[group] = task

    def _end_keeping(self, task: asyncio.Task[ServeError]) -> None:
        if task.cancelled() or self._given_up.done():
            return
        error = task.exception()
        if error is not None:
            self._given_up.set_exception(error)
        else:
            self._given_up.set_result(task.result())

    def _launch(self, group: range, *, replaces: bool = False) -> None:
        """Raises the ServeError of an engine that cannot be launched."""
        meeting = None
        for index in group:
            engine = EngineProcess(
                self._options, self._directory, index, self._meters[index], replaces=replaces, meeting=meeting
            )
            self._engines[index] = engine
            meeting = engine.meeting

    async def _start(self, indexes: Iterable[int]) -> None:
        """Wait until these engines are ready. Raises the ServeError of the first failure."""
        starting = [asyncio.ensure_future(self._engines[index].start()) for index in indexes]
        try:
            await asyncio.gather(*starting)
        finally:
            for future in starting:
                future.cancel()

    async def _keep(self, group: range) -> ServeError:
        """Replace the group whenever one of its engines dies. Returns the first cause once that has happened too
        often."""
        while True:
            index, death = await self._first_death(group)
            began = self._clock.read()
            # The loss of a host or of a connection is no request's fault.
            is_blamed = not isinstance(death.error, HostLost | PeerLost)
            in_step = self._engines[index].client.heartbeat.read_running_ids() if is_blamed else ()
            if self.replicas.drop_lost({other: in_step if other == index else () for other in group}, death.error):
                # The culprit's earlier deaths; this one is not recorded yet.
                self._restarts.drop_last_deaths(SUSPECT_DEATHS)
            try:
                await self._replace(group, index, death)
            except ServeError as first:
                self.replicas.give_up(first)
                return first
            seconds = self._clock.read() - began
            for other in group:
                self._meters[other].recovery.observe(seconds)
            what = "The engine is" if len(group) == 1 else "The engines are"
            logger.info("%s ready again after %.1f s", what, seconds)
            self.replicas.join({other: self._engines[other].client for other in group})

    async def _first_death(self, group: range) -> tuple[int, EngineDeath]:
        """Wait for an engine of the group to die and return its index. If several die, return that of the first
        cause."""
        watches = {asyncio.ensure_future(self._engines[index].watch()): index for index in group}
        deaths: list[tuple[int, EngineDeath]] = []
        waiting = set(watches)
        deadline: float | None = None  # set by the first death
        try:
            while waiting and all(isinstance(death.error, PeerLost) for _, death in deaths):
                seconds = None if deadline is None else max(0.0, deadline - self._clock.read())
                done, waiting = await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                if deadline is None:
                    deadline = self._clock.read() + SETTLE_SECONDS
                deaths += sorted((watches[watch], watch.result()) for watch in done)
        finally:
            for watch in watches:
                watch.cancel()
        return min(deaths, key=lambda death: isinstance(death[1].error, PeerLost))

    async def _replace(self, group: range, index: int, death: EngineDeath) -> None:
        """Start new processes for the group. Raises the first cause if this would exceed --max-restarts, and ModelError
        if the checkpoint has changed and no other engine serves.

        index: the engine that died first.
        """
        replicas = self.replicas
        while True:
            pause = self._restarts.record_death(death.error, self._clock.read(), replicas.num_finished)
            for other in group:
                reason = death.reason if other == index else "peer"
                self._meters[other].restarts[reason] += 1
                replicas.restarts.append(RestartRecord(other, reason, str(death.error)))
                # Peers wait for the dead engine and cannot exit when asked to, so let `stop` kill them immediately.
                self._engines[other].client.fail(death.error)
            replicas.num_restarts += len(group)
            replicas.first_cause = str(death.error)
            what = "it is replaced" if len(group) == 1 else "it and the engines that share experts with it are replaced"
            logger.error("%s; %s%s", death.error, what, f" in {pause:.1f} s" if pause else "")
            await asyncio.gather(*(self._engines[other].stop() for other in group))
            await asyncio.sleep(pause)
            await self._wait_for_checkpoint(group)
            try:
                self._launch(group, replaces=True)
                await self._start(group)
            except ServeError as error:
                death = EngineDeath(error, "start")
            else:
                return

    async def _wait_for_checkpoint(self, group: range) -> None:
        """Return when the checkpoint is the one that the other engines have loaded. Raises ModelError if there is none
        left that serves it."""
        is_logged = False
        while True:
            try:
                self._checkpoint.check()
                return
            except ModelError as error:
                others = (replica for index, replica in enumerate(self.replicas.engines) if index not in group)
                if not any(replica.accepts for replica in others):
                    raise
                if not is_logged:
                    logger.error("%s; until then, the other engines serve on", error)
                is_logged = True
            await asyncio.sleep(CHANGED_POLL_SECONDS)
