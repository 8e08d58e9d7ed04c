"""The pool of KV cache blocks: reference counts, free blocks, and the cached prefixes that blocks hold.

A block is a number; its memory belongs to the workers. All KV groups draw from one pool because their blocks have equal
bytes. Blocks without a cached prefix are allocated first (the most recently freed first, so that touched memory is
reused), then cached ones, the least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

BlockKey = tuple[int, bytes]  # (KV group, chained hash of all tokens up to the block's end)


class BlockPool:
    """Reference-counted blocks 0 .. num_blocks-1. Each allocation or acquisition is released exactly once."""

    def __init__(self, num_blocks: int) -> None:
        """`on_eviction`, if set, is called with a block and the prefix that is evicted from it."""
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # free, without a cached prefix; a stack
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free, with a cached prefix; oldest first
        self._key_of: dict[int, BlockKey] = {}
        self._cached: dict[BlockKey, int] = {}
        self.on_eviction: Callable[[int, BlockKey], None] | None = None

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def usage(self) -> float:
        """Fraction of the blocks that live sequences hold, 0..1."""
        return (self.num_blocks - self.num_free) / self.num_blocks

    def allocate(self) -> int:
        """Take a free block and drop its cached prefix. The caller has checked `num_free`."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            key = self._key_of.pop(block)
            del self._cached[key]
            if self.on_eviction is not None:
                self.on_eviction(block, key)
        self._references[block] = 1
        return block

    def find(self, key: BlockKey) -> int | None:
        """Return the block that holds this prefix, if any, without acquiring it."""
        return self._cached.get(key)

    def is_cached(self, key: BlockKey) -> bool:
        return key in self._cached

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def acquire(self, block: int) -> None:
        """Take a reference to a block returned by `find`."""
        if self._references[block] == 0:
            del self._evictable[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            if block in self._key_of:
                self._evictable[block] = None
            else:
                self._blank.append(block)

    def cache_block(self, block: int, key: BlockKey) -> bool:
        """Record that the block holds this full prefix block. Returns False if another block already does."""
        if key in self._cached or block in self._key_of:
            return False
        self._cached[key] = block
        self._key_of[block] = key
        return True

    def check_integrity(self, held: list[int]) -> None:
        """Raise AssertionError unless references match `held`, every block table entry of every live sequence."""
        expected = [0] * self.num_blocks
        for block in held:
            expected[block] += 1
        assert expected == self._references, "reference counts differ from the block tables of live sequences"
        free = [*self._blank, *self._evictable]
        assert len(set(free)) == len(free), "a block is free twice"
        assert all(self._references[block] == 0 for block in free), "a held block is free"
        assert len(free) + sum(count > 0 for count in expected) == self.num_blocks, "a block is lost"
        assert {block: key for key, block in self._cached.items()} == self._key_of, "the prefix index is inconsistent"
        assert all(block in self._key_of for block in self._evictable), "an evictable block holds no cached prefix"
        assert not any(block in self._key_of for block in self._blank), "a blank block holds a cached prefix"
