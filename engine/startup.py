"""Starts an engine: resolve the options, start workers, load the model, size the KV cache, report ready.

Imports torch only after starting the workers, so that both import it in parallel.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from serve_llm.common.engine_placement import EnginePlacement
from serve_llm.common.errors import CapacityError
from serve_llm.common.hub import read_config
from serve_llm.common.logs import configure
from serve_llm.common.messages import Start
from serve_llm.common.options.default_speculation import OFF_MESSAGE, ON_MESSAGE, explain_default_off
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.sentence_transformers import SentenceModules, read_sentence_modules
from serve_llm.common.types import LoRATarget, ModelInfo
from serve_llm.engine.config import Config, check_options, resolve
from serve_llm.engine.devices import VISIBLE_DEVICES, claim_gpus, list_gpus
from serve_llm.engine.distributed.choose import ExecutorChoice, choose_executor, gather_facts
from serve_llm.engine.distributed.executor import DPSyncExecutor, Executor, ExecutorBuilder
from serve_llm.engine.distributed.expert_groups import ExpertParallelGroups
from serve_llm.engine.distributed.mp import connect_workers, launch_workers
from serve_llm.engine.distributed.start import find_group_address, start_workers
from serve_llm.engine.distributed.worker_group import WorkerGroup
from serve_llm.engine.draft_model.resolve import (
    DraftModelConfig,
    check_tokenizers,
    find_draft_directory,
    resolve_draft_model,
)
from serve_llm.engine.gpu_software import explain_unusable_gpus, find_missing_compiler, read_gpu_software
from serve_llm.engine.model.config import describe_ignored_keys
from serve_llm.engine.model.lora_targets import find_served_targets
from serve_llm.engine.model.pooling import find_pooling_task, find_token_vector_size, find_vector_size, resolve_pooling
from serve_llm.engine.model.registry import apply_engine_config, read_model
from serve_llm.engine.model.shard import describe_split
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.transformers_spec import TransformersSpec
from serve_llm.engine.model.weight_map import WeightMap
from serve_llm.engine.parallel.dp_sync import DPStepSync
from serve_llm.engine.stored_quantization import NOT_NEEDED, accept_stored_format, find_stored_format
from serve_llm.engine.weights.headers import find_checkpoint_dtype
from serve_llm.engine.worker import kv_cache
from serve_llm.engine.worker.cpu_threads import log_threads

if TYPE_CHECKING:
    from serve_llm.engine.draft_model.draft_model import DraftModel
    from serve_llm.engine.loop import EngineCore

logger = logging.getLogger(__name__)

SLOW = (
    "%s is served by transformers' own code, the slow path: a dense model takes a fifth to a third longer than in "
    "code of our own, experts more (docs/transformers.md)"
)
NO_GRAPHS = "Steps with linear attention are not captured as CUDA graphs"


def start_engine(
    start: Start,
    resources: contextlib.ExitStack,
    report_in_flight: Callable[[Sequence[int]], None],
    join_step_sync: Callable[[Config], DPStepSync] | None = None,
    directory: Path | None = None,
) -> tuple[EngineCore, ModelInfo]:
    """Start the engine that the server requests, and its workers.

    resources: closes everything that was started, even if this raises. report_in_flight: see `EngineCore`.
    join_step_sync: joins the engines that share the experts, if there are any. directory: see `start_workers`. Raises
    ServeError.
    """
    options = start.options
    process = f"engine {start.engine}" if options.max_engines > 1 else ""
    configure(options.log_level, process, options.log_format)
    _claim_gpus(start)

    # Resolve: reject invalid options before spending seconds on workers and torch.
    raw = read_config(Path(start.directory))
    chosen = accept_stored_format(options, raw)
    if chosen is not options:
        logger.info(NOT_NEEDED, find_stored_format(raw))
    spec, weights = read_spec(chosen, start.directory, raw)

    # Start workers.
    choice, worker_group = start_workers(options, start.ray, start.engine, replaces=start.replaces, directory=directory)
    if worker_group is not None:
        resources.push(lambda kind, error, trace: worker_group.close(error))

    began = time.perf_counter()
    from serve_llm.engine.loop import EngineCore
    from serve_llm.engine.structured_output.builder import MatcherBuilder

    config, spec = resolve_config(chosen, start.directory, raw, spec, choice, start.engine)
    lora_targets = find_served_targets(config, spec, weights) if config.max_loras else {}
    draft = find_draft_model(chosen, config)
    config = add_hidden_state_layers(config, draft)

    # Load the model and, in parallel, the tokenizer of grammars, and size the KV cache.
    matchers = MatcherBuilder(config)
    loading = [matchers.load()] if config.generates else []
    expert_groups = None
    if join_step_sync is not None:
        step_sync = join_step_sync(config)
        resources.callback(step_sync.close)
        expert_groups = ExpertParallelGroups(config, step_sync, find_group_address(options, worker_group))
    draft_model = build_draft_model(draft, config)
    executor = build_executor(config, spec, weights, raw, worker_group, expert_groups, draft)
    draft_model = draft_model or reach_draft_model(draft, config, executor)

    def close_executor(kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and worker_group is not None:
            worker_group.close(error)  # tells other hosts the reason
        executor.close()

    resources.push(close_executor)

    # Ready.
    core = EngineCore(config, executor, report_in_flight=report_in_flight, draft_model=draft_model, matchers=matchers)
    resources.callback(core.close)
    concurrent.futures.wait(loading)
    info = _build_model_info(config, spec, executor, lora_targets)
    if worker_group is not None:
        worker_group.serve()
    logger.info("Engine ready after %.2f s", time.perf_counter() - began)
    return core, info


def _claim_gpus(start: Start) -> None:
    """Restrict this process to the engine's GPUs. Raises CapacityError."""
    options = start.options
    is_on_ray = options.distributed_executor_backend == "ray" or (start.ray and start.ray.placement_group)
    if options.device == "cpu" or is_on_ray:  # Ray assigns GPUs itself
        return
    placement = EnginePlacement.from_options(options)
    engines = placement.engines(node=0)
    if start.engine in engines:
        num_ranks = len(placement.local_ranks(start.engine))
        claim_gpus(os.environ, engines.index(start.engine), len(engines), num_ranks)


