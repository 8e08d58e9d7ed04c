"""Which ranks have failed, and which failure is the first cause."""

from __future__ import annotations

from serve_llm.common.errors import ASK_LOG, HINTS, HostLost, PeerLost, RankFailed, ServeError
from serve_llm.common.messages import Failed


class RankFailures:
    """The failures of one executor's ranks, in the order in which they were noticed."""

    def __init__(self) -> None:
        self._errors: dict[int, ServeError] = {}  # by rank
        self._unexplained: set[int] = set()  # ranks whose process ended, without a Failed message so far

    def __bool__(self) -> bool:
        return bool(self._errors)

    def add_message(self, rank: int, failed: Failed, where: str, phase: str) -> None:
        """Record what a rank sent. It replaces a failure that is known only from how the process ended.

        where: the rank, for messages to people. phase: as in `messages.PHASES`."""
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
        """Record an error whose message needs no addition. The first failure of a rank stays."""
        self._errors.setdefault(rank, error)

    def is_complete(self, size: int) -> bool:
        """Whether all of `size` ranks have failed with an explanation."""
        return len(self._errors) >= size and not self._unexplained

    def find_causes(self) -> list[ServeError]:
        """All failures except lost peers, which are consequences of another failure."""
        return [error for error in self._errors.values() if not isinstance(error, PeerLost)]

    def first_cause(self) -> ServeError:
        """The earliest cause, or the earliest lost peer if nothing else is known."""
        return (self.find_causes() or list(self._errors.values()))[0]
