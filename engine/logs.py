"""Log lines of every process, in one form that vLLM users know: `INFO 07-23 13:56:04 [memory.py:75] message`.

Called once at the start of a process that we own (server, engine); a library never configures logging. Modules log
through `logging.getLogger(__name__)`. Standard library only.
"""

from __future__ import annotations

import logging
import sys

_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


def configure(level: str, who: str = "") -> None:
    """Sends all logging of this process to stderr, our own and uvicorn's from `level` ("debug", "info", "warning",
    "error") up, other libraries' from warning up: their progress is noise to whoever runs a server.

    who: stands in front of every message, where several processes of one kind write.
    uvicorn must be started with log_config=None, else it puts its own handlers back.
    """
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] {who and who + ': '}%(message)s"
    handler.setFormatter(logging.Formatter(line, datefmt="%m-%d %H:%M:%S"))
    number = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(number, logging.WARNING))
    logging.getLogger("serve_llm").setLevel(number)
    for name in _UVICORN:
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
        logger.setLevel(logging.NOTSET if name != "uvicorn" else number)
