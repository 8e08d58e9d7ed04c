"""Ranks as Ray actors: Ray finds them nodes and devices, starts them, and says when one is gone.

All else is as for ranks on several hosts without Ray: they say Hello to the engine's endpoint, and steps, tensors and
answers go through shared memory or sockets of ours, never through Ray. Imports Ray; no torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_llm.engine.errors import RankFailed, ServeError
from serve_llm.engine.execute import cluster, rank
from serve_llm.engine.execute.carried import arrive, carried
from serve_llm.engine.execute.cluster import Reservation
from serve_llm.engine.execute.discovery import environ_of
from serve_llm.engine.execute.launch import process_state
from serve_llm.engine.execute.membership import without_secrets
from serve_llm.engine.execute.nodes import FETCH_SECONDS
from serve_llm.engine.execute.roster import START_SECONDS, Roster
from serve_llm.engine.hub import resolve_model
from serve_llm.engine.logs import configure
from serve_llm.engine.options import Options
from serve_llm.engine.parallel import hosts
from serve_llm.engine.parallel.encrypted import Endpoint
from serve_llm.engine.parallel.layout import Grid

logger = logging.getLogger(__name__)

KILL_SECONDS = 1.5  # for killed actors to be gone
END_SECONDS = 4.0  # for all that Ray is told at the end
ACTOR_SECONDS = 120.0  # for Ray to start a process where devices are reserved

DEVICES = {"GPU": "cuda", "CPU": "cpu"}


def start_on_ray(options: Options, address: str, group_id: str | None) -> tuple[Roster, str]:
    """Start the ranks on the cluster at the address (see `discovery`); and the device ("cuda" or "cpu") that they
    compute on. group_id: of the placement group to stay within, if there is one.

    Raises OptionError if the cluster is too small.
    """
    grid = Grid(options.tensor_parallel_size, options.pipeline_parallel_size)
    connected = cluster.connect(address, grid.size)
    with contextlib.ExitStack() as undo:
        if connected:
            undo.callback(ray.shutdown)
        reservation = cluster.reserve(grid, cluster.kind_of_device(options.device, group_id), group_id)
        undo.callback(reservation.end)
        own = cluster.node_address() if options.host_ip is None else hosts.own_address("", options.host_ip)
        endpoint = Endpoint(own, secrets.token_hex(32))
        undo.callback(endpoint.close)
        roster = Roster(
            grid.size,
            lambda url: RayRanks(reservation, url, endpoint.secret, options, connected),
            endpoint,
            START_SECONDS + FETCH_SECONDS,
        )
        undo.pop_all()
    return roster, DEVICES[reservation.kind]


class RankActor:
    """One rank, in a process that Ray started."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, number: int, url: str, secret: str, options: Options, environ: dict[str, str]) -> int:
        """The rank's whole life; its exit code. options: of the engine. Raises ServeError before it is in touch."""
        arrive(os.environ, environ, own=environ_of(Path("/proc/self")))
        os.environ["TQDM_DISABLE"] = "1"  # bars would come out line by line
        configure("warning", f"rank {number}")
        given = os.environ.get("SERVE_LLM_HOST_IP")
        address = hosts.own_address("", given) if given else cluster.node_address()
        directory = resolve_model(
            options.model, options.revision, options.download_dir, weights=options.load_format == "auto"
        )
        if number == 0 and os.nice(0) > 0:
            logger.warning(
                "Ray runs ranks at nice %d, so that all else comes first: start it with RAY_worker_niceness=0",
                os.nice(0),
            )
        link = rank.Control(url, number, secret, address, str(directory))
        # Ray ends its actors with the engine, but not behind a cut cable.
        threading.Thread(target=rank.end_with_engine, args=(url, secret, number), daemon=True).start()
        return rank.serve(link, number, str(directory))


