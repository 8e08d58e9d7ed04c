"""The order of the daemon's start."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

import pytest

from serve_llm.common.errors import ServeError
from serve_llm.common.options.sources import make_options
from serve_llm.server import daemon


def test_a_signal_after_the_first_log_line_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is handled from then on, and does not kill the process."""
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
