"""Scripted models whose replies are vectors."""

from __future__ import annotations

from collections.abc import Callable

from serve_llm.common.types import EngineCoreRequest
from support.fakes import make_model_info
from support.serving import Served

Serve = Callable[..., Served]
EMBEDDER = {"generates": False, "pooling_task": "embed", "vector_size": 3, "max_model_len": 16}
VECTORS = {1: (1.0, 0.0, 0.0), 2: (0.6, 0.8, 0.0), 3: (0.0, 0.0, 1.0)}  # by the number of ids


def by_length(request: EngineCoreRequest) -> tuple[float, ...]:
    return VECTORS.get(len(request.prompt_ids), (0.0, 1.0, 0.0))


def serve_embedder(serve: Serve, **changed: object) -> Served:
    return serve(script=by_length, model_info=make_model_info(**{**EMBEDDER, **changed}))


def serve_classifier(serve: Serve, script: Callable[[EngineCoreRequest], object], size: int) -> Served:
    changed = {"generates": False, "pooling_task": "classify", "vector_size": size}
    return serve(script=script, model_info=make_model_info(**changed))
