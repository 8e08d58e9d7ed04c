from __future__ import annotations

import pytest

from serve_llm.common import prefix_hash
from serve_llm.engine.scheduler.block_pool import BlockPool


def key(text: str) -> tuple[int, bytes]:
    return (0, text.encode())


def test_cached_blocks_are_taken_last_and_least_recently_used_first() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    for block, name in zip(blocks, "abc", strict=True):
        pool.cache_block(block, key(name))
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    blank = pool.allocate()
    assert blank not in blocks
    assert pool.allocate() == blocks[1] and pool.find(key("b")) is None
    assert pool.find(key("a")) == blocks[0]
    pool.acquire(blocks[0])
    pool.check_integrity([blank, blocks[1], blocks[0]])


def test_a_shared_block_is_free_only_when_all_let_go() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.cache_block(block, key("a"))
    pool.acquire(block)
    pool.release(block)
    assert pool.num_free == 1 and not pool.is_free(block)
    pool.release(block)
    assert pool.num_free == 2 and pool.usage == 0.0


def test_integrity_check_finds_a_lost_block() -> None:
    pool = BlockPool(2)
    pool.allocate()
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([])


def test_hashes_chain_from_the_salt() -> None:
    first, second = prefix_hash.extend(prefix_hash.root(""), [1, 2, 1, 2, 9], 2)  # the last block is not full
    assert [first] == prefix_hash.extend(prefix_hash.root(""), [1, 2], 2)
    assert [second] == prefix_hash.extend(first, [1, 2], 2)
    assert first != second
    assert [first] != prefix_hash.extend(prefix_hash.root("tenant"), [1, 2], 2)
    assert prefix_hash.extend(first, [1], 2) == []