def _build_model_info(
    config: Config, spec: ModelSpec | TransformersSpec, executor: Executor, lora_targets: dict[str, LoRATarget]
) -> ModelInfo:
    kv_cache_config = executor.kv_cache_config
    return ModelInfo(
        architecture=spec.architecture,
        max_model_len=config.max_model_len,
        vocab_size=spec.vocab_size,
        block_size=config.block_size,
        num_kv_blocks=kv_cache_config.num_blocks,
        num_offload_blocks=kv_cache_config.num_slots,
        kv_cache_tokens=kv_cache.count_cache_tokens(
            kv_cache_config, config.max_model_len, config.max_num_batched_tokens
        ),
        max_num_seqs=kv_cache_config.count_sequences(config.max_num_seqs),
        prefix_caching=config.enable_prefix_caching,
        dtype=config.dtype,
        device=config.device,
        generates=config.generates,
        pooling_task=find_pooling_task(spec),
        vector_size=find_vector_size(spec),
        token_vector_size=find_token_vector_size(spec),
        directory=config.directory,
        lora_targets=lora_targets,
        executor=config.executor_backend,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        rank_hosts=list(executor.hosts),
        draft_source="none" if config.speculation is None else config.speculation.method,
    )


def read_spec(
    options: EngineOptions, directory: str, raw: dict[str, object]
) -> tuple[ModelSpec | TransformersSpec, WeightMap | None]:
    """Read the model's architecture and check that the options fit it. raw: config.json.

    The weight map is None for models in transformers' own code. Raises ModelError and OptionError.
    """
    if options.allow_unknown_config:
        logger.warning("%s", describe_ignored_keys(options.allow_unknown_config))
    if options.model_impl == "transformers":
        from serve_llm.engine.hf_backend.load import read_transformers_spec  # takes seconds

        transformers_spec = read_transformers_spec(Path(directory), options.max_model_len)
        check_options(options, transformers_spec.max_position, len(transformers_spec.layers), has_experts=False)
        return transformers_spec, None
    spec, weights = read_model(raw, options.allow_unknown_config)
    if weights.other_parts:
        logger.info(
            "Serving the text part of %s: the weights of %s are skipped, and images in requests are refused",
            spec.architecture,
            " and ".join(weights.other_parts),
        )
    check_options(options, spec.max_position, len(spec.layers), spec.has_experts)
    return spec, weights


