"""The adapters that the workers hold: a fixed number of slots; the least recently used one is replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from serve_llm.engine.scheduler.sequence import Sequence


class AdapterSlots:
    """The scheduler acquires a slot for a sequence when it admits it, and releases it with the sequence's index."""

    def __init__(self, num_slots: int) -> None:
        self._digests = [""] * num_slots  # "": empty
        self._num_users = [0] * num_slots
        self._by_age = list(range(num_slots))  # least recently used first

    def list_admissible(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """Those that need no slot or find one, judged when it is their turn. Once one finds none, no later one may take
        the slot that it waits for."""
        is_slot_awaited = False
        for sequence in waiting:
            if sequence.request.adapter is not None:
                is_slot_awaited = is_slot_awaited or not self.has_room(sequence)
                if is_slot_awaited:
                    continue
            yield sequence

    def has_room(self, sequence: Sequence) -> bool:
        digest = sequence.adapter_digest
        return not digest or digest in self._digests or 0 in self._num_users

    def acquire(self, sequence: Sequence) -> None:
        """Give the sequence the slot of its adapter, if it has one, or else a slot that nobody uses, where the workers
        load the adapter."""
        digest = sequence.adapter_digest
        if not digest:
            return
        if digest in self._digests:
            slot = self._digests.index(digest)
        else:
            slot = next(slot for slot in self._by_age if self._num_users[slot] == 0)
            self._digests[slot] = digest
        self._num_users[slot] += 1
        self._by_age.remove(slot)
        self._by_age.append(slot)
        sequence.adapter_slot = slot

    def release(self, sequence: Sequence) -> None:
        if sequence.adapter_slot is not None:
            self._num_users[sequence.adapter_slot] -= 1
            sequence.adapter_slot = None

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the slots in use are those of running sequences."""
        counts = Counter(sequence.adapter_slot for sequence in running)
        expected = [counts[slot] for slot in range(len(self._num_users))]
        assert self._num_users == expected, "slots of adapters are not conserved"
