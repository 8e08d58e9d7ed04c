"""The prefix cache: which blocks hold the start of a sequence, and which prefix blocks are being computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items

from serve_llm.engine.scheduler.block_pool import BlockKey, BlockPool
from serve_llm.engine.scheduler.sequence import RELEASED, GroupLayout, Sequence


class PrefixCache:
    """The scheduler calls:

    begin(sequence)              on admission, with num_computed set to the cached tokens
    remember(sequence, start)    when the tokens from `start` to num_computed are in their blocks
    end(sequence)                when the sequence frees its blocks, however far it is computed
    """

    def __init__(self, groups: Items[GroupLayout], pool: BlockPool, enabled: bool) -> None:
        self._groups = groups
        self._pool = pool
        self._enabled = enabled and bool(groups)  # encoders have no KV
        self._smallest_block = min((group.block_size for group in groups), default=1)
        self._hit_step = max((group.block_size for group in groups), default=1)  # block sizes are powers of two
        self._pending: Counter[BlockKey] = Counter()  # prefix blocks that running sequences will compute

    def find(self, sequence: Sequence) -> int:
        """Tokens of the longest cached prefix. At least one token is left to compute, to sample the next from, and all
        from which log-probabilities are still to come."""
        if not self._enabled or sequence.wants_prompt_logprobs:
            return 0
        hit = (sequence.num_delivered - 1) // self._hit_step * self._hit_step
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
        """Each group's block table for the first `hit` tokens, as `find` returned."""
        tables = []
        for index in range(len(self._groups)):
            table = self._table(sequence, index, hit)
            assert table is not None, "the prefix is no longer cached"
            tables.append(table)
        return tables

    def _table(self, sequence: Sequence, index: int, hit: int) -> list[int] | None:
        """One group's block table; None if a block that it needs is not cached."""
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
        """Whether a running sequence will compute the block after the hit, so that waiting for it saves work."""
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
        self._pending += Counter()  # drops zero counts

    def _to_compute(self, sequence: Sequence) -> list[BlockKey]:
        """Prompt blocks of group 0 that a running sequence has yet to compute."""
        if not self._enabled:
            return []
        size = self._groups[0].block_size
        hashes = sequence.block_hashes(size, sequence.num_prompt // size)
        return [(0, key) for key in hashes[sequence.num_computed // size :]]

    def remember(self, sequence: Sequence, start: int) -> None:
        """Index the blocks that were filled."""
        size = self._smallest_block
        if not self._enabled or start // size == sequence.num_computed // size:
            return
        for index, (group, table) in enumerate(zip(self._groups, sequence.block_tables, strict=True)):
            before, after = start // group.block_size, sequence.num_computed // group.block_size
            hashes = sequence.block_hashes(group.block_size, after)
            for number in range(before, after):
                if table[number] != RELEASED:
                    self._pool.remember(table[number], (index, hashes[number]))
                if index == 0 and (number + 1) * group.block_size <= sequence.num_prompt:
                    self._pending[0, hashes[number]] -= 1

    def check_integrity(self, running: Items[Sequence]) -> None:
        """Raise AssertionError unless the pending blocks are those that running sequences have yet to compute."""
        expected = Counter(key for sequence in running for key in self._to_compute(sequence))
        assert +self._pending == expected, "pending prefix blocks differ from those being computed"
