"""From options and config.json to an executor that is ready: the order of an engine's start."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from serve_llm.engine.config import Config, checkpoint_dtype, resolve
from serve_llm.engine.errors import CapacityError
from serve_llm.engine.execute import memory
from serve_llm.engine.execute.choose import Choice, choose, look_around
from serve_llm.engine.execute.columns import Columns
from serve_llm.engine.execute.executor import Executor
from serve_llm.engine.execute.executors.inprocess import InProcessExecutor
from serve_llm.engine.execute.executors.mp import MpExecutor, start_ranks
from serve_llm.engine.execute.memory import CacheLayout
from serve_llm.engine.execute.roster import Roster
from serve_llm.engine.model.config import passed_over
from serve_llm.engine.model.registry import read_model, served
from serve_llm.engine.model.shard import describe_split
from serve_llm.engine.model.spec import ModelSpec, PretrainedSpec
from serve_llm.engine.model.weight_map import WeightMap
from serve_llm.engine.options import Options
from serve_llm.engine.parallel.layout import Grid
from serve_llm.engine.parallel.lockstep import Lockstep
from serve_llm.engine.plan import describe_memory

logger = logging.getLogger(__name__)

SLOW = (
    "%s is served by transformers' own code, the slow path: a dense model takes a fifth to a third longer than in "
    "code of our own, experts more (docs/transformers.md)"
)


def resolve_all(
    options: Options, directory: str, raw: dict[str, object], choice: Choice | None = None, engine: int = 0
) -> tuple[Config, ModelSpec | PretrainedSpec, WeightMap | None]:
    """Decide everything that can be decided before a weight is read. choice: of the executor, if made already. engine:
    index among the data-parallel ones.

    The weight map is None where transformers' own code is to be run."""
    spec: ModelSpec | PretrainedSpec
    weights = None
    if options.model_impl == "transformers":
        from serve_llm.engine.weights.pretrained import read_pretrained  # seconds, for those only who need it

        spec = read_pretrained(Path(directory), options.max_model_len)
    else:
        spec, weights = read_model(raw, options.allow_unknown_config)
    if options.allow_unknown_config:
        logger.warning("%s", passed_over(options.allow_unknown_config))
    choice = choice or choose(look_around(options))
    config = resolve(
        options,
        directory,
        device=choice.device or _device(options.device),
        checkpoint_dtype=checkpoint_dtype(raw),
        model_max_len=spec.max_position,
        num_layers=len(spec.layers),
        stores_int8=isinstance(spec, ModelSpec) and spec.int8 is not None,
        has_experts=isinstance(spec, ModelSpec) and spec.has_experts,
        rope_turns_at=spec.rope_turns_at if isinstance(spec, ModelSpec) else None,
        executor_backend=choice.backend,
        data_parallel_rank=engine,
    )
    logger.info(
        "Loading %s (%s) from %s as %s on %s, up to %d tokens per request",
        options.model,
        spec.architecture,
        directory,
        config.types,
        config.device,
        config.max_model_len,
    )
    if weights is None:
        logger.warning(SLOW, spec.architecture)
    if choice.backend != "inprocess":
        logger.info("Executor %s, because %s", choice.backend, choice.reason)
    return config, served(spec, config) if isinstance(spec, ModelSpec) else spec, weights


def _device(asked: str) -> str:
    if asked == "cuda" and not torch.cuda.is_available():
        raise CapacityError("--device: cuda was asked for, but torch finds no GPU; use --device cpu")
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def build_executor(
    config: Config,
    spec: ModelSpec | PretrainedSpec,
    weights: WeightMap | None,
    raw: dict[str, object],
    roster: Roster | None = None,
    lockstep: Lockstep | None = None,
) -> Executor:
    """Load the model on all ranks and allocate the KV cache. Raises CapacityError if that is too small.

    spec, weights: as `resolve_all` gave them. raw: config.json. roster: ranks that have been started for this; they end
    with the executor. lockstep: with the engines that share out experts.
    """
    grid = Grid(config.tensor_parallel_size, config.pipeline_parallel_size)
    if isinstance(spec, ModelSpec):
        split, layers = config.tensor_parallel_split, config.pipeline_parallel_layers
        for line in describe_split(spec, grid, split, layers, engines=config.expert_engines):
            logger.info("%s", line)
    column_of = Columns(config, lockstep).of if lockstep is not None else None
    executor: Executor
    if config.executor_backend == "inprocess":
        executor = InProcessExecutor(config, spec, weights, column_of)
    else:
        assert isinstance(spec, ModelSpec), "several ranks have a family's model"
        assert roster is not None or config.executor_backend == "mp", "the engine process starts ranks on Ray"
        executor = MpExecutor(config, spec, raw, roster or start_ranks(grid.size), column_of)
    try:
        if isinstance(spec, ModelSpec):
            logger.info("%s", describe_memory(spec, config, executor.layout.num_blocks))
        else:
            logger.info("KV cache: %s", memory.size_text(executor.layout.num_bytes))
        memory.check_capacity(executor.layout, config.max_model_len, config.max_num_batched_tokens, config.device)
    except BaseException:
        if roster is None:  # else whoever started the ranks ends them, and tells them why
            executor.close()
        raise
    return executor


def cache_tokens(config: Config, layout: CacheLayout) -> int:
    """Tokens that the KV cache holds, as the start-up log says."""
    return memory.cache_tokens(layout, config.max_model_len, config.max_num_batched_tokens)
