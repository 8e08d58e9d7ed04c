"""Records which ranks have failed, and finds the first cause."""

from __future__ import annotations

from serve_llm.common.errors import ASK_LOG, HINTS, HostLost, PeerLost, RankFailed, ServeError
from serve_llm.common.messages import Failed


class RankFailures:
    """The failures of one executor's ranks, in the order of detection."""

    def __init__(self) -> None:
        self._errors: dict[int, ServeError] = {}  # by rank
        self._unexplained: set[int] = set()  # ranks whose process has ended without a Failed message so far

    def __bool__(self) -> bool:
        return bool(self._errors)

    def add_message(self, rank: int, failed: Failed, where: str, phase: str) -> None:
        """Record the failure that a rank sent. It replaces one that is known only from the end of the process.

        where: name of the rank in messages. phase: as in `messages.PHASES`."""
        if rank not in self._errors or rank in self._unexplained:
            self._unexplained.discard(rank)
            self._errors[rank] = failed.to_exception(RankFailed, prefix=f"{where} failed {phase}: ")

    def add_end(self, rank: int, how: str | HostLost, where: str, phase: str) -> None:
        """Record how a rank's process ended, such as "signal SIGKILL"."""
        if rank not in self._errors:
            kind = HostLost if isinstance(how, HostLost) else RankFailed
            self._errors[rank] = kind(f"{where} died {phase} by {how}; {HINTS.get(str(how), ASK_LOG)}")
            self._unexplained.add(rank)

    def add_error(self, rank: int, error: ServeError) -> None:
        """Record an error with a complete message. The first failure of a rank is kept."""
        self._errors.setdefault(rank, error)

    def is_complete(self, size: int) -> bool:
        """Whether all of `size` ranks have failed with an explanation."""
        return len(self._errors) >= size and not self._unexplained

    def find_causes(self) -> list[ServeError]:
        """The failures except lost peers, which are consequences of another failure."""
        return [error for error in self._errors.values() if not isinstance(error, PeerLost)]

    def first_cause(self) -> ServeError:
        """The earliest cause, or the earliest lost peer if nothing else is known."""
        return (self.find_causes() or list(self._errors.values()))[0]
