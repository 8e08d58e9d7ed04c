"""The adapters that the workers hold, in a fixed number of slots. The least recently used one is replaced.

While running sequences use all slots, adapters take turns: the slot of the adapter whose sequences have run longest is
closed, and the adapter that has waited longest gets it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from serve_llm.engine.scheduler.sequence import Sequence


class _Claim(NamedTuple):
    """An adapter without a slot that waiting sequences need."""

    priority: int  # the first sequence's
    first_step: int  # step from which on a slot may be closed for it


class AdapterSlots:
    """The scheduler acquires a slot when it admits a sequence, and releases it together with the sequence's index."""

    # Number of steps in which an adapter's sequences get ids before its slot may be closed, and for which an adapter
    # whose slot was closed waits for a free one before another is closed for it.
    TURN = 32
    MAX_LOADS = 2  # adapters that a step loads at most; running sequences wait for them

    def __init__(self, num_slots: int) -> None:
        self._digests = [""] * num_slots  # "": empty
        self._num_users = [0] * num_slots
        self._num_steps = [0] * num_slots  # the turn's length so far
        self._by_age = list(range(num_slots))  # least recently used first
        self._claims: dict[str, _Claim] = {}  # by digest, longest wait first
        self._closed: int | None = None  # a slot that accepts no more sequences, because another adapter waits for it
        self._step = 0
        self.num_deferred = 0  # waiting sequences without a slot since `list_admissible` began
        self._num_loads = 0  # adapters that the step being scheduled loads

    def list_admissible(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yield the waiting sequences that need no slot or can get one, which is decided when each is reached. A free
        slot goes to the adapter that has waited longest; if none of its sequences can be admitted now, another adapter
        may take it."""
        deferred: list[Sequence] = []
        self.num_deferred = 0
        first = set(self._list_claims()[: self._num_users.count(0)])
        for sequence in waiting:
            if sequence.is_of_batch and deferred:
                yield from self._list_ready(deferred)
                deferred.clear()
            digest = sequence.adapter_digest
            if self.has_room(sequence) and (digest in first or digest not in self._claims):
                yield sequence
            else:
                deferred.append(sequence)
                self.num_deferred += 1
        yield from self._list_ready(deferred)

    def _list_ready(self, deferred: Iterable[Sequence]) -> Iterator[Sequence]:
        for sequence in filter(self.has_room, deferred):
            self.num_deferred -= 1
            yield sequence

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a sequence could be admitted to the next step."""
        digest = sequence.adapter_digest
        if not digest:
            return True
        if digest in self._digests:
            return self._digests.index(digest) != self._closed
        return 0 in self._num_users and self._num_loads < self.MAX_LOADS

    def needs_load(self, sequence: Sequence) -> bool:
        """Whether the sequence needs an adapter that the workers do not hold."""
        digest = sequence.adapter_digest
        return bool(digest) and digest not in self._digests

    @property
    def are_short(self) -> bool:
        """Whether no slot is free, or adapters are already waiting for the free ones."""
        return bool(self._claims) or self._are_all_in_use

    @property
    def _are_all_in_use(self) -> bool:
        """False without slots."""
        return bool(self._num_users) and 0 not in self._num_users

    def claim(self, without_adapter: Iterable[Sequence]) -> Sequence | None:
        """Record which adapters have waiting sequences but no slot. If no slot is free, returns the sequence for which
        one must be closed: the first one of the adapter that has waited longest."""
        self._closed = None
        firsts: dict[str, Sequence] = {}
        for sequence in without_adapter:
            first = firsts.setdefault(sequence.adapter_digest, sequence)
            if sequence.request.priority < first.request.priority:
                firsts[sequence.adapter_digest] = sequence
        claims = {digest: _Claim(first.request.priority, 0) for digest, first in firsts.items()}
        for digest, claim in self._claims.items():
            if digest in claims:
                claims[digest] = claims[digest]._replace(first_step=claim.first_step)
        self._claims = {digest: claims.pop(digest) for digest in self._claims if digest in claims} | claims
        if not self._are_all_in_use:
            return None
        due = [digest for digest in self._list_claims() if self._claims[digest].first_step <= self._step]
        return firsts[due[0]] if due else None

    def _list_claims(self) -> list[str]:
        """Order by priority, then by waiting time."""
        return sorted(self._claims, key=lambda digest: self._claims[digest].priority)

    def close(self, first: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        """Close a slot for the waiting sequence `first`. Returns its users, which must be preempted; empty while no
        turn is over, or while its users compute prompts."""
        users: dict[int, list[Sequence]] = {}
        for sequence in running:
            if sequence.adapter_slot is not None:
                users.setdefault(sequence.adapter_slot, []).append(sequence)
        if not first.is_of_batch:
            for slot, using in users.items():
                if all(one.is_of_batch for one in using):
                    self._closed = slot
                    return using
        over = [slot for slot, using in users.items() if self._is_turn_over(slot, using, first.request.priority)]
        if not over:
            return []
        ready = [slot for slot in over if all(one.num_unscheduled <= 1 for one in users[slot])]
        self._closed = max(ready or over, key=self._num_steps.__getitem__)
        if not ready:
            return []
        chosen = users[self._closed]
        priority = min(one.request.priority for one in chosen)
        self._claims[self._digests[self._closed]] = _Claim(priority, self._step + self.TURN)
        return chosen

    def _is_turn_over(self, slot: int, users: Iterable[Sequence], priority: int) -> bool:
        """Whether a waiting sequence of this priority may get the slot."""
        return self._num_steps[slot] >= self.TURN and all(one.request.priority >= priority for one in users)

    def acquire(self, sequence: Sequence) -> None:
        """Give the sequence its adapter's slot or else an unused one, into which the workers load the adapter."""
        digest = sequence.adapter_digest
        if not digest:
            return
        if digest in self._digests:
            slot = self._digests.index(digest)
        else:
            slot = next(slot for slot in self._by_age if self._num_users[slot] == 0)
            self._digests[slot] = digest
            self._num_steps[slot] = 0
            self._claims.pop(digest, None)
            self._num_loads += 1
            if slot == self._closed:
                self._closed = None
        if self._num_users[slot] == 0 and not self._claims:
            self._num_steps[slot] = 0
        self._num_users[slot] += 1
        self._by_age.remove(slot)
        self._by_age.append(slot)
        sequence.adapter_slot = slot

    def release(self, sequence: Sequence) -> None:
        if sequence.adapter_slot is not None:
            self._num_users[sequence.adapter_slot] -= 1
            self._num_steps[sequence.adapter_slot] += 1  # so that requests that end immediately end a turn too
            sequence.adapter_slot = None

    def count_step(self, sampled: Iterable[Sequence]) -> None:
        """Count a scheduled step in which these sequences get ids."""
        self._step += 1
        self._num_loads = 0
        if not self._num_users:
            return
        for slot in {sequence.adapter_slot for sequence in sampled}:
            if slot is not None:
                self._num_steps[slot] += 1

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the slots in use are those of running sequences."""
        counts = Counter(sequence.adapter_slot for sequence in running)
        expected = [counts[slot] for slot in range(len(self._num_users))]
        assert self._num_users == expected, "slots of adapters are not conserved"
