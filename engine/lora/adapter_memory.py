"""Which adapters a rank holds: in its slots and in host memory, where the least recently used are dropped."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class AdapterMemory(Generic[Kept]):
    """The engine keeps one on behalf of ranks on other hosts, and so knows what they hold: all see the same steps."""

    def __init__(self, max_kept: int) -> None:
        """max_kept: limit on the adapters in host memory, including those in slots; those in slots are always kept."""
        self._max_kept = max_kept
        self._digests: dict[int, str] = {}  # by slot
        self._kept: OrderedDict[str, Kept] = OrderedDict()  # by digest, most recent last

    def is_in_slot(self, digest: str, slot: int) -> bool:
        return self._digests.get(slot) == digest

    def find(self, digest: str) -> Kept | None:
        """Return what is kept of an adapter."""
        return self._kept.get(digest)

    def clear(self, slot: int) -> None:
        """Clear the slot, which is about to get another adapter."""
        self._digests.pop(slot, None)

    def put(self, digest: str, slot: int, kept: Kept) -> None:
        """Record that the adapter is in the slot. Drop the least recently used adapters that are in no slot."""
        self._digests[slot] = digest
        self._kept[digest] = kept
        self._kept.move_to_end(digest)
        in_use = set(self._digests.values())
        others = [other for other in self._kept if other not in in_use]
        for other in others[: max(0, len(self._kept) - self._max_kept)]:
            del self._kept[other]
