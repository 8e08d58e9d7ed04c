"""Which adapters a rank holds: those in its slots, and others in host memory, of which the oldest are forgotten."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class AdapterMemory(Generic[Kept]):
    """The engine has one for ranks on other hosts, and so knows what they hold: all go through the same steps."""

    def __init__(self, max_kept: int) -> None:
        """max_kept: adapters in host memory, those in slots included; those in slots are kept in any case."""
        self._max_kept = max_kept
        self._digests: dict[int, str] = {}  # by slot
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # by digest, the latest last

    def is_in_slot(self, digest: str, slot: int) -> bool:
        return self._digests.get(slot) == digest

    def find(self, digest: str) -> Kept | None:
        """What is kept of an adapter."""
        return self._kept.get(digest)

    def clear(self, slot: int) -> None:
        """The slot is about to get another adapter."""
        self._digests.pop(slot, None)

    def put(self, digest: str, slot: int, kept: Kept) -> None:
        """The adapter is in the slot from now on. Forget the least recently used ones that are in none."""
        self._digests[slot] = digest
        self._kept[digest] = kept
        self._kept.move_to_end(digest)
        in_use = set(self._digests.values())
        others = [other for other in self._kept if other not in in_use]
        for other in others[: max(0, len(self._kept) - self._max_kept)]:
            del self._kept[other]
