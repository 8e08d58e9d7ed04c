"""The app on a scripted engine, with the demo model's tokenizer and template."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_llm.common.hub import resolve_model
from serve_llm.common.options.sources import make_options
from serve_llm.server.app import create_app
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.engines.scaler import Scaler
from serve_llm.server.metrics.meter import Clock, Meter
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pool import PromptPool, build_grammar_compiler
from serve_llm.server.storage.storage import Storage
from support.fakes import FixedEngines, Script, ScriptedEngine
from support.serving import TEXT, Served
from support.tools import with_tools


@pytest.fixture(scope="session")
def model() -> ServedModel:
    return ServedModel.load(resolve_model("demo"), make_options("demo"))


@pytest.fixture
def serve(model: ServedModel) -> Iterator[Callable[..., Served]]:
    """Serve the app: serve(text=..., engine options..., options={...}) uses engines that generate this text."""

    pools: list[PromptPool] = []
    storages: list[Storage] = []

    def make(
        text: str = TEXT,
        *,
        script: Script | None = None,
        options: dict[str, object] | None = None,
        num_engines: int = 1,
        served_model: ServedModel = model,
        **engine: object,
    ) -> Served:
        ids = model.tokenizer.encode(text, add_special_tokens=False)
        clock = Clock()
        scripted = [
            ScriptedEngine(script or (lambda request: ids), meter=Meter(clock), **engine) for _ in range(num_engines)
        ]
        chosen = make_options("demo", **(options or {}))
        storage = Storage.open(chosen)
        scaler = Scaler(FixedEngines(num_engines), chosen.min_engines, chosen.max_engines)
        app, admission, pool, batches = create_app(
            Replicas(scripted), served_model, chosen, storage, scaler=scaler if chosen.is_scalable else None
        )
        pools.append(pool)
        storages.append(storage)
        if served_model is not model:  # a worker process would not know its dialect
            context = pool._context._replace(is_worker=True)
            pool._context = context._replace(grammars=build_grammar_compiler(context))
        return Served(app, admission, scripted, served_model, storage, batches)

    yield make
    for pool in pools:
        pool.close()
    for storage in storages:
        storage.close()


@pytest.fixture
def serve_batches(serve: Callable[..., Served], tmp_path: Path) -> Callable[..., Served]:
    """Serve the app with stored files and batches. limit: texts of --limit."""

    def make(*limit: str, **more: Any) -> Served:
        options = {"batches_dir": str(tmp_path / "batches"), "limit": limit or None, **more.pop("options", {})}
        return serve("Hello.", options=options, **more)

    return make


@pytest.fixture
def serve_stored(serve: Callable[..., Served], model: ServedModel) -> Callable[..., Served]:
    """Serve the app with stored responses, on a model with tools. limit: texts of --limit."""

    def make(text: str = "Hello.", *, limit: tuple[str, ...] = (), store: object = "memory", **more: Any) -> Served:
        options = {"responses_store": str(store), "limit": limit or None, **more.pop("options", {})}
        engine = {"served_model": with_tools(model), "model_info": None, **more}
        return serve(text + "<|end|>", options=options, **engine)

    return make


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()
