"""The states of linear attention in a step: which tokens they include, which drafts wait to be accepted, and where
snapshots are restored and stored.

A state includes no drafts: the layers keep their inputs, see `kernels.delta_rule`. Where the next step of the sequence
starts says how many of them were accepted, so ranks need no message about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from serve_llm.engine.model.inputs import StateCall, StepInputs, add_states
from serve_llm.engine.scheduler.output import ScheduledTokens
from serve_llm.engine.worker.kv_cache import KVCacheConfig
from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.delta_rule import DraftCounts


class StateProgress:
    """How many tokens of each request its states include. Owned by a model runner."""

    def __init__(self, max_num_seqs: int, caches: Sequence[Tensor] = (), first_snapshot: int = 0) -> None:
        """caches: of all layers of this rank. Those of layers with states are (slots, numbers): first the slots of
        running sequences, then, from `first_snapshot` on, those of snapshots."""
        self._caches = [cache for cache in caches if cache.ndim == 2]
        self._first_snapshot = first_snapshot
        self._num_tokens = [0] * max_num_seqs  # by request index, as in the tensors of states
        self._num_drafts = [0] * max_num_seqs  # that the layers keep

    def begin_step(
        self, inputs: StepInputs, scheduled: Sequence[ScheduledTokens], to_device: Callable[[np.ndarray], Tensor]
    ) -> StepInputs:
        """Restore the snapshots of sequences that begin, and add the slots of the sequences' states and the drafts to
        the inputs of a step, which the layers then compute once. to_device: copies an array."""
        for chunk in scheduled:
            if chunk.restored_snapshot is not None:
                self._num_drafts[chunk.req_index] = 0  # those that are kept are of another sequence
                for cache in self._caches:
                    cache[chunk.req_index].copy_(cache[self._first_snapshot + chunk.restored_snapshot])
        accepted = [self._advance(chunk) for chunk in scheduled]
        if any(chunk.stored_snapshots for chunk in scheduled):
            calls = self._split(scheduled, accepted, None if inputs.lengths is None else to_device)
            return replace(inputs, state_calls=tuple(calls))
        drafts = _count_drafts(accepted, [len(chunk.draft_ids) for chunk in scheduled])
        return add_states(inputs, [chunk.req_index for chunk in scheduled], drafts)

    def _split(
        self,
        scheduled: Sequence[ScheduledTokens],
        accepted: Sequence[int],
        to_device: Callable[[np.ndarray], Tensor] | None,
    ) -> Iterator[StateCall]:
        """Divide a step after each token at which a snapshot is stored. Drafts after such a token stay in its part,
        because a state does not include them. to_device: as in `_Call.build`."""
        call = _Call(0)
        for chunk, num_accepted in zip(scheduled, accepted, strict=True):
            num_known = chunk.count - len(chunk.draft_ids)
            done = 0
            for position, snapshot in chunk.stored_snapshots:
                is_last = position == num_known
                end = chunk.count if is_last else position
                call.add(chunk, done, end, 0 if done else num_accepted, len(chunk.draft_ids) if is_last else 0)
                yield call.build(to_device, self._first_snapshot + snapshot)
                call = _Call(call.end)
                done = end
            if done < chunk.count:
                call.add(chunk, done, chunk.count, 0 if done else num_accepted, len(chunk.draft_ids))
        if call.slots:
            yield call.build(to_device, None)

    def _advance(self, chunk: ScheduledTokens) -> int:
        """Return how many drafts of the sequence's last step were accepted."""
        index = chunk.req_index
        is_new = chunk.start == 0  # the drafts that are kept are those of another sequence
        num_accepted = 0 if is_new or not self._num_drafts[index] else chunk.start - self._num_tokens[index]
        assert 0 <= num_accepted <= self._num_drafts[index], "a step must start after the last token or a kept draft"
        self._num_drafts[index] = len(chunk.draft_ids)
        self._num_tokens[index] = chunk.start + chunk.count - len(chunk.draft_ids)
        return num_accepted


def build_state_progress(
    max_num_seqs: int, caches: Sequence[Tensor], kv_cache_config: KVCacheConfig
) -> StateProgress | None:
    """None for models without states."""
    if not kv_cache_config.max_states:
        return None
    return StateProgress(max_num_seqs, caches, kv_cache_config.num_states)


@dataclass
class _Call:
    """A `StateCall` while it is being built."""

    first: int  # token of the step
    slots: list[int] = field(default_factory=list)
    query_starts: list[int] = field(default_factory=lambda: [0])
    context_lens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + self.query_starts[-1]

    def add(self, chunk: ScheduledTokens, first: int, end: int, accepted: int, new: int) -> None:
        """Add tokens of a sequence. first, end: counted in the chunk."""
        self.slots.append(chunk.req_index)
        self.query_starts.append(self.query_starts[-1] + end - first)
        self.context_lens.append(chunk.start + end)
        self.accepted.append(accepted)
        self.new.append(new)

    def build(self, to_device: Callable[[np.ndarray], Tensor] | None, snapshot: int | None) -> StateCall:
        """to_device: for lengths on the device; None: kernels read those on the host."""
        lengths = None
        if to_device is not None:
            starts, contexts = (to_device(np.array(one, np.int32)) for one in (self.query_starts, self.context_lens))
            lengths = Lengths(starts, contexts)
        drafts = _count_drafts(self.accepted, self.new)
        tokens = range(self.first, self.end)
        return StateCall(tokens, self.slots, self.query_starts, self.context_lens, drafts, lengths, snapshot)


def _count_drafts(accepted: list[int], new: list[int]) -> DraftCounts | None:
    """None if there are none."""
    return DraftCounts(accepted, new) if any(accepted) or any(new) else None
