"""Loads a draft model into the engine's process."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from serve_llm.common.errors import CapacityError
from serve_llm.engine.config import Config
from serve_llm.engine.draft_model.draft_model import DraftModel
from serve_llm.engine.draft_model.resolve import DraftModelConfig, count_cache_bytes
from serve_llm.engine.model.shard import build_rank_shard
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.worker import kv_cache
from serve_llm.engine.worker.worker import Worker

logger = logging.getLogger(__name__)


def load_draft_model(draft: DraftModelConfig, served: Config) -> DraftModel:
    """Load the weights and allocate the KV cache, before the served model measures the memory that is left for its own.

    served: the settings of the served model. Raises CapacityError if memory runs out.
    """
    config = replace(draft.config, kv_cache_memory=count_cache_bytes(draft, _find_free_memory(served)))
    groups = ProcessGroups(local_ranks=config.data_parallel_size)
    try:
        worker = Worker(config, draft.spec, draft.weights, build_rank_shard(draft.spec, config, 0), groups)
        layout = worker.allocate(worker.num_blocks)
    except CapacityError as error:
        raise CapacityError(f"--speculative-config: the draft model in {config.directory}: {error}") from None
    tokens = kv_cache.cache_tokens(layout, config.max_model_len, config.max_num_batched_tokens)
    logger.info(
        "Draft model %s (%s): %s of weights, %s of KV cache for %s tokens",
        config.directory,
        draft.spec.architecture,
        kv_cache.size_text(worker.weight_bytes),
        kv_cache.size_text(layout.num_bytes),
        f"{tokens:,}",
    )
    return DraftModel(config, worker, layout, served.vocab_size)


def _find_free_memory(served: Config) -> int:
    """Bytes of the device that models may take."""
    if served.device == "cpu":
        return kv_cache.free_memory()
    free, total = torch.cuda.mem_get_info()
    return min(int(free), int(total * served.gpu_memory_utilization))