def resolve_config(
    options: EngineOptions,
    directory: str,
    raw: dict[str, object],
    spec: ModelSpec | TransformersSpec,
    choice: ExecutorChoice | None = None,
    engine: int = 0,
) -> tuple[Config, ModelSpec | TransformersSpec]:
    """Resolve everything that does not depend on the weights. Returns the spec as it will be served.

    choice: the executor; None to choose here. engine: index of the data-parallel engine. Raises OptionError,
    CapacityError and ModelError.
    """
    choice = choice or choose_executor(gather_facts(options))
    dtype, source = find_checkpoint_dtype(raw, Path(directory))
    modules = read_sentence_modules(Path(directory)) if isinstance(spec, ModelSpec) else None
    generates, pooling = resolve_pooling(options, directory, spec, modules)
    config = resolve(
        options,
        directory,
        device=choice.device or _choose_device(options.device),
        checkpoint_dtype=dtype,
        model_max_len=_limit_length(options, spec.max_position, modules),
        vocab_size=spec.vocab_size,
        stores_int8=isinstance(spec, ModelSpec) and spec.int8 is not None,
        stores_integers=isinstance(spec, ModelSpec) and spec.stores_integers,
        long_rope_threshold=spec.long_rope_threshold if isinstance(spec, ModelSpec) else None,
        executor_backend=choice.backend,
        data_parallel_rank=engine,
        generates=generates,
        pooling=pooling,
        whole_prompts=isinstance(spec, ModelSpec) and spec.is_encoder,
        has_states=isinstance(spec, ModelSpec) and spec.has_states,
    )
    logger.info(
        "Loading %s (%s) from %s as %s%s on %s, up to %d tokens per request",
        options.model,
        spec.architecture,
        directory,
        config.types,
        f" (dtype: {source})" if source and options.dtype == "auto" else "",
        config.device,
        config.max_model_len,
    )
    if isinstance(spec, TransformersSpec):
        logger.warning(SLOW, spec.architecture)
    elif spec.has_states and config.device == "cuda" and not config.enforce_eager:
        logger.info(NO_GRAPHS)
    _log_default_speculation(options, config, isinstance(spec, ModelSpec) and spec.has_states)
    if choice.backend != "inprocess":
        logger.info("Executor %s, because %s", choice.backend, choice.reason)
    return config, apply_engine_config(spec, config) if isinstance(spec, ModelSpec) else spec


def _log_default_speculation(options: EngineOptions, config: Config, has_states: bool) -> None:
    if options.speculative_config is not None or not config.generates:
        return
    if config.speculation is not None:
        logger.info(ON_MESSAGE, config.speculation.disable_by_batch_size)
    else:
        logger.info(OFF_MESSAGE, explain_default_off(options, config.device, has_states, config.executor_backend))


def find_draft_model(options: EngineOptions, config: Config) -> DraftModelConfig | None:
    """Find the draft model named in the options. Raises OptionError and ModelError if it does not fit the served
    model."""
    if config.speculation is None or not config.speculation.has_draft_model:
        return None
    directory = Path(config.directory) if config.speculation.model is None else find_draft_directory(options)
    if not config.speculation.reads_hidden_states:  # a head uses the served model's
        check_tokenizers(options, Path(config.directory), directory)
    return resolve_draft_model(options, config, directory)


def add_hidden_state_layers(config: Config, draft: DraftModelConfig | None) -> Config:
    """Tell the served model's workers which hidden states an EAGLE-3 head reads."""
    if draft is None or draft.eagle is None:
        return config
    return replace(config, hidden_state_layers=draft.eagle.state_layers)


def build_draft_model(draft: DraftModelConfig | None, config: Config) -> DraftModel | None:
    """Load the draft model, before memory for the served model's KV cache is measured. config: the served model's.
    Returns None if the ranks hold it."""
    if draft is None or draft.is_on_ranks:
        return None
    from serve_llm.engine.draft_model.load import load_draft_model

    return load_draft_model(draft, config)


def reach_draft_model(draft: DraftModelConfig | None, config: Config, executor: Executor) -> DraftModel | None:
    """Return the draft model that the executor's ranks hold; None if they hold none."""
    if draft is None or not draft.is_on_ranks:
        return None
    from serve_llm.engine.distributed.draft_ranks import build_draft_model_on_ranks

    return build_draft_model_on_ranks(draft, config, executor)


