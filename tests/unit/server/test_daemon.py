"""The order of the daemon's startup."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from serve_llm.common.errors import EngineError, ServeError
from serve_llm.common.options.sources import make_options
from serve_llm.server import daemon


def test_a_signal_after_the_first_log_line_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on, the signal is handled and does not kill the process."""
    handlers: dict[str, Any] = {}

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            handlers.setdefault(record.getMessage().split(" on ")[0], signal.getsignal(signal.SIGTERM))

    recorder = Recorder()
    daemon.logger.addHandler(recorder)
    monkeypatch.setattr(daemon.logger, "level", logging.INFO)
    try:
        with pytest.raises(ServeError, match="nonexistent"):
            asyncio.run(daemon.serve(make_options("/nonexistent/model", port=0)))
    finally:
        daemon.logger.removeHandler(recorder)
    assert handlers["Listening"] not in (signal.SIG_DFL, None)


def test_collections_skip_what_the_start_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traversing all modules takes longer than many steps, and every stream would wait for it."""
    order: list[str] = []

    async def assemble(*given: object) -> object:
        order.append("assembled")
        supervisor = SimpleNamespace(watch=watch)
        return SimpleNamespace(app=None, admission=SimpleNamespace(), supervisor=supervisor, stop=stop)

    async def watch() -> EngineError:
        order.append("served")
        return EngineError("the end")

    async def stop(seconds: float) -> None:
        pass

    monkeypatch.setattr(daemon, "_assemble", assemble)
    monkeypatch.setattr(gc, "freeze", lambda: order.append("frozen"))
    with pytest.raises(EngineError, match="the end"):
        asyncio.run(daemon.serve(make_options("model", port=0)))
    assert order == ["assembled", "frozen", "served"]
