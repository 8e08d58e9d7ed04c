"""Snapshots of the states of linear attention, for prefixes: which exist, and which are being computed.

A sequence continues after a cached prefix if its KV is in blocks and a snapshot holds the state after its last token. A
snapshot is a number; its memory belongs to the workers, which copy a state to it in the middle of a step, when the
layers have computed the tokens up to its position. Each prompt gets at most two: at its last block boundary, where the
next turn of a conversation continues, and where it departs from tokens that are cached without a snapshot, because a
third prompt may begin with them too. If none is free, the least recently used one is replaced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

from serve_llm.engine.scheduler.sequence import KVCacheSpec, Sequence, find_hit_step


class _PlannedSnapshot(NamedTuple):
    position: int  # tokens of the prefix
    block_hash: bytes  # hash of the block that ends there


class StateSnapshots:
    """Owned by the prefix cache, which calls:

    find(sequence, hit)              for the longest prefix with a snapshot
    will_extend(sequence, hit, most) before admission
    begin(sequence, known)           on admission, with num_computed set to the cached tokens
    commit(sequence)                 when the tokens up to num_computed are computed
    end(sequence)                    when the sequence frees its blocks
    drop(block_hash)                 when the block is evicted
    """

    def __init__(self, groups: Items[KVCacheSpec], num_snapshots: int, min_branch_tokens: int) -> None:
        """groups: those of the prefix cache. min_branch_tokens: tokens that a snapshot must save, unless it is at the
        end of a prompt."""
        self._num_snapshots = num_snapshots
        self._min_branch_tokens = min_branch_tokens
        self._block_size = groups[0].block_size  # the hashes of this group's blocks name prefixes
        self._hit_step = find_hit_step(groups)
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._stored: OrderedDict[bytes, int] = OrderedDict()  # hash of the prefix -> number; oldest first
        self._planned: dict[int, _PlannedSnapshot] = {}  # number -> what a running sequence is going to store there

    def _hash(self, sequence: Sequence, position: int) -> bytes:
        number = position // self._block_size
        return sequence.block_hashes(self._block_size, number)[number - 1]

    def find(self, sequence: Sequence, hit: int) -> int:
        """Find the number of tokens in the longest prefix of at most `hit` tokens that has a snapshot."""
        if not self._stored or not hit:
            return 0
        hashes = sequence.block_hashes(self._block_size, hit // self._block_size)
        while hit and hashes[hit // self._block_size - 1] not in self._stored:
            hit -= self._hit_step
        return hit

    def will_extend(self, sequence: Sequence, hit: int, most: int) -> bool:
        """Whether a running sequence is going to store a snapshot of a prefix longer than `hit`, up to `most`
        tokens."""
        return any(
            hit < one.position <= most and self._hash(sequence, one.position) == one.block_hash
            for one in self._planned.values()
        )

    def begin(self, sequence: Sequence, last: int, known: int) -> None:
        """Take the snapshot from which an admitted sequence continues, and plan its own. last: its last block boundary
        before the token from which it samples. known: tokens at its start that are in blocks or being computed."""
        hit = sequence.num_computed
        if hit:
            block_hash = self._hash(sequence, hit)
            sequence.restored_snapshot = self._stored[block_hash]
            self._stored.move_to_end(block_hash)
        branch = min(known, last) // self._hit_step * self._hit_step
        if last > hit:
            self._plan(sequence, last)
        if branch - hit >= self._min_branch_tokens and last - branch >= self._min_branch_tokens:
            self._plan(sequence, branch)
            sequence.snapshots.sort()

    def _plan(self, sequence: Sequence, position: int) -> None:
        planned = _PlannedSnapshot(position, self._hash(sequence, position))
        if planned.block_hash in self._stored or planned in self._planned.values():
            return
        if not self._free and self._stored:
            self._free.append(self._stored.popitem(last=False)[1])
        if self._free:
            number = self._free.pop()
            self._planned[number] = planned
            sequence.snapshots.append((position, number))

    def commit(self, sequence: Sequence) -> None:
        """Make the snapshots that a sequence has computed available."""
        while sequence.snapshots and sequence.snapshots[0][0] <= sequence.num_computed:
            _, number = sequence.snapshots.pop(0)
            self._stored[self._planned.pop(number).block_hash] = number

    def end(self, sequence: Sequence) -> None:
        for _, number in sequence.snapshots:
            del self._planned[number]
            self._free.append(number)
        sequence.snapshots.clear()
        sequence.restored_snapshot = None

    def drop(self, block_hash: bytes) -> None:
        """Free the snapshot of a prefix whose last block is evicted. A step in flight that reads it comes before any
        that overwrites it."""
        number = self._stored.pop(block_hash, None)
        if number is not None:
            self._free.append(number)

    def check_integrity(self, running: Items[Sequence], is_cached: Callable[[bytes], bool]) -> None:
        """Raise AssertionError unless each snapshot is free, stored for a cached block, or planned by a running
        sequence."""
        planned = {number: position for sequence in running for position, number in sequence.snapshots}
        assert planned == {number: one.position for number, one in self._planned.items()}, "a planned snapshot is lost"
        numbers = [*self._free, *self._stored.values(), *self._planned]
        assert sorted(numbers) == list(range(self._num_snapshots)), "a snapshot is lost"
        assert all(map(is_cached, self._stored)), "a snapshot outlives its block"
