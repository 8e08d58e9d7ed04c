"""Workers as Ray actors: Ray places and starts them, and reports when one is gone.

Otherwise they behave like workers on several hosts without Ray: they send WorkerHello to the engine's endpoint, and
steps, tensors and results never go through Ray. Imports Ray but not torch.
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
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serve_llm.common import hosts
from serve_llm.common.curve_zmq import Endpoint
from serve_llm.common.errors import HostLost, RankFailed, ServeError
from serve_llm.common.hub import resolve_model
from serve_llm.common.logs import configure
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.engine.distributed import worker_main
from serve_llm.engine.distributed.environment import apply_variables, read_initial_environ, select_variables
from serve_llm.engine.distributed.launcher import process_state
from serve_llm.engine.distributed.multihost.leader import DOWNLOAD_SECONDS
from serve_llm.engine.distributed.multihost.messages import without_secrets
from serve_llm.engine.distributed.ray import cluster
from serve_llm.engine.distributed.ray.cluster import Reservation
from serve_llm.engine.distributed.worker_group import START_SECONDS, WorkerGroup
from serve_llm.engine.parallel.layout import ParallelLayout

logger = logging.getLogger(__name__)

KILL_SECONDS = 1.5  # time for killed actors to exit
END_SECONDS = 4.0  # time for all Ray calls at the end
ACTOR_SECONDS = 120.0  # time for Ray to start a process on reserved devices

DEVICES = {"GPU": "cuda", "CPU": "cpu"}


def start_on_ray(
    options: EngineOptions, address: str, group_id: str | None, num_engines: int, *, replaces: bool
) -> tuple[WorkerGroup, str]:
    """Start the workers on a cluster. Returns them and their device, "cuda" or "cpu".

    address: see `RayAddress`. group_id: of the placement group to stay within, if there is one. num_engines: that start
    there at the same time. replaces: engines have served before.

    Raises OptionError if the cluster is too small.
    """
    layout = ParallelLayout(options.tensor_parallel_size, options.pipeline_parallel_size)
    connected = cluster.connect(address, layout.size)
    with contextlib.ExitStack() as undo:
        if connected:
            undo.callback(ray.shutdown)
        kind = cluster.choose_device_kind(options.device, group_id)
        reservation = cluster.reserve(layout, kind, group_id, num_engines, replaces=replaces)
        undo.callback(reservation.end)
        own = cluster.get_node_address() if options.host_ip is None else hosts.find_own_address("", options.host_ip)
        endpoint = Endpoint(own, secrets.token_hex(32))
        undo.callback(endpoint.close)
        worker_group = WorkerGroup(
            layout.size,
            lambda url: RayWorkers(reservation, url, endpoint.secret, options, connected),
            endpoint,
            START_SECONDS + DOWNLOAD_SECONDS,
        )
        undo.pop_all()
    return worker_group, DEVICES[reservation.kind]


def is_niced_by_ray(niceness: int, environ: Mapping[str, str]) -> bool:
    """Whether Ray made its worker this nice by its default. A node passes its variables on to its workers; with the
    variable set, the rest of the niceness is that of `ray start` itself."""
    return niceness > 0 and "RAY_worker_niceness" not in environ


class RankActor:
    """One worker, in a process that Ray started."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, number: int, url: str, secret: str, options: EngineOptions, environ: dict[str, str]) -> int:
        """Run the worker until it ends; returns the exit code. options: of the engine. Raises ServeError if it cannot
        reach the engine."""
        apply_variables(os.environ, environ, initial=read_initial_environ())
        os.environ["TQDM_DISABLE"] = "1"  # progress bars would be printed line by line
        configure("warning", f"rank {number}", options.log_format)
        given = os.environ.get("SERVE_LLM_HOST_IP")
        address = hosts.find_own_address("", given) if given else cluster.get_node_address()
        directory = resolve_model(
            options.model, options.revision, options.download_dir, weights=options.load_format == "auto"
        )
        if number == 0 and is_niced_by_ray(os.nice(0), os.environ):
            logger.warning(
                "Ray runs ranks at nice %d, behind all other processes: start it with RAY_worker_niceness=0",
                os.nice(0),
            )
        connection = worker_main.ControlConnection(url, number, secret, address, str(directory))
        # Ray ends its actors together with the engine, unless the network between them is cut.
        threading.Thread(target=worker_main.end_with_engine, args=(url, secret, number), daemon=True).start()
        return worker_main.serve(connection, number, str(directory))


