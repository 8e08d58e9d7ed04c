"""From options and config.json to an executor that is ready: the order of an engine's start."""

from __future__ import annotations

import logging

import torch

from serve_llm.engine.config import Config, resolve
from serve_llm.engine.errors import OptionError
from serve_llm.engine.execute import memory
from serve_llm.engine.execute.executor import Executor
from serve_llm.engine.execute.executors.inprocess import InProcessExecutor
from serve_llm.engine.execute.memory import CacheLayout
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap
from serve_llm.engine.options import Options

logger = logging.getLogger(__name__)


def resolve_all(options: Options, directory: str, raw: dict[str, object]) -> tuple[Config, ModelSpec, WeightMap]:
    """Decide everything that can be decided before a weight is read."""
    spec, weights = read_model(raw)
    config = resolve(
        options,
        directory,
        device=_device(options.device),
        checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        model_max_len=spec.max_position,
    )
    logger.info(
        "Loading %s (%s) from %s as %s on %s, up to %d tokens per request",
        options.model,
        spec.architecture,
        directory,
        config.dtype,
        config.device,
        config.max_model_len,
    )
    return config, spec.with_max_length(config.max_model_len), weights


def _device(asked: str) -> str:
    if asked == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device: cuda was asked for, but torch finds no GPU; use --device cpu")
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked


def build_executor(config: Config, spec: ModelSpec, weights: WeightMap) -> Executor:
    """Load the model on all ranks (there is one) and plan the KV cache."""
    return InProcessExecutor(config, spec, weights)


def cache_tokens(config: Config, layout: CacheLayout) -> int:
    """Tokens that the KV cache holds, as the start-up log says."""
    return memory.cache_tokens(layout, config.max_model_len, config.max_num_batched_tokens)
