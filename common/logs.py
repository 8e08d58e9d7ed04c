"""Configure logging of a process: lines in vLLM's format, `INFO 07-23 13:56:04 [memory.py:75] message`, or JSON."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime

from serve_llm.common.errors import ServeError

_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


@dataclass
class LoggedRequest:
    """An HTTP request as it appears in log records."""

    request_id: str  # X-Request-Id
    path: str = ""
    traceparent: str = ""  # the active span in W3C Trace Context format, if any

    def describe_span(self) -> dict[str, str]:
        """Trace id and span id in hexadecimal; empty without a span."""
        if not self.traceparent:
            return {}
        _, trace_id, span_id, _ = self.traceparent.split("-")
        return {"trace_id": trace_id, "span_id": span_id}


CURRENT_REQUEST: ContextVar[LoggedRequest | None] = ContextVar("CURRENT_REQUEST", default=None)
"""The HTTP request being handled. Log records include its span and, in JSON, its id."""


def configure(level: str, process: str = "", format: str = "text") -> None:
    """Log to stderr: our own messages and uvicorn's from `level` ("debug", "info", "warning", "error") up, those
    of other libraries from warning up.

    process: prefix of every message, if several processes of one kind log. format: "text" or "json". Call this once at
    process start, never from a library. Start uvicorn with log_config=None, or it reinstalls its own handlers.
    """
    handler = logging.StreamHandler(sys.stderr)
    if format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        prefix = f"{process}: " if process else ""
        line = f"%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] {prefix}%(message)s"
        handler.setFormatter(TextFormatter(line, datefmt="%m-%d %H:%M:%S"))
    number = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    held = [record for before in root.handlers if isinstance(before, HeldRecords) for record in before.records]
    root.handlers = [handler]
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("serve_llm").setLevel(number)
    for name in _UVICORN:
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
        logger.setLevel(logging.NOTSET if name != "uvicorn" else number)
    for record in held:
        if logging.getLogger(record.name).isEnabledFor(record.levelno):
            root.handle(record)


class HeldRecords(logging.Handler):
    """Buffers records that are logged before the options determine the log format."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def hold_records(argv: Sequence[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Buffer records while the options are parsed; the next `configure` writes them. If parsing fails, logging is
    configured with the format that the command line or the environment asks for."""
    logging.getLogger().handlers = [HeldRecords()]
    try:
        yield
    except ServeError:
        configure("info", format=_find_format(argv, environ))
        raise


def _find_format(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    given = [environ.get("SERVE_LLM_LOG_FORMAT", "")]
    for argument, following in itertools.pairwise([*argv, ""]):
        name, _, value = argument.partition("=")
        if name == "--log-format":
            given.append(value or following)
    return "json" if given[-1].lower() == "json" else "text"


def read_format() -> str:
    """The log format of this process, to pass on to child processes."""
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
    return "json" if is_json else "text"


def write_final_error(error: Exception) -> None:
    """Write the error that terminates the process to stderr, in the log format. Raises OSError."""
    line = f"serve-llm: {error}"
    if read_format() == "json":
        record = logging.LogRecord("serve_llm", logging.ERROR, __file__, 0, str(error), None, None)
        line = JsonFormatter("").format(record)
    sys.stderr.write(line + "\n")


# What every record has. Other attributes were given by `extra`, or begin with an underscore and are a library's own, as
# Ray's are.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class TextFormatter(logging.Formatter):
    """One line per record, followed by trace_id and span_id if it belongs to a traced request."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        current = CURRENT_REQUEST.get()
        if current is None:
            return line
        return line + "".join(f" {name}={value}" for name, value in current.describe_span().items())


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time (UTC), level, logger, file, line, process, request_id, trace_id, span_id,
    message, what `extra` added, and exception."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "file": record.filename,
            "line": record.lineno,
        }
        if self._process:
            fields["process"] = self._process
        if (current := CURRENT_REQUEST.get()) is not None:
            fields["request_id"] = current.request_id
            fields |= current.describe_span()
        fields["message"] = record.getMessage()
        given = vars(record).items()
        fields |= {name: value for name, value in given if name not in _STANDARD and not name.startswith("_")}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)