class RayRanks:
    """See `roster.Launched`."""

    def __init__(self, reservation: Reservation, url: str, secret: str, options: Options, connected: bool) -> None:
        """connected: Ray's connection of this process ends with this."""
        self._reservation, self._connected = reservation, connected
        self._lock = threading.Lock()  # after ray.shutdown, any call would start a Ray of its own
        self._ended: dict[int, str | ServeError] = {}
        self._is_over = False
        self._leaving: threading.Thread | None = None
        self._pids: dict[int, int] = {}
        self._deadline = time.monotonic() + ACTOR_SECONDS
        environ = carried(os.environ)
        if environ:
            logger.info("Environment carried to ranks on other nodes: %s", " ".join(environ))
        actors = [self._start(number) for number in range(len(reservation.places))]
        self._actors = actors
        self._starts = {actor.pid.remote(): number for number, actor in enumerate(actors)}
        plain = without_secrets(options)
        if os.path.isdir(options.model):
            plain = replace(plain, model=os.path.abspath(options.model))  # elsewhere the current directory is another
        self._runs = {
            actor.run.remote(number, url, secret, plain, environ): number for number, actor in enumerate(actors)
        }

    def _start(self, number: int) -> Any:
        reservation = self._reservation
        bundle = PlacementGroupSchedulingStrategy(reservation.group, reservation.bundles[number])
        # A rank alone cannot be started again: the others would have to begin anew with it.
        options = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": bundle}
        devices = {"num_cpus": 0, "num_gpus": 1} if reservation.kind == "GPU" else {"num_cpus": 1}
        return ray.remote(RankActor).options(**options, **devices).remote()

    def ended(self) -> Mapping[int, str | ServeError]:
        with self._lock:
            if not self._is_over:
                self._look()
            return dict(self._ended)

    def _look(self) -> None:
        for ref, number in _done(self._starts):
            with contextlib.suppress(RayError):  # the same is said of its run
                self._pids[number] = ray.get(ref)
        for ref, number in _done(self._runs):
            self._ended[number] = self._how(number, ref)
        if self._starts and time.monotonic() > self._deadline:
            for number in self._starts.values():
                text = f"rank {number} ({self.where(number)}) was not started by Ray within {ACTOR_SECONDS:.0f} s"
                late = RankFailed(f"{text}: does something else use the devices of its placement group?")
                self._ended.setdefault(number, late)
            self._starts.clear()

    def _how(self, number: int, ref: Any) -> str | ServeError:
        try:
            return f"exit code {ray.get(ref)}"
        except RayTaskError as error:
            kind = type(error.cause) if isinstance(error.cause, ServeError) else RankFailed
            what = error.cause if kind is not RankFailed else f"{type(error.cause).__name__}: {error.cause}"
            return kind(f"rank {number} ({self.where(number)}) failed while starting: {what}")
        except ActorUnavailableError:
            return "loss of its node, which does not answer Ray any more"
        except ActorDiedError as error:
            said = " ".join(str(error).split())
            if (cannot := _why_not_started(said)) is not None:
                return RankFailed(f"rank {number} ({self.where(number)}) cannot be started: {cannot}")
            return _cause_of_death(said)
        except RayError as error:
            return f"{type(error).__name__} of Ray: {' '.join(str(error).split())}"

    def where(self, number: int) -> str:
        pid = f"pid {self._pids[number]}" if number in self._pids else "not started yet"
        return f"node {self._reservation.places[number].address}, {pid}"

    def state(self, number: int) -> str:
        if not self._reservation.places[number].is_driver or number not in self._pids:
            return ""
        return process_state(self._pids[number])

    def serve(self) -> None:
        """Nobody else has to be told."""

    def end(self, cause: str = "") -> None:
        if self._leaving is not None:
            return
        self._leaving = threading.Thread(target=self._leave, name="leave Ray", daemon=True)
        self._leaving.start()
        self._leaving.join(END_SECONDS)
        if self._leaving.is_alive():  # where the head is gone, Ray's calls wait for it
            logger.warning("Ray does not answer; ranks end when they notice that this process has ended")

    def _leave(self) -> None:
        with self._lock:
            self._is_over = True
            for actor in self._actors:  # a rank has nothing to lose
                ray.kill(actor, no_restart=True)
            if self._runs:
                ray.wait(list(self._runs), num_returns=len(self._runs), timeout=KILL_SECONDS)
            self._reservation.end()
            if self._connected:
                ray.shutdown()


def _done(refs: dict[Any, int]) -> list[tuple[Any, int]]:
    """Those that have a result; taken out."""
    if not refs:
        return []
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    return [(ref, refs.pop(ref)) for ref in ready]


def _why_not_started(said: str) -> str | None:
    """What Ray says of an actor whose class a node cannot load; None if it says something else."""
    if "creation task" not in said:
        return None
    found: list[str] = re.findall(r"\w+Error: (?:(?!\w+Error: ).)+", said)
    return f"{(found or [said])[-1].strip()}; the same serve-llm must be installed on all nodes"


def _cause_of_death(said: str) -> str:
    """Ray's paragraph in a few words."""
    if "node has died" in said or "node died" in said:
        return "loss of its node"
    if "low on memory" in said:
        return "Ray, because its node runs low on memory"
    if "connection error code 2" in said:
        return "end of its process, killed or crashed; its node may be out of memory"
    detail = re.search(r"exit detail: (.+?\.)(?: Some| There|$)", said)
    return f"end of its process: {detail[1] if detail else said[:300]}"