def _limit_length(options: EngineOptions, max_position: int, modules: SentenceModules | None) -> int:
    """The context length without --max-model-len: from sentence-transformers' files, if given there."""
    longest = None if modules is None or options.runner == "generate" else modules.max_seq_length
    return max_position if longest is None else min(longest, max_position)


def _choose_device(asked: str) -> str:
    """ "cuda" or "cpu". asked: --device. Raises CapacityError for GPUs that cannot be used."""
    if asked == "cpu":
        return asked
    import torch

    if torch.cuda.is_available():
        if missing := find_missing_compiler():
            raise CapacityError(f"--device: {missing}; or use --device cpu")
        return "cuda"
    if gpus := list_gpus(os.environ.get(VISIBLE_DEVICES)):
        software = read_gpu_software()
        cause = explain_unusable_gpus(software)
        if cause is None:
            cause = f"driver {software.driver}, torch {software.torch}, CUDA {software.cuda}; look at nvidia-smi"
        raise CapacityError(
            f"--device: this host has {len(gpus)} GPUs, but torch cannot use them: {cause}; or use --device cpu"
        )
    if asked == "cuda":
        raise CapacityError("--device: cuda was requested, but torch finds no GPU; use --device cpu")
    return "cpu"


def build_executor(
    config: Config,
    spec: ModelSpec | TransformersSpec,
    weights: WeightMap | None,
    raw: dict[str, object],
    worker_group: WorkerGroup | None = None,
    expert_groups: ExpertParallelGroups | None = None,
    draft: DraftModelConfig | None = None,
) -> Executor:
    """Load the model on all ranks and allocate the KV cache.

    weights: None for a TransformersSpec. raw: config.json. worker_group: started workers, which end with the
    executor; None to start them here if needed. expert_groups: with the engines that share the experts. draft: the
    draft model, which the ranks load as well if it is to be on them. Raises the error of a rank that fails, and
    CapacityError if the cache is too small for one request.
    """
    if isinstance(spec, ModelSpec):
        for line in describe_split(spec, config):
            logger.info("%s", line)
    builder: ExecutorBuilder
    if config.executor_backend == "inprocess":
        from serve_llm.engine.distributed.inprocess import InProcessExecutorBuilder

        builder = InProcessExecutorBuilder(config, spec, weights, expert_groups)
    else:
        assert isinstance(spec, ModelSpec), "transformers' own code runs in one process"
        assert worker_group is not None or config.executor_backend == "mp", "start_workers starts workers on Ray"
        worker_group = worker_group or launch_workers(config.tensor_parallel_size * config.pipeline_parallel_size)
        join_experts = expert_groups.join if expert_groups is not None else None
        on_ranks = draft.config if draft is not None and draft.is_on_ranks else None
        builder = connect_workers(config, spec, raw, worker_group, join_experts, on_ranks)
    try:
        loaded = builder.load()
        if config.device == "cpu":
            log_threads([rank.threads for rank in loaded])
        num_slots = min(rank.num_slots for rank in loaded)
        ready = builder.allocate_cache(min(rank.num_blocks for rank in loaded), num_slots)
        kv_cache_configs = [rank.kv_cache_config for rank in ready]
        kv_cache.check_offload(kv_cache_configs, config.kv_offload_memory)
        weight_bytes = [rank.weight_bytes for rank in loaded]
        logger.info("%s", kv_cache.describe_memory(weight_bytes, [one.num_bytes for one in kv_cache_configs]))
        kv_cache_config = max(kv_cache_configs, key=lambda one: one.block_bytes)
        kv_cache.check_capacity(kv_cache_config, config.max_model_len, config.max_num_batched_tokens, config.device)
    except BaseException as error:
        builder.close(error)
        raise
    executor = builder.build_executor(kv_cache_config)
    executor.hosts = [rank.host for rank in loaded]
    executor.host_memory = [rank.host_memory for rank in ready if rank.host_memory is not None]
    executor.draft_shards = [rank.draft for rank in loaded if rank.draft is not None]
    return executor if expert_groups is None else DPSyncExecutor(executor, expert_groups.sync)
