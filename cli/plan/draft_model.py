"""Predict the memory that a draft model takes beside rank 0. Imports no torch."""

from __future__ import annotations

from serve_llm.cli.plan.weights import weight_bytes
from serve_llm.common.hub import resolve_config
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.engine.config import Config
from serve_llm.engine.draft_model.resolve import count_cache_bytes, resolve_draft_model
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.parallel.layout import ParallelLayout


def count_draft_bytes(options: EngineOptions, config: Config, memory: int) -> int:
    """Bytes of the draft model that the options name, its KV cache included; 0 without one.

    config: the served model's. memory: bytes of the device. Raises ModelError and OptionError.
    """
    if config.speculation is None or config.speculation.model is None:
        return 0
    draft = resolve_draft_model(options, config, resolve_config(config.speculation.model, None, options.download_dir))
    shard = Shard(ParallelLayout(), 0, range(len(draft.spec.layers)))
    weights = weight_bytes(draft.spec, shard, draft.config.element_bytes, config.device).held
    return weights + count_cache_bytes(draft, max(0, memory - weights))
