"""Checks, before a request is scheduled, that its adapter's files are still what the server has checked.

Files are read again only if they were touched since, in a thread, so that running requests do not wait.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from serve_llm.common.adapter_files import Stamp, read_stamp
from serve_llm.common.errors import AdapterError
from serve_llm.common.types import Adapter
from serve_llm.engine.lora.files import compute_digest


class AdapterChecker:
    """To be used in the engine's thread."""

    def __init__(self) -> None:
        self._known: dict[Adapter, Stamp] = {}  # files that had the adapter's digest
        self._threads = ThreadPoolExecutor(1, "adapters")

    def check(self, adapter: Adapter) -> Future[str]:
        """Begin to check an adapter. The result is an error for users, or "" if its files are as they were."""
        return self._threads.submit(self._find_error, adapter)

    def _find_error(self, adapter: Adapter) -> str:
        directory = Path(adapter.directory)
        try:
            stamp = read_stamp(directory)
            if self._known.get(adapter) == stamp:
                return ""
            if compute_digest(directory) == adapter.digest:
                self._known[adapter] = stamp
                return ""
        except (OSError, AdapterError) as error:
            return f"the adapter {adapter.name} cannot be loaded again: {error}"
        return f"the files of the adapter {adapter.name} have changed since it was loaded; load it again"
