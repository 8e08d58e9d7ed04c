"""Load a rank's shard of a draft model. Runs in the ranks of the served model's last stage."""

from __future__ import annotations

import json
import os
from dataclasses import replace

from serve_llm.common.errors import CapacityError, ModelError
from serve_llm.common.hub import resolve_draft_checkpoint
from serve_llm.engine.config import Config
from serve_llm.engine.distributed.messages import DraftSetup
from serve_llm.engine.draft_model.load import find_free_memory
from serve_llm.engine.draft_model.resolve import DraftModelConfig, count_cache_bytes
from serve_llm.engine.model.registry import apply_engine_config, read_model
from serve_llm.engine.model.shard import build_rank_shard
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.worker.worker import Worker


def load_draft_shard(setup: DraftSetup, served: Config, tp_rank: int, groups: ProcessGroups) -> Worker:
    """Load the weights and allocate the KV cache, before the served model measures the remaining memory.

    served, groups: of the served model. The draft model's sums are made in the same tensor-parallel group, between its
    steps. Raises CapacityError if memory runs out.
    """
    config = replace(setup.config, directory=_find_directory(setup.config.directory, served))
    spec, weights = read_model(json.loads(setup.model))
    draft = DraftModelConfig(config, apply_engine_config(spec, config), weights)
    size = config.tensor_parallel_size
    free = find_free_memory(served)
    if served.device == "cpu":
        free //= groups.local_ranks
    config = replace(config, kv_cache_memory=count_cache_bytes(draft, free, size, tp_rank))
    own_groups = ProcessGroups(groups.tensor, local_ranks=groups.local_ranks, wait_for_all=groups.wait_for_draft_model)
    try:
        worker = Worker(config, draft.spec, weights, build_rank_shard(draft.spec, config, tp_rank), own_groups)
        worker.allocate(worker.num_blocks)
    except (CapacityError, ModelError) as error:
        raise type(error)(f"--speculative-config: the draft model in {config.directory}: {error}") from None
    return worker


def _find_directory(directory: str, served: Config) -> str:
    """Find the checkpoint on this host, where it may be elsewhere than on the engine's."""
    if os.path.isdir(directory) or os.path.isfile(directory):
        return directory
    speculation = served.speculation
    assert speculation is not None and speculation.model is not None, "no draft model"
    with_weights = served.load_format == "auto"
    return str(
        resolve_draft_checkpoint(speculation.model, speculation.revision, served.download_dir, weights=with_weights)
    )
