"""Requests with adapters on their way to the scheduler: the adapter's files must still be what the server has checked.

Files are read again only if they were touched since, in a thread, so that running requests do not wait.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from serve_llm.common.adapter_files import Stamp, read_stamp
from serve_llm.common.errors import AdapterError
from serve_llm.common.types import Adapter, FinishReason, Output, Request
from serve_llm.engine.lora.files import compute_digest

WAIT_SECONDS = 0.01  # for a check, when there is nothing else to do: messages that arrive wait as long


class AdapterArrivals:
    """To be used in the engine's thread."""

    def __init__(self) -> None:
        self._known: dict[Adapter, Stamp] = {}  # files that had the adapter's digest
        self._checking: dict[int, tuple[Request, Future[str]]] = {}  # by request id; the result is an error or ""
        self._threads = ThreadPoolExecutor(1, "adapters")

    @property
    def is_checking(self) -> bool:
        return bool(self._checking)

    def begin(self, request: Request) -> None:
        """Have a request's adapter checked; `take_checked` returns the request then."""
        assert request.adapter is not None
        self._checking[request.id] = (request, self._threads.submit(self._find_error, request.adapter))

    def abort(self, request_id: int) -> None:
        self._checking.pop(request_id, None)

    def take_checked(self, is_idle: bool) -> tuple[list[Request], list[Output]]:
        """Requests whose adapters are as they were, and the final outputs of the others.

        is_idle: there is nothing else to do, so that it may wait for a moment.
        """
        if is_idle:
            wait([future for _, future in self._checking.values()], WAIT_SECONDS, FIRST_COMPLETED)
        ready: list[Request] = []
        failed: list[Output] = []
        for request, future in list(self._checking.values()):
            if not future.done():
                continue
            del self._checking[request.id]
            if error := future.result():
                failed.append(Output(id=request.id, token_ids=[], finish_reason=FinishReason.ERROR, error=error))
            else:
                ready.append(request)
        return ready, failed

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
