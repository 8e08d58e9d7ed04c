"""Everything that the server stores."""

from __future__ import annotations

from typing import NamedTuple

from serve_llm.common.options.schema import Options
from serve_llm.server.batches.store import BatchStore
from serve_llm.server.storage.database import MEMORY
from serve_llm.server.storage.responses import ResponseStore


class Storage(NamedTuple):
    """The stores in use. Call `close` at the end."""

    responses: ResponseStore | None  # None: responses are not stored
    batches: BatchStore | None  # None: neither files nor batches are stored

    @classmethod
    def open(cls, options: Options) -> Storage:
        """Raises OptionError."""
        limits = options.limits
        path = MEMORY if options.responses_store == "memory" else options.responses_store
        responses = None if path == "off" else ResponseStore(path, limits)
        batches = None if options.batches_dir is None else BatchStore(options.batches_dir, limits)
        return cls(responses, batches)

    def close(self) -> None:
        """Finish pending writes. Idempotent."""
        if self.responses is not None:
            self.responses.close()
        if self.batches is not None:
            self.batches.close()
