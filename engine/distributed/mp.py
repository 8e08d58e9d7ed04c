"""Workers as processes, on one host or on several: steps, tensors and results go through shared memory on the engine's
host, and over the network to other hosts. No torch.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import msgspec

from serve_llm.common.errors import EngineError
from serve_llm.common.hosts import difference, fingerprint, host_id
from serve_llm.common.hub import read_config
from serve_llm.common.logs import read_format
from serve_llm.common.types import EPLBStats
from serve_llm.engine.config import Config
from serve_llm.engine.distributed import messages
from serve_llm.engine.distributed.adapter_sender import AdapterSender
from serve_llm.engine.distributed.executor import Executor, ExecutorBuilder, StepResult
from serve_llm.engine.distributed.launcher import WorkerLauncher
from serve_llm.engine.distributed.shm_setup import RankSetup
from serve_llm.engine.distributed.step_channels import STEP_FACTOR, STEP_SECONDS, ConnectionLost
from serve_llm.engine.distributed.worker_group import START_SECONDS, WorkerGroup
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.parallel.shm import ChannelClosed
from serve_llm.engine.scheduler.output import MaskSource, RunnerOutput, SchedulerOutput
from serve_llm.engine.worker.kv_cache import KVCacheConfig

WARM_STEPS = 100  # after this many steps, a GPU's kernels are compiled and its usual batch sizes captured
WARM_STEP_SECONDS = 60.0  # replaces STEP_SECONDS from then on

JoinExpertGroups = Callable[[Sequence[str], Callable[[], object]], list[messages.ExpertGroupSetup]]

logger = logging.getLogger(__name__)


def launch_workers(size: int, address: str = "", directory: Path | None = None) -> WorkerGroup:
    """Start the processes, whose imports run in parallel with the caller's. address: of this host, for ranks of other
    engines on other hosts. directory: see `ControlSocket`."""
    return WorkerGroup(size, lambda url: WorkerLauncher(range(size), url, address=address), directory=directory)


def connect_workers(
    config: Config,
    spec: ModelSpec,
    model: Mapping[str, object],
    worker_group: WorkerGroup,
    join_experts: JoinExpertGroups | None,
    draft: Config | None = None,
) -> MpExecutorBuilder:
    """Connect the engine and its workers with each other.

    model: config.json, from which `spec` was read. worker_group: closed together with the result. join_experts:
    `ExpertParallelGroups.join`, if data-parallel engines share the experts. draft: the settings of a draft model of
    which the ranks hold shards. Raises the error of a rank that fails, with a message that names the rank.
    """
    parallel = ParallelLayout(config.tensor_parallel_size, config.pipeline_parallel_size)
    setup: RankSetup | None = None
    try:
        hellos = worker_group.gather(messages.WorkerHello, worker_group.start_seconds)
        check_hosts(hellos, config.directory)
        setup = RankSetup(
            parallel,
            [hello.host_id for hello in hellos],
            host_id(),
            config.max_num_batched_tokens * spec.hidden_size * config.element_bytes,
            worker_group.endpoint,
            on_gpus=config.device == "cuda",
        )
        requests = setup.requests()
        for rank, request in requests.items():
            worker_group.send(rank, request)
        replies = worker_group.gather(messages.ChannelsReady, START_SECONDS, requests)
        setup.add_replies(dict(zip(requests, replies, strict=True)), [hello.address for hello in hellos])
        warn_of_groups_across_hosts(setup.tp_groups_across_hosts, hellos)
        expert_setups: list[messages.ExpertGroupSetup] = []
        if join_experts is not None:
            expert_setups = join_experts([hello.host_id for hello in hellos], worker_group.check)

        log_level = logging.getLevelName(max(logger.getEffectiveLevel(), logging.DEBUG)).lower()
        config_json = json.dumps(model)
        draft_setup = None
        if draft is not None:
            directory = Path(draft.directory).absolute()  # ranks that Ray starts have another current directory
            draft_setup = messages.DraftSetup(
                replace(draft, directory=str(directory)), json.dumps(read_config(directory))
            )
        for rank in range(parallel.size):
            ranks_on_host = setup.local_ranks(rank)
            init = messages.InitWorker(
                config,
                config_json,
                local_ranks=len(ranks_on_host) * config.engines_on_host(rank),
                device_index=ranks_on_host.index(rank),
                log_level="warning" if log_level == "info" else log_level,  # the engine logs once for all ranks
                steps=setup.steps(rank),
                rings=setup.rings(rank),
                rendezvous=setup.rendezvous(rank),
                expert_group=expert_setups[rank] if expert_setups else None,
                log_format=read_format(),
                logs_progress=log_level in ("info", "debug") and rank == ranks_on_host[0],
                draft=draft_setup if rank in parallel.tp_group(parallel.output_rank) else None,
            )
            worker_group.send(rank, init)
        worker_group.gather(messages.GroupsReady, START_SECONDS)
        setup.connect(START_SECONDS)
    except BaseException as error:
        if setup is not None:
            setup.close()
        worker_group.close(error)
        raise
    builder = MpExecutorBuilder(config, worker_group, setup, join_experts)
    logger.info("%s up in %.2f s", builder, time.perf_counter() - worker_group.began)
    return builder


class MpExecutorBuilder(ExecutorBuilder):
    """See `ExecutorBuilder`: for connected worker processes."""

    def __init__(
        self, config: Config, worker_group: WorkerGroup, setup: RankSetup, shared_memory: object = None
    ) -> None:
        """Use `connect_workers`. shared_memory: kept alive for other engines."""
        self._config = config
        self._worker_group = worker_group
        self._setup = setup
        self._shared_memory = shared_memory

    def __str__(self) -> str:
        size = self._worker_group.size
        return f"{size} rank{'s' if size > 1 else ''}"

    def load(self) -> list[messages.LoadDone]:
        began = time.perf_counter()
        loaded = self._worker_group.gather(messages.LoadDone, messages.LOAD_SECONDS)
        logger.info("Weights loaded and packed by %s in %.2f s", self, time.perf_counter() - began)
        return loaded

    def allocate_cache(self, num_blocks: int, num_slots: int) -> list[messages.CacheReady]:
        for rank in range(self._worker_group.size):
            self._worker_group.send(rank, messages.AllocateCache(num_blocks, num_slots))
        return self._worker_group.gather(messages.CacheReady, START_SECONDS)

    def build_executor(self, kv_cache_config: KVCacheConfig) -> MpExecutor:
        self._worker_group.watch(self._setup.close)
        return MpExecutor(self._config, self._worker_group, self._setup, kv_cache_config, self._shared_memory)

    def close(self, error: BaseException | None = None) -> None:
        self._setup.close()
        self._worker_group.close(error)


class RemoteStepFuture(Future[StepResult]):
    """A step in flight. `result` receives in the calling thread, which saves a wake-up by another thread."""

    def __init__(self, executor: MpExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> StepResult:
        self._executor.collect(self)
        return super().result(timeout)


class MpExecutor(Executor):
    """Runs steps on worker processes. For one thread."""

    def __init__(
        self,
        config: Config,
        worker_group: WorkerGroup,
        setup: RankSetup,
        kv_cache_config: KVCacheConfig,
        shared_memory: object = None,
    ) -> None:
        """worker_group: watched, ended by `close`. shared_memory: kept alive for other engines."""
        self.depth = 2 if config.async_scheduling else config.pipeline_parallel_size
        if config.device == "cuda" and config.pipeline_parallel_size > 1:
            self.depth += 1  # a stage has the next step before the host has the ids of the previous one
        self.kv_cache_config = kv_cache_config
        self._worker_group = worker_group
        self._setup = setup
        self._shared_memory = shared_memory
        self._steps = setup.step_channel()
        self._adapter_sender = AdapterSender(config.max_cpu_loras) if setup.has_remote_ranks else None
        self._in_flight: deque[RemoteStepFuture] = deque()
        self._step_timeout = config.step_timeout
        self._on_gpus = config.device == "cuda"
        self._num_results = 0
        self._longest = 0.0  # seconds, the longest wait for a result so far
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[RunnerOutput]).decode

    @property
    def eplb_stats(self) -> EPLBStats | None:
        return self._worker_group.eplb_stats

    def execute(self, scheduler_output: SchedulerOutput, masks: MaskSource | None = None) -> Future[StepResult]:
        future = RemoteStepFuture(self)
        try:
            step = self._encode(scheduler_output)
            self._steps.send(step, self._time_limit, self._encode_for_other_hosts(scheduler_output))
            if masks is not None:  # meanwhile, ranks compute up to sampling
                self._steps.send(masks(), self._time_limit)
            self._in_flight.append(future)
        except (ChannelClosed, TimeoutError) as error:
            future.set_exception(self._find_cause(error))
        return future

    def _encode_for_other_hosts(self, scheduler_output: SchedulerOutput) -> bytes | None:
        """The step for ranks on other hosts; None if it is that of all ranks."""
        step = None if self._adapter_sender is None else self._adapter_sender.add_files(scheduler_output)
        return None if step is None else self._encode(step)

    def collect(self, wanted: RemoteStepFuture) -> None:
        """Receive results, which arrive in the order of the steps, up to this one's."""
        while not wanted.done():
            oldest = self._in_flight.popleft()
            began = time.monotonic()
            try:
                oldest.set_result(self._decode(self._steps.receive(self._time_limit)))
                self._longest = max(self._longest, time.monotonic() - began)
                self._num_results += 1
            except (ChannelClosed, TimeoutError) as error:
                oldest.set_exception(self._find_cause(error))

    @property
    def _time_limit(self) -> float:
        """Seconds without a result after which a step has failed.

        Nothing else ends a step that hangs in a captured all-reduce, which torch's watchdog does not see."""
        is_warm = self._on_gpus and self._num_results >= WARM_STEPS
        least = WARM_STEP_SECONDS if is_warm else STEP_SECONDS
        return self._step_timeout or max(least, STEP_FACTOR * self._longest)

    def _find_cause(self, error: Exception) -> Exception:
        """Find the failure behind an error of the step channel."""
        if isinstance(error, TimeoutError):
            self._worker_group.fail(self._worker_group.build_silence_error(self._time_limit))
            self._setup.close()
        cause = self._worker_group.cause()
        if isinstance(error, ConnectionLost) and self._worker_group.failure is None:  # nothing else is wrong
            self._worker_group.fail(self._worker_group.build_loss_error(error.ranks))
            self._setup.close()
        return self._worker_group.failure or cause

    def check(self) -> None:
        if self._worker_group.failure is not None:
            raise self._worker_group.failure

    def close(self) -> None:
        self._setup.close()
        self._worker_group.close()


def check_hosts(hellos: list[messages.WorkerHello], directory: str) -> None:
    """Raises EngineError with one line that names the hosts that differ from this one, and how."""
    others = {hello.host_id: hello for hello in hellos if hello.host_id != host_id()}
    if not others:
        return
    fingerprints = [fingerprint(Path(directory)), *(hello.fingerprint for hello in others.values())]
    names = ["the engine's host", *(f"the host {hello.host} ({hello.address})" for hello in others.values())]
    difference_text = difference(fingerprints, names)
    if difference_text:
        raise EngineError(f"all hosts must have the same versions and the same model files: {difference_text}")


def warn_of_groups_across_hosts(groups: list[range], hellos: list[messages.WorkerHello]) -> None:
    """Warn about the cost of tensor-parallel groups that span several hosts."""
    for group in groups:
        addresses = ", ".join(dict.fromkeys(hellos[rank].address for rank in group))
        logger.warning(
            "Tensor parallelism of ranks %d to %d crosses hosts (%s): each layer waits for the network twice per step; "
            "with tensor parallelism inside hosts and --pipeline-parallel-size across them it waits once per stage",
            group[0],
            group[-1],
            addresses,
        )
