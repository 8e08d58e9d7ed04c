"""Cached prefixes: which blocks hold the start of a sequence, and which of them are being computed by another.

Knows blocks and sequences; who is admitted, and when, is the scheduler's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items

from serve_llm.engine.schedule.blocks import BlockKey, BlockPool
from serve_llm.engine.schedule.sequence import RELEASED, GroupLayout, Sequence


class PrefixCache:
    """begin(sequence)          when it is admitted, with num_computed set to what was found
    remember(sequence, start)   when the tokens from `start` to its num_computed are in their blocks
    end(sequence)               when it leaves, however far it is"""

    def __init__(self, groups: Items[GroupLayout], pool: BlockPool, enabled: bool) -> None:
        self._groups = groups
        self._pool = pool
        self._enabled = enabled
        self._hit_step = max(group.block_size for group in groups)  # block sizes are powers of two
        self._pending: Counter[BlockKey] = Counter()  # prefix blocks that running sequences are about to compute

    def find(self, sequence: Sequence) -> int:
        """Longest cached prefix in tokens; at least one token is left to compute, so that there is a next one."""
        if not self._enabled or sequence.wants_prompt_logprobs:
            return 0
        hit = (len(sequence.ids) - 1) // self._hit_step * self._hit_step
        for index, group in enumerate(self._groups):
            if group.window is None:
                known = 0
                for number in range(hit // group.block_size):
                    if self._pool.find((index, sequence.block_hash(group.block_size, number))) is None:
                        break
                    known += group.block_size
                hit = known // self._hit_step * self._hit_step
        while hit and any(self._table(sequence, index, hit) is None for index in range(len(self._groups))):
            hit -= self._hit_step
        return hit

    def tables(self, sequence: Sequence, hit: int) -> list[list[int]]:
        """Each group's table for the first `hit` tokens, which `find` has found."""
        found = [self._table(sequence, index, hit) for index in range(len(self._groups))]
        tables = [table for table in found if table is not None]
        assert len(tables) == len(found)
        return tables

    def _table(self, sequence: Sequence, index: int, hit: int) -> list[int] | None:
        """One group's table; None if a block that is needed is not there."""
        group = self._groups[index]
        first = 0 if group.window is None else max(0, (hit - group.window + 1) // group.block_size)
        hashes = sequence.block_hashes(group.block_size, hit // group.block_size)
        table = [RELEASED] * min(first, len(hashes))
        for key in hashes[first:]:
            block = self._pool.find((index, key))
            if block is None:
                return None
            table.append(block)
        return table

    def is_coming(self, sequence: Sequence, hit: int) -> bool:
        """True if a running sequence is about to compute the block after the hit: wait for it instead."""
        if not self._enabled or sequence.wants_prompt_logprobs:
            return False
        size = self._groups[0].block_size
        index = hit // size
        if (index + 1) * size > sequence.num_prompt:
            return False
        return self._pending[0, sequence.block_hash(size, index)] > 0

    def begin(self, sequence: Sequence) -> None:
        self._pending.update(self._to_compute(sequence))

    def end(self, sequence: Sequence) -> None:
        self._pending.subtract(self._to_compute(sequence))
        self._pending += Counter()  # drops what is zero

    def _to_compute(self, sequence: Sequence) -> list[BlockKey]:
        """Prompt blocks of group 0 that a running sequence has still to compute."""
        if not self._enabled:
            return []
        size = self._groups[0].block_size
        hashes = sequence.block_hashes(size, sequence.num_prompt // size)
        return [(0, key) for key in hashes[sequence.num_computed // size :]]

    def remember(self, sequence: Sequence, start: int) -> None:
        """Enter the blocks that were filled into the index."""
        if not self._enabled:
            return
        for index, (group, table) in enumerate(zip(self._groups, sequence.tables, strict=True)):
            before, after = start // group.block_size, sequence.num_computed // group.block_size
            hashes = sequence.block_hashes(group.block_size, after)
            for number in range(before, after):
                if table[number] != RELEASED:
                    self._pool.remember(table[number], (index, hashes[number]))
                if index == 0 and (number + 1) * group.block_size <= sequence.num_prompt:
                    self._pending[0, hashes[number]] -= 1

    def check_integrity(self, running: Items[Sequence]) -> None:
        """Raise AssertionError unless what is awaited is what the running sequences have still to compute."""
        expected = Counter(key for sequence in running for key in self._to_compute(sequence))
        assert +self._pending == expected, "pending prefixes differ from what is being computed"
