"""Log the progress of long operations if no terminal shows a progress bar: a container's log must not be silent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

TENTH_SECONDS = 2.0  # minimum time between two lines
SILENCE_SECONDS = 10.0  # without a line for this long, log between two tenths too


class ProgressLog:
    """Logs the progress of one operation. Operations shorter than TENTH_SECONDS are not logged."""

    def __init__(self, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        """title: of each line, such as "Loading weights"."""
        self._title = title
        self._clock = clock
        self._logged_at = clock()
        self._tenth = 0

    def report_share(self, done: int, total: int) -> None:
        """Log the completed share at every tenth, and after every SILENCE_SECONDS."""
        silence = self._clock() - self._logged_at
        tenth = 10 * done // max(total, 1)
        if silence < TENTH_SECONDS or (tenth == self._tenth and silence < SILENCE_SECONDS):
            return
        self._tenth = tenth
        self._write(f"{done / total:.0%}")

    def report_bytes(self, done: int) -> None:
        """Log the completed amount after every SILENCE_SECONDS."""
        if self._clock() - self._logged_at >= SILENCE_SECONDS:
            self._write(f"{done / 2**30:.2f} GiB so far")

    def _write(self, amount: str) -> None:
        self._logged_at = self._clock()
        logger.info("%s: %s", self._title, amount)


def make_download_log(title: str) -> type[Any]:
    """Make a class for `huggingface_hub.snapshot_download(tqdm_class=...)` that logs progress instead of drawing bars.

    The Hub's client counts bytes that arrive and bytes that are written in bars of their own; the larger number counts.
    """
    from huggingface_hub.utils.tqdm import tqdm as hub_bar

    log = ProgressLog(title)

    class LoggedBar(hub_bar):
        def __init__(self, *args: object, unit: str = "it", **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": True})  # type: ignore[no-untyped-call]
            self._counts_bytes = unit == "B"

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self._counts_bytes:
                log.report_bytes(int(self.n))

    return LoggedBar
