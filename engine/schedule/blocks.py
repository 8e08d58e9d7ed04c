"""The pool of KV blocks: who holds which, which are free, and which free ones still hold a known prefix.

A block is a number; the memory behind it belongs to the workers. All KV groups draw from one pool because their blocks
have equal bytes. Free blocks are kept in the order in which they are given out: those that hold no known prefix first
(most recently freed first, so that touched memory is used again), then cached ones, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict

BlockKey = tuple[int, bytes]  # (KV group, chained hash of all tokens up to the block's end)


class BlockPool:
    """Reference-counted blocks 0 .. num_blocks-1. Every acquired block is released exactly once per acquisition."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # free, nothing known in it; a stack
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, holds a cached prefix; oldest first
        self._key_of: dict[int, BlockKey] = {}
        self._cached: dict[BlockKey, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._kept)

    @property
    def usage(self) -> float:
        """Share of blocks held by live sequences, 0..1."""
        return (self.num_blocks - self.num_free) / self.num_blocks

    def allocate(self) -> int:
        """Take a free block, forgetting what it held. The caller has checked `num_free`."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            del self._cached[self._key_of.pop(block)]
        self._references[block] = 1
        return block

    def find(self, key: BlockKey) -> int | None:
        """The block that holds this prefix, if any; does not acquire it."""
        return self._cached.get(key)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def acquire(self, block: int) -> None:
        """Share a block that `find` gave."""
        if self._references[block] == 0:
            del self._kept[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            if block in self._key_of:
                self._kept[block] = None
            else:
                self._blank.append(block)

    def remember(self, block: int, key: BlockKey) -> None:
        """The block now holds this whole prefix block. If another block already does, this one stays anonymous."""
        if key not in self._cached and block not in self._key_of:
            self._cached[key] = block
            self._key_of[block] = key

    def check_integrity(self, held: list[int]) -> None:
        """Raise AssertionError unless references equal `held` (every table entry of every live sequence)."""
        expected = [0] * self.num_blocks
        for block in held:
            expected[block] += 1
        assert expected == self._references, "reference counts differ from the tables of live sequences"
        free = [*self._blank, *self._kept]
        assert len(set(free)) == len(free), "a block is free twice"
        assert all(self._references[block] == 0 for block in free), "a held block is free"
        assert len(free) + sum(count > 0 for count in expected) == self.num_blocks, "a block is lost"
        assert {block: key for key, block in self._cached.items()} == self._key_of, "the prefix index is inconsistent"
        assert all(block in self._key_of for block in self._kept), "a kept block holds nothing known"
        assert not any(block in self._key_of for block in self._blank), "a blank block holds a known prefix"
