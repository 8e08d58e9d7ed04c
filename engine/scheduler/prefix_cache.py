"""The prefix cache: which blocks hold the start of a sequence, and which prefix blocks are being computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import takewhile

from serve_llm.engine.scheduler.block_pool import BlockKey, BlockPool
from serve_llm.engine.scheduler.kv_events import KVEventRecorder
from serve_llm.engine.scheduler.offload import OffloadManager
from serve_llm.engine.scheduler.output import BlockCopy
from serve_llm.engine.scheduler.sequence import RELEASED, KVCacheSpec, Sequence, find_hit_step
from serve_llm.engine.scheduler.state_snapshots import StateSnapshots

OFFLOADED = -2  # a block table entry whose block is in host memory


class PrefixCache:
    """The scheduler calls:

    must_wait(sequence, hit)         before admission
    acquire(sequence, tables)        on admission, for the tables of its hit
    begin(sequence)                  on admission, with num_computed set to the cached tokens
    cache_blocks(sequence, start)    when the tokens from `start` to num_computed are in their blocks
    end(sequence)                    when the sequence frees its blocks, even if it is not fully computed
    """

    def __init__(
        self,
        groups: Items[KVCacheSpec],
        pool: BlockPool,
        enabled: bool,
        offload: OffloadManager | None = None,
        recorder: KVEventRecorder | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        """offload: receives evicted blocks. recorder: receives the events. snapshots: of the states of models that have
        them. All need `enabled`."""
        self._groups = groups
        self._pool = pool
        self._offload = offload
        self._recorder = recorder
        self._snapshots = snapshots
        if offload is not None or recorder is not None or snapshots is not None:
            pool.on_eviction = self._on_eviction
        self._enabled = enabled and bool(groups)  # encoders have no KV
        self._smallest_block = min((group.block_size for group in groups), default=1)
        self._hit_step = find_hit_step(groups)
        self._blocks_per_token = sum(1 / group.block_size for group in groups)
        self._pending: Counter[BlockKey] = Counter()  # prefix blocks that running sequences are going to compute

    def _on_eviction(self, block: int, key: BlockKey) -> None:
        if self._recorder is not None:
            self._recorder.remove(key)
        if self._offload is not None:
            self._offload.save(block, key)
        if self._snapshots is not None and key[0] == 0:
            self._snapshots.drop(key[1])

    def find(self, sequence: Sequence) -> int:
        """Find the number of tokens in the longest prefix on the device or in host memory. Leaves at least one token to
        compute, from which to sample, and all tokens whose log-probabilities are still needed."""
        if self._offload is not None and self._offload.is_memory_faster(self._blocks_per_token):
            return self._find(sequence, self._is_in_memory)
        return self._find(sequence, self._pool.is_cached)

    def _is_in_memory(self, key: BlockKey) -> bool:
        return self._pool.find(key) is not None or (self._offload is not None and self._offload.has(key))

    def _is_in_reach(self, key: BlockKey) -> bool:
        return self._pool.find(key) is not None or (self._offload is not None and self._offload.is_in_reach(key))

    def _find(self, sequence: Sequence, is_known: Callable[[BlockKey], bool]) -> int:
        if not self._enabled or sequence.needs_whole_prompt:
            return 0
        hit = self._last_boundary(sequence)
        for index, group in enumerate(self._groups):
            if group.window is None:
                known = 0
                for block_hash in sequence.block_hashes(group.block_size, hit // group.block_size):
                    if not is_known((index, block_hash)):
                        break
                    known += group.block_size
                hit = known // self._hit_step * self._hit_step
        windows = [index for index, group in enumerate(self._groups) if group.window is not None]
        hit = self._find_state(sequence, hit)
        while hit and not all(is_known(key) for index in windows for key in self._keys(sequence, index, hit)):
            hit = self._find_state(sequence, hit - self._hit_step)
        return hit

    def _find_state(self, sequence: Sequence, hit: int) -> int:
        """Find the longest prefix of at most `hit` tokens with a snapshot, if the model has states."""
        return hit if self._snapshots is None else self._snapshots.find(sequence, hit)

    def _last_boundary(self, sequence: Sequence) -> int:
        return (sequence.num_delivered - 1) // self._hit_step * self._hit_step

    def _first_block(self, index: int, hit: int) -> int:
        """The first block that a group needs to continue after `hit` tokens."""
        group = self._groups[index]
        return 0 if group.window is None else max(0, (hit - group.window + 1) // group.block_size)

    def _keys(self, sequence: Sequence, index: int, hit: int) -> list[BlockKey]:
        """Keys of the blocks that a group needs to continue after `hit` tokens."""
        size = self._groups[index].block_size
        hashes = sequence.block_hashes(size, hit // size)
        return [(index, block_hash) for block_hash in hashes[self._first_block(index, hit) :]]

    def tables(self, sequence: Sequence, hit: int) -> list[list[int]]:
        """Look up each group's block table for the first `hit` tokens, as returned by `find`. OFFLOADED marks blocks
        that are only in host memory."""
        tables = []
        for index, group in enumerate(self._groups):
            num_blocks = hit // group.block_size
            table = [RELEASED] * min(self._first_block(index, hit), num_blocks)
            for key in self._keys(sequence, index, hit):
                block = self._pool.find(key)
                assert block is not None or self._is_in_memory(key), "the prefix is no longer cached"
                table.append(OFFLOADED if block is None else block)
            tables.append(table)
        return tables

    def count_shared(self, tables: Items[Items[int]]) -> int:
        """Count blocks of the tables that other sequences hold, which take no free block."""
        return sum(block >= 0 and not self._pool.is_free(block) for table in tables for block in table)

    def acquire(self, sequence: Sequence, tables: Items[list[int]]) -> None:
        """Take references to the blocks of the tables. Offloaded blocks are copied to device blocks, which replace them
        in the tables. The caller has checked that enough blocks are free."""
        places: list[tuple[int, int]] = []
        for index, table in enumerate(tables):
            for number, block in enumerate(table):
                if block >= 0:
                    self._pool.acquire(block)  # first all of these, so that none is reused for an offloaded block
                elif block == OFFLOADED:
                    places.append((index, number))
        if not places or self._offload is None:
            return
        hashes = [
            sequence.block_hashes(group.block_size, len(tables[index])) for index, group in enumerate(self._groups)
        ]
        keys = [(index, hashes[index][number]) for index, number in places]
        pinned = self._offload.pin(keys)
        for (index, number), (key, slot) in zip(places, pinned, strict=True):
            block = self._pool.allocate()
            self._offload.load(slot, block)
            self._pool.cache_block(block, key)
            tables[index][number] = block
        self._offload.unpin(pinned)
        self._record(sequence, places)

    def take_copies(self) -> list[BlockCopy]:
        """Take the copies of offloaded blocks for the step just scheduled. Call this for each executed step."""
        return [] if self._offload is None else self._offload.take_copies()

    def finish_step(self) -> None:
        """Called when the oldest step in flight has a result."""
        if self._offload is not None:
            self._offload.finish_step()

    def _record(self, sequence: Sequence, places: Items[tuple[int, int]]) -> None:
        """Record newly cached blocks by group and number, merging consecutive ones."""
        if self._recorder is None:
            return
        start = 0
        for end, (index, number) in enumerate(places, start=1):
            if end == len(places) or places[end] != (index, number + 1):
                self._recorder.store(sequence, index, range(places[start][1], number + 1))
                start = end

    def must_wait(self, sequence: Sequence, hit: int) -> bool:
        """Whether waiting saves work, because a running sequence will compute the block after the hit or the store is
        reading it. Starts reads from the store, once each time the sequence waits for admission."""
        if self.is_being_computed(sequence, hit):
            return True
        offload = self._offload
        if not self._enabled or sequence.needs_whole_prompt or offload is None or offload.store is None:
            return False
        if sequence.stored_keys is None:
            sequence.stored_keys = self._start_reads(offload, sequence, hit)
        return offload.is_reading(sequence.stored_keys)

    def _start_reads(self, offload: OffloadManager, sequence: Sequence, hit: int) -> list[BlockKey]:
        """Have the store read blocks that continue the hit. Returns those being read."""
        if not offload.is_memory_faster(self._blocks_per_token):
            return []
        longest = self._find(sequence, self._is_in_reach)
        max_tokens = int(offload.max_reads / self._blocks_per_token)
        longest = min(longest, (hit + max_tokens) // self._hit_step * self._hit_step)
        if longest <= hit or not offload.is_store_faster(self._blocks_per_token):
            return []
        started: list[BlockKey] = []
        for index in range(len(self._groups)):
            for key in self._keys(sequence, index, longest):
                if self._is_in_memory(key):
                    continue
                if not offload.start_read(key):
                    return started
                started.append(key)
        return started

    def is_being_computed(self, sequence: Sequence, hit: int) -> bool:
        """Whether a running sequence will compute the block after the hit."""
        if not self._enabled or sequence.needs_whole_prompt:
            return False
        if self._snapshots is not None:
            return self._snapshots.will_extend(sequence, hit, self._last_boundary(sequence))
        size = self._groups[0].block_size
        index = hit // size
        if (index + 1) * size > sequence.num_prompt:
            return False
        return self._pending[0, sequence.block_hashes(size, index + 1)[index]] > 0

    def begin(self, sequence: Sequence) -> None:
        if self._snapshots is not None and self._enabled:
            self._snapshots.begin(sequence, self._last_boundary(sequence), self._count_known(sequence))
        self._pending.update(self._to_compute(sequence))

    def _count_known(self, sequence: Sequence) -> int:
        """Count the tokens at the start of a sequence whose blocks of group 0 are cached or being computed."""
        size = self._groups[0].block_size
        hashes = sequence.block_hashes(size, self._last_boundary(sequence) // size)
        keys = [(0, block_hash) for block_hash in hashes]
        known = takewhile(lambda key: self._pool.is_cached(key) or self._pending[key] > 0, keys)
        return size * sum(1 for _ in known)

    def end(self, sequence: Sequence) -> None:
        if self._snapshots is not None:
            self._snapshots.end(sequence)
        self._pending.subtract(self._to_compute(sequence))
        self._pending += Counter()  # drops zero counts

    def _to_compute(self, sequence: Sequence) -> list[BlockKey]:
        """Keys of the prompt blocks of group 0 that a running sequence has yet to compute."""
        if not self._enabled:
            return []
        size = self._groups[0].block_size
        hashes = sequence.block_hashes(size, sequence.num_prompt // size)
        return [(0, key) for key in hashes[sequence.num_computed // size :]]

    def cache_blocks(self, sequence: Sequence, start: int) -> None:
        """Add newly filled blocks to the cache."""
        size = self._smallest_block
        if not self._enabled or start // size == sequence.num_computed // size:
            return
        new: list[tuple[int, int]] = []
        for index, (group, table) in enumerate(zip(self._groups, sequence.block_tables, strict=True)):
            before = start // group.block_size
            after = sequence.num_computed // group.block_size
            hashes = sequence.block_hashes(group.block_size, after)
            for number in range(before, after):
                if table[number] != RELEASED and self._pool.cache_block(table[number], (index, hashes[number])):
                    new.append((index, number))
                if index == 0 and (number + 1) * group.block_size <= sequence.num_prompt:
                    self._pending[0, hashes[number]] -= 1
        self._record(sequence, new)
        if self._snapshots is not None:
            self._snapshots.commit(sequence)

    def check_integrity(self, running: Items[Sequence]) -> None:
        """Raise AssertionError unless the pending blocks are exactly those that running sequences have yet to
        compute."""
        expected = Counter(key for sequence in running for key in self._to_compute(sequence))
        assert +self._pending == expected, "pending prefix blocks differ from those being computed"
        if self._offload is not None:
            self._offload.check_integrity()
        if self._snapshots is not None:
            self._snapshots.check_integrity(running, lambda block_hash: self._pool.is_cached((0, block_hash)))
