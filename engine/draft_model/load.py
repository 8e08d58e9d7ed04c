"""Load a draft model into the engine process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from serve_llm.common.errors import CapacityError, ModelError
from serve_llm.engine.config import Config
from serve_llm.engine.draft_model.draft_model import DraftModel
from serve_llm.engine.draft_model.eagle_load import load_head
from serve_llm.engine.draft_model.head_draft_model import HeadDraftModel
from serve_llm.engine.draft_model.mtp_load import load_mtp_head
from serve_llm.engine.draft_model.resolve import DraftModelConfig, count_cache_bytes
from serve_llm.engine.model.draft_head import DraftHead
from serve_llm.engine.model.shard import build_rank_shard
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.scheduler.output import RunnerOutput, SchedulerOutput
from serve_llm.engine.worker import kv_cache
from serve_llm.engine.worker.worker import Worker
from serve_llm.kernels.registry import Kernels

logger = logging.getLogger(__name__)


def load_draft_model(draft: DraftModelConfig, served: Config) -> DraftModel:
    """Load the weights and allocate the KV cache, before the served model measures the remaining memory.

    served: the settings of the served model. Raises CapacityError if memory runs out.
    """
    config = replace(draft.config, kv_cache_memory=count_cache_bytes(draft, find_free_memory(served)))
    groups = ProcessGroups(local_ranks=config.data_parallel_size)
    heads: list[DraftHead] = []

    def load_this_head(kernels: Kernels) -> DraftHead:
        if draft.mtp is not None:
            heads.append(load_mtp_head(draft, kernels))
        else:
            heads.append(load_head(draft, Path(served.directory), kernels))
        return heads[0]

    try:
        load_decoder = None if draft.eagle is None and draft.mtp is None else load_this_head
        shard = build_rank_shard(draft.spec, config, 0)
        worker = Worker(config, draft.spec, draft.weights, shard, groups, load_decoder)
        kv_cache_config = worker.allocate(worker.num_blocks)
    except (CapacityError, ModelError) as error:
        raise type(error)(f"--speculative-config: the draft model in {config.directory}: {error}") from None
    tokens = kv_cache.count_cache_tokens(kv_cache_config, config.max_model_len, config.max_num_batched_tokens)
    logger.info(
        "%s %s (%s): %s of weights, %s of KV cache for %s tokens",
        "Draft model" if draft.mtp is None else "MTP layer of",
        config.directory,
        draft.spec.architecture,
        kv_cache.format_bytes(worker.weight_bytes),
        kv_cache.format_bytes(kv_cache_config.num_bytes),
        f"{tokens:,}",
    )

    def compute(step: SchedulerOutput) -> Sequence[RunnerOutput]:
        return worker.start(step).finish()

    if heads:
        return HeadDraftModel(config, compute, kv_cache_config, served.vocab_size, heads[0])
    return DraftModel(config, compute, kv_cache_config, served.vocab_size)


def find_free_memory(served: Config) -> int:
    """Return the bytes of device memory that models may take."""
    if served.device == "cpu":
        return kv_cache.find_free_memory()
    free, total = torch.cuda.mem_get_info()
    return min(int(free), int(total * served.gpu_memory_utilization))
