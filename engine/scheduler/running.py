"""The running sequences: their request indices, their blocks, and which of them is preempted."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

from serve_llm.common.types import SchedulerStats
from serve_llm.engine.scheduler.adapter_slots import AdapterSlots
from serve_llm.engine.scheduler.block_pool import BlockPool
from serve_llm.engine.scheduler.policy import WaitingQueue
from serve_llm.engine.scheduler.prefix_cache import PrefixCache
from serve_llm.engine.scheduler.sequence import KVCacheSpec, Sequence, max_blocks


class RunningSequences:
    """Takes sequences from the queue, and returns preempted ones to it."""

    def __init__(
        self,
        groups: Items[KVCacheSpec],
        pool: BlockPool,
        prefix_cache: PrefixCache,
        adapters: AdapterSlots,
        waiting: WaitingQueue,
        stats: SchedulerStats,
        *,
        max_num_seqs: int,
        max_chunk: int,
    ) -> None:
        """max_chunk: most tokens of one sequence in one step. stats: where admissions and preemptions are counted."""
        self.by_index: dict[int, Sequence] = {}  # by request index, in order of admission
        self._groups = groups
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._adapters = adapters
        self._waiting = waiting
        self._stats = stats
        self._max_chunk = max_chunk
        self._free_indices = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.by_index)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of admission."""
        return iter(self.by_index.values())

    @property
    def is_full(self) -> bool:
        return not self._free_indices

    def has_room(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether there are enough blocks for all tokens of a waiting sequence, of which `num_cached` are cached."""
        return self._can_hold(sequence, self._prefix_cache.tables(sequence, num_cached))

    def _can_hold(self, sequence: Sequence, cached: Items[Items[int]]) -> bool:
        """cached: tables of its cached prefix."""
        num_needed = sum(max_blocks(group, len(sequence.token_ids), self._max_chunk) for group in self._groups)
        return num_needed - self._prefix_cache.count_shared(cached) <= self._pool.num_free

    def has_blocks(self, sequence: Sequence, count: int) -> bool:
        """Whether there are enough blocks for the next `count` tokens without preemption."""
        return sum(sequence.missing_blocks(count)) <= self._pool.num_free

    def admit(self, sequence: Sequence, num_cached: int, now: float) -> bool:
        """Give a waiting sequence an index and its cached prefix, if there are enough blocks for all its tokens so
        far."""
        cached = self._prefix_cache.tables(sequence, num_cached)
        if not self._can_hold(sequence, cached):
            return False
        self._prefix_cache.acquire(sequence, cached)
        sequence.add_blocks(cached)
        is_first_admission = sequence.cached_tokens is None  # a tenant does not pay for recomputation
        self._waiting.admit(sequence, len(sequence.token_ids) - num_cached if is_first_admission else 0)
        sequence.req_index = self._free_indices.pop()
        self.by_index[sequence.req_index] = sequence
        self._adapters.acquire(sequence)
        sequence.num_computed = num_cached
        sequence.num_scheduled = num_cached
        if is_first_admission:
            sequence.cached_tokens = num_cached
            sequence.queued_seconds = now - sequence.arrived_at
            self._stats.prefix_cache_queries += sequence.num_prompt
            self._stats.prefix_cache_hits += num_cached
        self._prefix_cache.begin(sequence)
        return True

    def allocate(self, sequence: Sequence, count: int) -> bool:
        """Append blocks for the next `count` tokens. If necessary, preempt the last sequence of a batch, or else the
        last one.

        Returns False if there are no blocks: the sequence itself was preempted, or the victim is still in flight.
        """
        if sequence.num_scheduled + count <= sequence.num_allocated:
            return True
        missing = sequence.missing_blocks(count)
        while sum(missing) > self._pool.num_free:
            latest_first = list(reversed(self.by_index.values()))
            victim = next((one for one in latest_first if one.is_of_batch), latest_first[0])
            if victim.is_in_flight:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.add_blocks([[self._pool.allocate() for _ in range(number)] for number in missing])
        return True

    def preempt_for_waiting(self) -> set[int]:
        """Preempt the last sequence of a batch that holds resources which the first waiting sequence needs.

        While it is in flight, returns its index instead. It must then not be scheduled, so that it can be preempted
        later.
        """
        first = next(iter(self._waiting), None)
        if first is None or first.is_of_batch:
            return set()
        victims = [sequence for sequence in self if sequence.is_of_batch]
        num_cached = self._prefix_cache.find(first)
        if self._free_indices and self._adapters.has_room(first) and self.has_room(first, num_cached):
            is_computed_by_another = self._prefix_cache.is_being_computed(first, num_cached)
            prefills = [sequence for sequence in victims if not sequence.is_decoding]
            victims = [sequence for sequence in prefills if is_computed_by_another or sequence.has_long_prompt]
        if not victims:
            return set()
        victim = victims[-1]
        if victim.is_in_flight:
            assert victim.req_index is not None
            return {victim.req_index}
        self._preempt(victim)
        return set()

    def preempt_for_adapter(self) -> set[int]:
        """Preempt the sequences of an adapter whose turn is over and whose slot is needed; see `AdapterSlots`.

        While one of them is in flight, returns their indices instead. They must then not be scheduled.
        """
        if not self._adapters.are_short:
            return set()
        first = self._adapters.claim(self._list_without_adapter())
        if first is None or not self.has_room(first, self._prefix_cache.find(first)):
            return set()
        users = self._adapters.close(first, self)
        if any(sequence.is_in_flight for sequence in users):
            return {sequence.req_index for sequence in users if sequence.req_index is not None}
        for sequence in users:
            self._preempt(sequence)
        return set()

    def _list_without_adapter(self) -> list[Sequence]:
        """List the waiting sequences that need only a slot for their adapter, or precede those that need more."""
        found = []
        is_checked = False
        for sequence in self._waiting:
            if self._adapters.needs_load(sequence):
                found.append(sequence)
            elif self.is_full:
                break
            elif not is_checked:
                is_checked = True
                if not self.has_room(sequence, self._prefix_cache.find(sequence)):
                    break
        return found

    def _preempt(self, sequence: Sequence) -> None:
        self.requeue(sequence)
        sequence.num_preemptions += 1
        self._stats.num_preemptions += 1

    def requeue(self, sequence: Sequence) -> None:
        """Move a running sequence back to the queue; it will be recomputed."""
        self.remove(sequence)
        sequence.forget_progress()
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Release the index and all blocks, the last blocks first, because the start of a prefix is the most useful."""
        assert sequence.req_index is not None
        self._prefix_cache.end(sequence)
        for block in sequence.drop_blocks():
            self._pool.release(block)
        del self.by_index[sequence.req_index]
        self._free_indices.append(sequence.req_index)
        sequence.req_index = None
        self._adapters.release(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, indices and slots are conserved."""
        self._pool.check_integrity([block for sequence in self for block in sequence.held_blocks])
        assert [one.req_index for one in self] == list(self.by_index), "a running sequence has another index"
        every_index = [*self._free_indices, *self.by_index]
        assert sorted(every_index) == list(range(len(every_index))), "a request index is lost"
        self._prefix_cache.check_integrity(list(self))
        self._adapters.check_integrity(self)
