"""A draft model whose shards are on the served model's ranks: its steps go through the executor, like others."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from serve_llm.engine.config import Config
from serve_llm.engine.distributed.executor import Executor
from serve_llm.engine.draft_model.draft_model import DraftModel
from serve_llm.engine.draft_model.resolve import DraftModelConfig
from serve_llm.engine.scheduler.output import RunnerOutput, SchedulerOutput
from serve_llm.engine.worker import kv_cache

logger = logging.getLogger(__name__)


def build_draft_model_on_ranks(draft: DraftModelConfig, served: Config, executor: Executor) -> DraftModel:
    """served: the settings of the served model. executor: its ranks have loaded the draft model."""
    config = draft.config
    shards = executor.draft_shards
    assert shards, "no rank has loaded the draft model"
    caches = [shard.kv_cache_config for shard in shards]
    smallest = min(caches, key=lambda cache: cache.num_blocks)  # ranks with more blocks leave some unused
    tokens = kv_cache.count_cache_tokens(smallest, config.max_model_len, config.max_num_batched_tokens)
    logger.info(
        "Draft model %s (%s) on %d rank%s: %s; %s tokens",
        config.directory,
        draft.spec.architecture,
        len(shards),
        "s" if len(shards) > 1 else "",
        kv_cache.describe_memory([shard.weight_bytes for shard in shards], [cache.num_bytes for cache in caches]),
        f"{tokens:,}",
    )

    def compute(step: SchedulerOutput) -> Sequence[RunnerOutput]:
        return executor.execute(msgspec.structs.replace(step, is_for_draft_model=True)).result()

    return DraftModel(config, compute, smallest, served.vocab_size)
