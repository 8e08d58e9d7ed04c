"""The app on a scripted engine, with the demo model's tokenizer and template."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from serve_llm.engine.hub import resolve_model
from serve_llm.engine.options import Options
from serve_llm.server.app import create_app
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pool import PromptPool
from serve_llm.server.replicas import Replicas
from support.fakes import Script, ScriptedEngine
from support.serving import TEXT, Served


@pytest.fixture(scope="session")
def model() -> ServedModel:
    return ServedModel.load(resolve_model("demo"), Options.from_kwargs("demo"))


@pytest.fixture
def serve(model: ServedModel) -> Iterator[Callable[..., Served]]:
    """serve(text=..., engine options..., options={...}): the app on engines that generate this text."""

    pools: list[PromptPool] = []

    def make(
        text: str = TEXT,
        *,
        script: Script | None = None,
        options: dict[str, object] | None = None,
        num_engines: int = 1,
        **engine: object,
    ) -> Served:
        ids = model.tokenizer.encode(text, add_special_tokens=False)
        scripted = [ScriptedEngine(script or (lambda request: ids), **engine) for _ in range(num_engines)]
        app, gate, pool = create_app(Replicas(scripted), model, Options.from_kwargs("demo", **(options or {})))
        pools.append(pool)
        return Served(app, gate, scripted, model)

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()
