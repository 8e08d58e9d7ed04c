"""Check, before a request is scheduled, that its adapter's files have not changed since the server checked them.

Files are read again only if they were touched since, and in a thread, so that running requests do not wait.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from serve_llm.common.adapter_files import Stamp, read_stamp
from serve_llm.common.errors import AdapterError
from serve_llm.common.types import Adapter
from serve_llm.engine.lora.hashed_files import compute_digest

MAX_KNOWN = 1024  # adapters whose files need not be read again


class AdapterChecker:
    """Use it only in the engine's thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[Adapter, Stamp] = OrderedDict()  # files with the adapter's digest, most recent last
        self._threads = ThreadPoolExecutor(1, "adapters")

    def check(self, adapter: Adapter) -> Future[str]:
        """Start to check an adapter. The result is an error for users, or "" if its files are unchanged."""
        return self._threads.submit(self._find_error, adapter)

    def _find_error(self, adapter: Adapter) -> str:
        directory = Path(adapter.directory)
        try:
            stamp = read_stamp(directory)
            if self._known.get(adapter) == stamp:
                self._known.move_to_end(adapter)
                return ""
            if compute_digest(directory) == adapter.digest:
                self._known[adapter] = stamp
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
                return ""
        except (OSError, AdapterError) as error:
            return f"the adapter {adapter.name} cannot be loaded again: {error}"
        return f"the files of the adapter {adapter.name} have changed since it was loaded; load it again"
