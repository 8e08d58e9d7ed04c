"""One request inside the engine: its ids, how far it is computed, and the blocks that hold it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from serve_llm.engine.schedule import prefix
from serve_llm.engine.types import FinishReason, Request, TokenLogprobs

RELEASED = -1  # a table entry whose block was given back: no layer looks there any more


@dataclass(frozen=True)
class GroupLayout:
    """How one KV group lies in its blocks."""

    block_size: int  # tokens per block
    window: int | None  # a query sees only the last so many positions, itself included


def most_blocks(group: GroupLayout, num_tokens: int, max_chunk: int) -> int:
    """Blocks of a group that a sequence of so many tokens holds at most at a time, with chunks of `max_chunk`."""
    if group.window is not None:  # the window, the chunk being computed, and a block that is partly out
        num_tokens = min(num_tokens, group.window + max_chunk + group.block_size)
    return -(-num_tokens // group.block_size)


class Sequence:
    """Mutable state of a live request. Only the scheduler writes to it."""

    def __init__(
        self, request: Request, groups: Items[GroupLayout], arrival: int, now: float, turns_at: int | None = None
    ) -> None:
        """turns_at: `ModelSpec.rope_turns_at`."""
        self.request = request
        self.sampling = request.sampling
        self.arrival = arrival  # counts up from request to request
        self.arrived_at = now
        self.num_prompt = len(request.prompt_ids)
        self.ids = request.prompt_ids + request.output_ids
        self.num_computed = 0
        self.num_scheduled = 0  # num_computed, and the tokens in batches whose results are not committed yet
        self.num_coming = 0  # ids that these batches sample
        self.row: int | None = None  # None: waiting
        self.is_long = False  # was admitted with a prompt of several steps
        self.ended = False  # its request has; it leaves once nothing of it is in flight
        self.cached_tokens: int | None = None  # of the first admission
        self.queued_seconds: float | None = None
        self.reported = False  # cached_tokens and queued_seconds were sent
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs_sent = False
        self.groups = groups
        self.tables: list[list[int]] = [[] for _ in groups]
        self.num_sent_blocks = [0] * len(groups)  # of each table, known to the workers
        self.num_sent_ids = 0  # known to the workers
        self._hashes: dict[int, list[bytes]] = {group.block_size: [] for group in groups}
        self._root = prefix.root(request.cache_salt)
        self._turns_at, self.is_turned = turns_at, False
        if self.turns:
            self.turn()

    @property
    def num_output(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens to schedule before the next one can be sampled; 1 where only the newest is."""
        return len(self.ids) + self.num_coming - self.num_scheduled

    @property
    def turns(self) -> bool:
        """Whether the next token needs another rope than that of what is computed; all is computed again then."""
        length = len(self.ids) + self.num_coming
        return self._turns_at is not None and length > self._turns_at and not self.is_turned

    def turn(self) -> None:
        """From now on it has the rope of long sequences; nothing of it may be computed."""
        self.is_turned = True
        self._root = prefix.root(self.request.cache_salt, is_turned=True)
        for hashes in self._hashes.values():
            hashes.clear()

    @property
    def in_flight(self) -> bool:
        return self.num_scheduled > self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs is not None and not self.prompt_logprobs_sent

    def block_hash(self, block_size: int, index: int) -> bytes:
        """The chained hash of one block, which must be full; computes those before it and none after."""
        hashes = self._hashes[block_size]
        return hashes[index] if index < len(hashes) else self.block_hashes(block_size, index + 1)[index]

    def block_hashes(self, block_size: int, count: int) -> list[bytes]:
        """Chained hashes of the first `count` blocks of so many tokens; the ids must be there."""
        hashes = self._hashes[block_size]
        while len(hashes) < count:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else self._root
            hashes.append(prefix.extend(parent, self.ids[start : start + block_size]))
        return hashes[:count]

    def finish_reason(self) -> FinishReason | None:
        """What the ids so far mean, apart from the limit on the context: finished or not."""
        sampling = self.sampling
        if self.num_output and self.ids[-1] in sampling.stop_token_ids and self.num_output >= sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_output >= sampling.max_tokens else None
