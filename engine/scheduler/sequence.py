"""One request inside the engine: its token ids, how far they are computed, and the blocks that hold its KV."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from serve_llm.common import prefix_hash
from serve_llm.common.types import LOWEST_PRIORITY, EngineCoreRequest, FinishReason, TokenLogprobs
from serve_llm.engine.scheduler.block_pool import BlockKey
from serve_llm.engine.scheduler.output import NewRequestData, ScheduledTokens

RELEASED = -1  # a block table entry whose block left the sliding window and was released


@dataclass(frozen=True)
class KVCacheSpec:
    """How the tokens of one KV group are laid out in blocks."""

    block_size: int  # tokens per block
    window: int | None  # a query sees only this many positions, including its own; None: all
    chunked: bool = False  # a query sees only positions in its own chunk of `window` positions

    @property
    def chunk_size(self) -> int | None:
        """Positions in a chunk; None if the group is not chunked."""
        return self.window if self.chunked else None


def max_blocks(group: KVCacheSpec, num_tokens: int, max_chunk: int) -> int:
    """Maximum number of blocks that a sequence of `num_tokens` holds in a group, with at most `max_chunk` tokens per
    step."""
    if group.window is not None:  # the window, the chunk being computed, and a block partly outside
        num_tokens = min(num_tokens, group.window + max_chunk + group.block_size)
    return -(-num_tokens // group.block_size)


def find_hit_step(groups: Items[KVCacheSpec]) -> int:
    """The number of tokens of which cached prefixes are multiples, because they end with a block of every group. Block
    sizes are powers of two."""
    return max((group.block_size for group in groups), default=1)


class Sequence:
    """Mutable state of a live request. Only the scheduler writes to it."""

    __slots__ = (  # read for every token, where slots are faster than a dictionary
        "_block_hashes",
        "_long_rope_threshold",
        "_root_hash",
        "adapter_slot",
        "are_prompt_logprobs_sent",
        "arrival",
        "arrived_at",
        "block_tables",
        "cached_tokens",
        "end_reason",
        "groups",
        "has_drafts_in_flight",
        "has_long_prompt",
        "is_admission_reported",
        "is_finished",
        "num_allocated",
        "num_computed",
        "num_delivered",
        "num_pending_ids",
        "num_preemptions",
        "num_prompt",
        "num_scheduled",
        "num_sent_ids",
        "prompt_logprobs",
        "queued_seconds",
        "req_index",
        "request",
        "restored_snapshot",
        "sampling",
        "snapshots",
        "stored_keys",
        "token_ids",
        "unsent_blocks",
        "uses_long_rope",
        "vectors",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        groups: Items[KVCacheSpec],
        arrival: int,
        now: float,
        long_rope_threshold: int | None = None,
    ) -> None:
        """arrival: sequence number in order of arrival. long_rope_threshold: see `ModelSpec`."""
        self.request = request
        self.sampling = request.sampling
        self.arrival = arrival
        self.arrived_at = now
        self.num_prompt = len(request.prompt_ids)
        self.token_ids = request.prompt_ids + request.output_ids
        self.num_computed = 0
        self.num_scheduled = 0  # num_computed plus the tokens of steps in flight
        self.num_pending_ids = 0  # maximum number of ids that the steps in flight sample
        self.has_drafts_in_flight = False
        self.req_index: int | None = None  # None: waiting
        self.adapter_slot: int | None = None  # None: waiting, or without an adapter
        self.has_long_prompt = False  # its prompt did not fit into one step on admission
        self.is_finished = False  # it is removed once no step in flight computes it
        self.cached_tokens: int | None = None  # at the first admission
        self.queued_seconds: float | None = None
        self.is_admission_reported = False  # cached_tokens and queued_seconds have been sent
        self.num_preemptions = 0  # since its last output
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.are_prompt_logprobs_sent = False
        self.vectors: list[bytes] = []  # results of the prompt's chunks, if it is a pooling request
        self.num_delivered = len(self.token_ids)  # prompt ids, and output ids that have been sent
        self.end_reason: FinishReason | None = None  # set with the last id, which may still lack its logprobs
        self.groups = groups
        self.block_tables: list[list[int]] = [[] for _ in groups]
        self.num_allocated = 0  # tokens for which every block table has a block
        self.unsent_blocks: tuple[list[int], ...] = ()  # per block table: entries that the workers lack
        self.num_sent_ids = 0  # token ids that the workers have
        self.stored_keys: list[BlockKey] | None = None  # blocks read from the store for it; None: not looked up
        self.restored_snapshot: int | None = None  # the states after num_computed tokens; for the next step
        self.snapshots: list[tuple[int, int]] = []  # to be stored for its prefixes: position, number; ascending
        self.uses_long_rope = False  # KV is computed with the long RoPE factors
        self._long_rope_threshold = long_rope_threshold
        self._block_hashes: dict[int, list[bytes]] = {group.block_size: [] for group in groups}
        self._root_hash = prefix_hash.root(request.cache_salt, adapter=self.adapter_digest)
        if self.must_switch_rope:
            self.switch_to_long_rope()

    @property
    def adapter_digest(self) -> str:
        """Empty without an adapter."""
        return "" if self.request.adapter is None else self.request.adapter.digest

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_unscheduled(self) -> int:
        """Tokens to schedule before the next id can be sampled: 1 while decoding, more after forced ids."""
        return len(self.token_ids) + self.num_pending_ids - self.num_scheduled

    def max_drafts(self, max_model_len: int) -> int:
        """Maximum number of drafts for the next step: none before the first output id, or while ids are in flight or
        lack their log-probabilities. All of them, plus one id, may become output."""
        if self.is_in_flight or self.num_scheduled < self.num_prompt or self.num_delivered < len(self.token_ids):
            return 0
        longest = min(max_model_len, self.num_prompt + self.sampling.max_tokens) - 1
        if self._long_rope_threshold is not None and not self.uses_long_rope:
            longest = min(longest, self._long_rope_threshold)
        return max(0, longest - len(self.token_ids))

    @property
    def is_in_flight(self) -> bool:
        return self.num_scheduled > self.num_computed

    @property
    def is_long_prefill(self) -> bool:
        return self.has_long_prompt and not self.is_decoding

    @property
    def is_decoding(self) -> bool:
        """Whether at most one token of its prompt is left to schedule."""
        return self.num_scheduled >= self.num_prompt or self.num_unscheduled == 1

    @property
    def is_of_batch(self) -> bool:
        """Whether it has the lowest priority, that of batches."""
        return self.request.priority == LOWEST_PRIORITY

    def can_run_ahead(self, max_model_len: int, has_drafts: bool) -> bool:
        """Whether it can be scheduled again while a step in flight computes it. has_drafts: there are drafts of its
        next ids."""
        if self.is_finished or self.has_drafts_in_flight:
            return False
        if self.num_pending_ids == 0:
            return True  # more of its prompt
        if has_drafts:
            return False  # drafts are verified once the ids before them are known
        if self.sampling.reads_history or self.must_switch_rope:
            return False
        length = len(self.token_ids) + self.num_pending_ids
        return length - self.num_prompt < self.sampling.max_tokens and length < max_model_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs is not None and not self.are_prompt_logprobs_sent

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether each token of the prompt has a result of its own, so that a cached prefix is of no use."""
        return self.wants_prompt_logprobs or self.request.pools_tokens

    @property
    def must_switch_rope(self) -> bool:
        """Whether the next token needs the long RoPE factors, so that everything before it must be recomputed."""
        if self._long_rope_threshold is None or self.uses_long_rope:
            return False
        return len(self.token_ids) + self.num_pending_ids > self._long_rope_threshold

    def missing_blocks(self, count: int) -> list[int]:
        """Per group, how many more blocks the next `count` tokens need."""
        end = self.num_scheduled + count
        tables = zip(self.groups, self.block_tables, strict=True)
        return [max(0, -(-end // group.block_size) - len(table)) for group, table in tables]

    def add_blocks(self, blocks: Items[Items[int]]) -> None:
        """Append to the block tables. blocks: per group."""
        unsent = self.unsent_blocks or tuple([] for _ in self.groups)
        for table, new, added in zip(self.block_tables, unsent, blocks, strict=True):
            table.extend(added)
            new.extend(added)
        self.unsent_blocks = unsent
        tables = zip(self.groups, self.block_tables, strict=True)
        self.num_allocated = min((group.block_size * len(table) for group, table in tables), default=0)

    @property
    def held_blocks(self) -> list[int]:
        """The blocks of all groups, last ones first."""
        return [block for table in self.block_tables for block in reversed(table) if block != RELEASED]

    def drop_blocks(self) -> list[int]:
        """Empty the block tables. Returns `held_blocks`."""
        dropped = self.held_blocks
        for table in self.block_tables:
            table.clear()
        self.num_allocated = 0
        self.unsent_blocks = ()
        return dropped

    def forget_progress(self) -> None:
        """Reset, so that everything is recomputed. Requires that it holds no blocks."""
        self.num_computed = 0
        self.num_scheduled = 0
        self.prompt_logprobs = []
        self.vectors = []
        self.stored_keys = None

    def pop_blocks_outside_windows(self) -> list[int]:
        """Mark the blocks that no later token reads as released. Returns them."""
        left = []
        for group, table in zip(self.groups, self.block_tables, strict=True):
            if group.window is None:
                continue
            index = (self.num_computed - group.window + 1) // group.block_size - 1
            while index >= 0 and table[index] != RELEASED:
                left.append(table[index])
                table[index] = RELEASED
                index -= 1
        return left

    def reject_drafts(self, num_rejected: int) -> None:
        """Uncount the computed tokens of rejected drafts, and of accepted ones after the end of the text. Their slots
        will be overwritten."""
        self.num_computed = min(self.num_computed - num_rejected, len(self.token_ids))
        self.num_scheduled = self.num_computed
        self.has_drafts_in_flight = False

    def switch_to_long_rope(self) -> None:
        """Use the long RoPE factors from now on. Requires num_computed == 0."""
        self.uses_long_rope = True
        self._root_hash = prefix_hash.root(self.request.cache_salt, True, self.adapter_digest)
        for hashes in self._block_hashes.values():
            hashes.clear()

    def block_hashes(self, block_size: int, count: int) -> list[bytes]:
        """Chained hashes of the first `count` blocks of `block_size` tokens, which must be full."""
        hashes = self._block_hashes[block_size]
        if len(hashes) < count:
            parent = hashes[-1] if hashes else self._root_hash
            new_ids = self.token_ids[len(hashes) * block_size : count * block_size]
            hashes += prefix_hash.extend(parent, new_ids, block_size)
        return hashes[:count]

    def describe(self) -> NewRequestData:
        """Describe the request to the workers on its admission, with all token ids so far."""
        assert self.req_index is not None
        self.num_sent_ids = len(self.token_ids)
        return NewRequestData(
            req_index=self.req_index,
            token_ids=list(self.token_ids),
            num_prompt=self.num_prompt,
            sampling=self.sampling,
            prompt_logprobs=self.sampling.prompt_logprobs if self.wants_prompt_logprobs else None,
            uses_long_rope=self.uses_long_rope,
            pooling=self.request.pooling,
            pools_tokens=self.request.pools_tokens,
            second_text_start=self.request.second_text_start,
            adapter=self.request.adapter,
            adapter_slot=self.adapter_slot,
        )

    def schedule(self, count: int, drafts: Items[int] = ()) -> ScheduledTokens:
        """Schedule the next `count` tokens and the drafts after them. Their blocks must be in the block tables."""
        assert self.req_index is not None
        sampling = self.sampling
        num_ids = len(self.token_ids)
        num_drafts = len(drafts)
        start = self.num_scheduled
        is_newest = start + count == num_ids + self.num_pending_ids
        sample = is_newest and sampling.max_tokens > 0 and self.end_reason is None
        new_blocks = self._take_unsent_blocks() if self.unsent_blocks else ()
        new_token_ids = self.token_ids[self.num_sent_ids :]
        self.num_sent_ids = num_ids
        self.num_scheduled = start + count + num_drafts
        self.num_pending_ids += sample + num_drafts
        self.has_drafts_in_flight = num_drafts > 0
        logprobs_start = None
        if sampling.logprobs is not None and self.num_delivered < num_ids:
            logprobs_start = max(start, self.num_delivered - 1)
        restored, self.restored_snapshot = self.restored_snapshot, None
        return ScheduledTokens(
            self.req_index,
            start,
            count + num_drafts,
            new_blocks,
            sample,
            new_token_ids,
            logprobs_start,
            tuple(drafts),
            restored,
            tuple(self._list_stored(start, start + count)) if self.snapshots else (),
        )

    def _list_stored(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """List the snapshots to store while computing the tokens from `start` to `end`."""
        for position, number in self.snapshots:
            if start < position <= end:
                yield position - start, number

    def _take_unsent_blocks(self) -> tuple[list[int], ...]:
        """Per group, the block table entries that the workers lack. Released ones are never read, so any block number
        will do."""
        new_blocks = tuple([max(block, 0) for block in blocks] for blocks in self.unsent_blocks)
        self.unsent_blocks = ()
        return new_blocks

    def finish_reason(self, max_model_len: int) -> FinishReason | None:
        """Why the request ends with the token ids so far; None if it continues."""
        sampling = self.sampling
        num_ids = len(self.token_ids)
        num_output = num_ids - self.num_prompt
        if num_output and self.token_ids[-1] in sampling.stop_token_ids and num_output >= sampling.min_tokens:
            return FinishReason.STOP
        if num_output >= sampling.max_tokens or num_ids >= max_model_len:
            return FinishReason.LENGTH
        return None
