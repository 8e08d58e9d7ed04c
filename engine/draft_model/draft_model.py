"""Draft the next ids of many requests with a small model, which has its own KV cache.

A draft id is drawn with the same noise as the id that it predicts, so that drafts of sampled requests are often
accepted. Prompts are computed in chunks that fit into a step; a request has no drafts until its ids are computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items

from serve_llm.engine.config import Config
from serve_llm.engine.draft_model.draft_sequences import DraftSequence, DraftSequences
from serve_llm.engine.scheduler.output import RunnerOutput, SchedulerOutput
from serve_llm.engine.scheduler.policy import CPU_STEP_SECONDS, TokenBudget
from serve_llm.engine.scheduler.sequence import Sequence
from serve_llm.engine.worker.kv_cache import KVCacheConfig

ComputeStep = Callable[[SchedulerOutput], Items[RunnerOutput]]

STEP_WEIGHT = 0.1  # weight of the latest step in `step_seconds`
MAX_NEW_IDS = 2  # per request, in a step that takes as long as one more draft


class DraftModel:
    """See `BatchDraftProposer`. Use it only in the engine's thread."""

    keeps_guesses = True  # see `DraftSequences`

    def __init__(
        self,
        config: Config,
        compute: ComputeStep,
        kv_cache_config: KVCacheConfig,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """config: the draft model's. compute: computes a step of it. vocab_size: the served model's."""
        self.step_seconds = 0.0
        self._compute = compute
        self._vocab_size = vocab_size
        self._own_vocab_size = config.vocab_size
        self._max_model_len = config.max_model_len
        self._max_chunk = config.max_num_batched_tokens
        self._budget = TokenBudget(config.max_num_batched_tokens, CPU_STEP_SECONDS if config.device == "cpu" else None)
        self._clock = clock
        self.sequences = DraftSequences(
            kv_cache_config.groups, kv_cache_config.num_blocks, config.max_num_seqs, self.keeps_guesses
        )

    def propose(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        kept = {target.request.id for target, _ in wanted}
        drafts: list[tuple[DraftSequence, int] | None] = []
        chunks: list[tuple[DraftSequence, int]] = []
        budget = self._budget.next(len(wanted))
        for target, count in wanted:
            draft = self._follow(target, kept)
            num_new = draft.sequence.num_unscheduled if draft is not None else 0
            num_tokens = min(num_new, budget, self._max_chunk)
            count = min(count, self._max_model_len - len(target.token_ids)) if num_tokens == num_new else 0
            if draft is None or not num_tokens or not self._has_blocks(draft, num_tokens, count, kept):
                drafts.append(None)
                continue
            budget -= num_tokens
            chunks.append((draft, num_tokens))
            drafts.append((draft, count))
        while chunks:
            self._run(chunks)
            unfinished = [entry for entry in drafts if entry is not None and 0 < len(entry[0].guesses) < entry[1]]
            chunks = [(draft, 1) for draft, _ in unfinished if draft.sequence.num_unscheduled]
        return [[] if entry is None else entry[0].guesses for entry in drafts]

    def take_hidden_states(self, sequence: Sequence, start: int, states: bytes) -> None:
        """Ignore them: this model reads ids only."""

    def forget(self, request_id: int) -> None:
        self.sequences.forget(request_id)

    def _follow(self, target: Sequence, kept: Collection[int]) -> DraftSequence | None:
        """Return None if the draft model does not know all ids of the request, or if the request is too long for it."""
        if len(target.token_ids) >= self._max_model_len:
            self.sequences.forget(target.request.id)
            return None
        if self._own_vocab_size < self._vocab_size and max(target.token_ids) >= self._own_vocab_size:
            return None
        first_id = self._find_first_id(target)
        draft = self.sequences.follow(target, first_id)
        if draft is None and self.sequences.make_room(kept):
            draft = self.sequences.follow(target, first_id)
        return draft

    def _find_first_id(self, target: Sequence) -> int:
        """See `DraftSequences.follow`."""
        return 0

    def _has_blocks(self, draft: DraftSequence, num_tokens: int, count: int, kept: Collection[int]) -> bool:
        return self.sequences.reserve(draft, num_tokens + max(0, count - 1), kept)

    def _run(self, chunks: Items[tuple[DraftSequence, int]]) -> None:
        """Compute the given number of tokens of each sequence, and append a draft id if those were all."""
        began = self._clock()
        new_requests = []
        scheduled = []
        stale = {}
        for draft, count in chunks:
            sequence = draft.sequence
            assert sequence.req_index is not None
            if draft.is_new:
                new_requests.append(sequence.describe())
            elif draft.num_stale:
                stale[sequence.req_index] = draft.num_stale
            draft.is_new = False
            draft.num_stale = 0
            scheduled.append(sequence.schedule(count))
        results = self._compute(SchedulerOutput(new_requests, scheduled, stale=stale))
        for (draft, count), chunk, result in zip(chunks, scheduled, results, strict=True):
            sequence = draft.sequence
            sequence.num_pending_ids -= chunk.sample
            sequence.num_computed += count
            if result.token_id is not None and result.token_id < self._vocab_size:
                sequence.token_ids.append(result.token_id)
        self._observe(sum(count for _, count in chunks), len(chunks), self._clock() - began)

    def _observe(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        self._budget.observe(num_tokens, seconds)
        if num_tokens <= MAX_NEW_IDS * num_sequences:
            weight = STEP_WEIGHT if self.step_seconds else 1.0
            self.step_seconds += weight * (seconds - self.step_seconds)