class RayWorkers:
    """See `LaunchedWorkers`."""

    def __init__(
        self, reservation: Reservation, url: str, secret: str, options: EngineOptions, connected: bool
    ) -> None:
        """connected: whether `end` must end this process's connection to Ray."""
        self._reservation = reservation
        self._connected = connected
        self._lock = threading.Lock()  # after ray.shutdown, any Ray call would start a cluster
        self._ended: dict[int, str | ServeError] = {}
        self._is_over = False
        self._leaving: threading.Thread | None = None
        self._pids: dict[int, int] = {}
        self._deadline = time.monotonic() + ACTOR_SECONDS
        environ = select_variables(os.environ)
        if environ:
            logger.info("Environment copied to ranks on other nodes: %s", " ".join(environ))
        actors = [self._start(number) for number in range(len(reservation.places))]
        self._actors = actors
        self._starts = {actor.pid.remote(): number for number, actor in enumerate(actors)}
        plain = without_secrets(options)
        if os.path.isdir(options.model):
            # Workers have a different current directory.
            plain = replace(plain, model=os.path.abspath(options.model))
        self._runs = {
            actor.run.remote(number, url, secret, plain, environ): number for number, actor in enumerate(actors)
        }

    def _start(self, number: int) -> Any:
        reservation = self._reservation
        bundle = PlacementGroupSchedulingStrategy(reservation.group, reservation.bundles[number])
        # Ray must not restart a single rank, because the others would have to restart with it.
        options = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": bundle}
        devices = {"num_cpus": 0, "num_gpus": 1} if reservation.kind == "GPU" else {"num_cpus": 1}
        return ray.remote(RankActor).options(**options, **devices).remote()

    def find_ended(self) -> Mapping[int, str | ServeError]:
        with self._lock:
            if not self._is_over:
                self._look()
            return dict(self._ended)

    def _look(self) -> None:
        for ref, number in _done(self._starts):
            with contextlib.suppress(RayError):  # the future of `run` has the same error
                self._pids[number] = ray.get(ref)
        for ref, number in _done(self._runs):
            self._ended[number] = self._describe_end(number, ref)
        if self._starts and time.monotonic() > self._deadline:
            for number in self._starts.values():
                text = (
                    f"rank {number} ({self.describe_place(number)}) was not started by Ray within {ACTOR_SECONDS:.0f} s"
                )
                late = RankFailed(f"{text}: does something else use the devices of its placement group?")
                self._ended.setdefault(number, late)
            self._starts.clear()

    def _describe_end(self, number: int, ref: Any) -> str | ServeError:
        try:
            return f"exit code {ray.get(ref)}"
        except RayTaskError as error:
            kind = type(error.cause) if isinstance(error.cause, ServeError) else RankFailed
            what = error.cause if kind is not RankFailed else f"{type(error.cause).__name__}: {error.cause}"
            return kind(f"rank {number} ({self.describe_place(number)}) failed while starting: {what}")
        except ActorUnavailableError:
            return HostLost("loss of its node, which does not answer Ray any more")
        except ActorDiedError as error:
            text = " ".join(str(error).split())
            if (load_error := _find_load_error(text)) is not None:
                return RankFailed(f"rank {number} ({self.describe_place(number)}) cannot be started: {load_error}")
            return _describe_death(text)
        except RayError as error:
            return f"{type(error).__name__} of Ray: {' '.join(str(error).split())}"

    def describe_place(self, number: int) -> str:
        pid = f"pid {self._pids[number]}" if number in self._pids else "not started yet"
        return f"node {self._reservation.places[number].address}, {pid}"

    def state(self, number: int) -> str:
        if not self._reservation.places[number].is_driver or number not in self._pids:
            return ""
        return process_state(self._pids[number])

    def serve(self) -> None:
        """No other process needs to know."""

    def end(self, cause: str = "") -> None:
        if self._leaving is not None:
            return
        self._leaving = threading.Thread(target=self._leave, name="leave Ray", daemon=True)
        self._leaving.start()
        self._leaving.join(END_SECONDS)
        if self._leaving.is_alive():  # Ray calls wait for a head node that is gone
            logger.warning("Ray does not answer; ranks will end when they notice that this process has ended")

    def _leave(self) -> None:
        with self._lock:
            self._is_over = True
            for actor in self._actors:  # workers have no state to save
                ray.kill(actor, no_restart=True)
            if self._runs:
                ray.wait(list(self._runs), num_returns=len(self._runs), timeout=KILL_SECONDS)
            self._reservation.end()
            if self._connected:
                ray.shutdown()


def _done(refs: dict[Any, int]) -> list[tuple[Any, int]]:
    """Remove and return the futures that have a result."""
    if not refs:
        return []
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    return [(ref, refs.pop(ref)) for ref in ready]


def _find_load_error(text: str) -> str | None:
    """Extract from Ray's message why a node cannot load the actor's class; None if it is about something else."""
    if "creation task" not in text:
        return None
    found: list[str] = re.findall(r"\w+Error: (?:(?!\w+Error: ).)+", text)
    return f"{(found or [text])[-1].strip()}; the same serve-llm must be installed on all nodes"


def _describe_death(text: str) -> str | HostLost:
    """Shorten Ray's message."""
    if "node has died" in text or "node died" in text:
        return HostLost("loss of its node")
    if "low on memory" in text:
        return "Ray, because its node runs low on memory"
    if "connection error code 2" in text:
        return "end of its process, killed or crashed; its node may be out of memory"
    detail = re.search(r"exit detail: (.+?\.)(?: Some| There|$)", text)
    return f"end of its process: {detail[1] if detail else text[:300]}"
