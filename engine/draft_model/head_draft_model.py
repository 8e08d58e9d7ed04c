"""Draft the next ids of many requests with an EAGLE-3 head or an MTP layer, from the served model's hidden states.

The states arrive with the results of the served model's steps and wait here until the head computes their tokens: with
the next draft, or when many have arrived, such as those of a prompt. When ids that the head drafted are confirmed, they
are computed again from the served model's states instead of the head's own.

If the served model found the first tokens of a prompt in its prefix cache, there are no states for them. The head then
finds them in its own cache, or starts after them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_llm.engine.config import Config
from serve_llm.engine.draft_model.draft_model import ComputeStep, DraftModel
from serve_llm.engine.draft_model.draft_sequences import DraftSequence
from serve_llm.engine.model.draft_head import DraftHead
from serve_llm.engine.scheduler.sequence import Sequence
from serve_llm.engine.worker.kv_cache import KVCacheConfig

MAX_WAITING = 64  # waiting states per request; larger amounts are computed at once


@dataclass(slots=True)
class WaitingStates:
    """Hidden states of consecutive tokens of a request that the head has not computed yet."""

    start: int  # position of the first one
    rows: Tensor  # (tokens, hidden_size)

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def drop(self, end: int) -> None:
        """Drop those before position `end`."""
        count = min(max(0, end - self.start), len(self.rows))
        self.start += count
        self.rows = self.rows[count:].clone()


class HeadDraftModel(DraftModel):
    """See `BatchDraftProposer`. Use it only in the engine's thread."""

    keeps_guesses = False

    def __init__(
        self,
        config: Config,
        compute: ComputeStep,
        kv_cache_config: KVCacheConfig,
        vocab_size: int,
        head: DraftHead,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """head: what `compute` runs. The other arguments are those of `DraftModel`."""
        super().__init__(config, compute, kv_cache_config, vocab_size, **({} if clock is None else {"clock": clock}))
        self._head = head
        self._device = torch.device(config.device)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._waiting: dict[int, WaitingStates] = {}  # by request id
        self._outputs: dict[int, Tensor] = {}  # by request id: the head's state after its last draft, (1, hidden_size)

    @torch.inference_mode()
    def take_hidden_states(self, sequence: Sequence, start: int, states: bytes) -> None:
        if sequence.sampling.max_tokens < 2 or sequence.request.pooling:
            return  # such a request never has drafts
        request_id = sequence.request.id
        rows = torch.frombuffer(bytearray(states), dtype=self._dtype).view(-1, self._head.state_size)
        rows = rows[: max(0, sequence.num_computed - start)]
        waiting = self._waiting.get(request_id)
        if waiting is None or start > waiting.end:
            self.sequences.forget(request_id)
            waiting = WaitingStates(start, rows.new_empty(0, self._head.spec.hidden_size).to(self._device))
            self._waiting[request_id] = waiting
        rows = rows[waiting.end - start :]  # after a preemption, some states arrive again
        if not len(rows):
            return
        waiting.rows = torch.cat((waiting.rows, self._head.fuse(rows.to(self._device))))
        if len(waiting.rows) >= MAX_WAITING:
            self._catch_up(sequence, waiting)

    def forget(self, request_id: int) -> None:
        super().forget(request_id)
        self._waiting.pop(request_id, None)
        self._outputs.pop(request_id, None)

    def _catch_up(self, target: Sequence, waiting: WaitingStates) -> None:
        """Compute all tokens whose states have arrived, except the newest id, which is for a draft. Forget the states
        if there is no room."""
        kept = {target.request.id}
        draft = self._find_draft(target, kept)
        while draft is not None:
            count = min(waiting.end - self._find_next(draft), draft.sequence.num_unscheduled - 1, self._max_chunk)
            if count <= 0:
                return
            if not self._has_blocks(draft, count, 0, kept):
                break
            self._run([(draft, count)])
        self.sequences.forget(target.request.id)
        waiting.drop(waiting.end)

    def _follow(self, target: Sequence, kept: Collection[int]) -> DraftSequence | None:
        """Also return None if states of some ids are missing."""
        waiting = self._waiting.get(target.request.id)
        if waiting is None or waiting.end < len(target.token_ids) - 1:
            return None
        return self._find_draft(target, kept)

    def _find_draft(self, target: Sequence, kept: Collection[int]) -> DraftSequence | None:
        return super()._follow(target, kept)

    def _find_first_id(self, target: Sequence) -> int:
        return self._waiting[target.request.id].start + 1

    @staticmethod
    def _find_next(draft: DraftSequence) -> int:
        """Return the position of the state that the next token reads: that of the id before it."""
        return draft.sequence.num_computed + draft.first_id - 1

    @torch.inference_mode()
    def _run(self, chunks: Items[tuple[DraftSequence, int]]) -> None:
        self._head.states = torch.cat([self._find_states(draft, count) for draft, count in chunks])
        sampled = [draft for draft, count in chunks if count == draft.sequence.num_unscheduled]
        super()._run(chunks)
        self._head.states = None
        outputs = self._head.outputs
        assert outputs is not None
        for index, draft in enumerate(sampled):
            self._outputs[draft.sequence.request.id] = outputs[index : index + 1].clone()
        for draft, _ in chunks:
            next_known = min(draft.sequence.num_computed, draft.num_known) + draft.first_id - 1
            self._waiting[draft.sequence.request.id].drop(next_known)

    def _find_states(self, draft: DraftSequence, count: int) -> Tensor:
        """Return the states, (count, hidden_size), that the sequence's next tokens read."""
        request_id = draft.sequence.request.id
        if draft.sequence.num_computed >= draft.num_known:
            return self._outputs[request_id]
        waiting = self._waiting[request_id]
        first = self._find_next(draft) - waiting.start
        return waiting.rows[first : first + count]
