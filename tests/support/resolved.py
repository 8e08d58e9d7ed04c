"""Options resolved for a model, as the engine does at startup."""

from __future__ import annotations

from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.engine import startup
from serve_llm.engine.config import Config
from serve_llm.engine.distributed.choose import ExecutorChoice
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.transformers_spec import TransformersSpec
from serve_llm.engine.model.weight_map import WeightMap


def resolve_all(
    options: EngineOptions,
    directory: str,
    raw: dict[str, object],
    choice: ExecutorChoice | None = None,
    engine: int = 0,
) -> tuple[Config, ModelSpec | TransformersSpec, WeightMap | None]:
    """Resolve options. raw: config.json. choice, engine: see `startup.resolve_config`."""
    spec, weights = startup.read_spec(options, directory, raw)
    config, spec = startup.resolve_config(options, directory, raw, spec, choice, engine)
    return config, spec, weights
