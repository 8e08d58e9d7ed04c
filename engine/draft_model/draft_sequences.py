"""How far the draft model has computed each request: ids, indices and blocks of its own KV cache. Torch-free.

A draft sequence consists of the request's ids and, after them, the drafts of the last steps. When the next ids are
known, drafts that they confirm stay computed. Blocks of confirmed ids are kept as prefixes, so that a prompt is
computed once for all its choices, and again after a preemption only if other requests needed its blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

import msgspec

from serve_llm.common.types import Sampling
from serve_llm.engine.scheduler.block_pool import BlockPool
from serve_llm.engine.scheduler.prefix_cache import PrefixCache
from serve_llm.engine.scheduler.sequence import RELEASED, KVCacheSpec, Sequence

UNLIMITED = 1 << 62  # max_tokens: the scheduler enforces the request's own limits


@dataclass(slots=True)
class DraftSequence:
    """The draft model's state of one request."""

    sequence: Sequence  # known ids, then drafts
    first_id: int  # earlier ids of the request are left out
    num_known: int  # ids of the request taken over so far; drafts follow
    num_indexed: int  # tokens whose blocks are registered in the prefix cache
    num_stale: int = 0  # the worker must forget ids from this index on; 0: none
    is_new: bool = True  # not yet sent to the worker

    @property
    def guesses(self) -> list[int]:
        return self.sequence.token_ids[self.num_known :]


class DraftSequences:
    """All requests that the draft model follows, least recently followed first."""

    def __init__(
        self, groups: Items[KVCacheSpec], num_blocks: int, max_num_seqs: int, keeps_guesses: bool = True
    ) -> None:
        """keeps_guesses: results computed for drafts stay valid when the drafts are confirmed."""
        self._keeps_guesses = keeps_guesses
        self._groups = tuple(groups)
        self._pool = BlockPool(num_blocks)
        self._prefix_cache = PrefixCache(self._groups, self._pool, enabled=True)
        self._drafts: OrderedDict[int, DraftSequence] = OrderedDict()  # by request id
        self._free_indices = list(range(max_num_seqs - 1, -1, -1))

    def follow(self, target: Sequence, first_id: int = 0) -> DraftSequence | None:
        """Follow the request with its current ids. Returns None if all indices are used by requests followed since.

        first_id: 0 for all ids. Otherwise the result for an id depends on the one before it, and ids before `first_id`
        can be used only if their blocks are found in the cache.
        """
        request_id = target.request.id
        draft = self._drafts.get(request_id)
        if draft is None:
            if not self._free_indices:
                return None
            draft = self._drafts[request_id] = self._begin(target, first_id)
        else:
            self._take_over(draft, target.token_ids[draft.first_id :])
        self._drafts.move_to_end(request_id)
        return draft

    def reserve(self, draft: DraftSequence, num_tokens: int, kept: Collection[int]) -> bool:
        """Give the request blocks for its next `num_tokens` tokens, taking them from requests not in `kept` (ids) if
        necessary. Returns False if there are too few."""
        missing = draft.sequence.missing_blocks(num_tokens)
        while sum(missing) > self._pool.num_free:
            if not self.make_room(kept):
                return False
        draft.sequence.add_blocks([[self._pool.allocate() for _ in range(number)] for number in missing])
        return True

    def make_room(self, kept: Collection[int]) -> bool:
        """Forget the least recently followed request that is not in `kept` (ids). Returns False if there is none."""
        request_id = next((one for one in self._drafts if one not in kept), None)
        if request_id is None:
            return False
        self.forget(request_id)
        return True

    def forget(self, request_id: int) -> None:
        """Free the request's index and blocks. Ignores requests that are not followed."""
        draft = self._drafts.pop(request_id, None)
        if draft is None:
            return
        sequence = draft.sequence
        sequence.num_computed = draft.num_indexed
        self._prefix_cache.end(sequence)
        for block in sequence.drop_blocks():
            self._pool.release(block)
        assert sequence.req_index is not None
        self._free_indices.append(sequence.req_index)

    def _begin(self, target: Sequence, first_id: int) -> DraftSequence:
        sequence = self._build(target, min(first_id, 1))
        num_cached = self._prefix_cache.find(sequence)
        if num_cached + 1 < first_id:
            sequence = self._build(target, first_id)
            num_cached = 0
        else:
            first_id = min(first_id, 1)
        tables = self._prefix_cache.tables(sequence, num_cached)
        for table in tables:
            for block in table:
                if block != RELEASED:
                    self._pool.acquire(block)
        sequence.add_blocks(tables)
        sequence.num_computed = num_cached
        sequence.num_scheduled = num_cached
        sequence.req_index = self._free_indices.pop()
        self._prefix_cache.begin(sequence)
        return DraftSequence(sequence, first_id, len(sequence.token_ids), num_cached)

    def _build(self, target: Sequence, first_id: int) -> Sequence:
        """Build the request's sequence from this id on. It shares blocks where all earlier ids are equal."""
        request = target.request
        salt = request.cache_salt
        if first_id == 1:
            salt = f"{salt} {target.adapter_digest} {target.token_ids[0]}"
        elif first_id > 1:
            salt = f"{salt} request {request.id}"
        num_prompt = target.num_prompt
        request = msgspec.structs.replace(
            request,
            prompt_ids=target.token_ids[first_id:num_prompt],
            output_ids=target.token_ids[max(first_id, num_prompt) :],
            sampling=_simplify(target.sampling),
            adapter=None,  # the drafts come from a model without adapters
            cache_salt=salt,
        )
        return Sequence(request, self._groups, 0, 0.0)

    def _take_over(self, draft: DraftSequence, token_ids: Items[int]) -> None:
        """Replace the drafts by the ids that were sampled."""
        sequence = draft.sequence
        actual_ids = token_ids[draft.num_known :]
        num_right = 0
        for guess, actual in zip(draft.guesses, actual_ids, strict=False):
            if guess != actual or not self._keeps_guesses:
                break
            num_right += 1
        end = draft.num_known + num_right
        if sequence.num_sent_ids > end:
            sequence.num_sent_ids = end
            draft.num_stale = end
        sequence.token_ids[end:] = actual_ids[num_right:]
        sequence.num_computed = min(sequence.num_computed, end)
        sequence.num_scheduled = sequence.num_computed
        draft.num_known = len(token_ids)
        self._prefix_cache.cache_blocks(sequence, draft.num_indexed)
        draft.num_indexed = sequence.num_computed
        for block in sequence.pop_blocks_outside_windows():
            self._pool.release(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and indices are conserved. Slow: for tests only."""
        sequences = [draft.sequence for draft in self._drafts.values()]
        self._pool.check_integrity([block for sequence in sequences for block in sequence.held_blocks])
        used = [one.req_index for one in sequences if one.req_index is not None]
        indices = sorted([*self._free_indices, *used])
        assert indices == list(range(len(indices))), "an index is lost"


def _simplify(sampling: Sampling) -> Sampling:
    """Keep only the parameters that decide which id is drawn from given logits, with the same noise."""
    return msgspec.structs.replace(
        sampling,
        max_tokens=UNLIMITED,
        logprobs=None,
        logprob_token_ids=(),
        prompt_logprobs=None,
        grammar="",
        thinking=None,
    )
