"""Which tokens the states of linear attention include, and which drafts wait to be accepted.

A state includes no drafts: the layers keep their inputs, see `kernels.delta_rule`. Where the next step of the sequence
starts says how many of them were accepted, so ranks need no message about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from serve_llm.engine.model.inputs import StepInputs
from serve_llm.engine.scheduler.output import ScheduledTokens
from serve_llm.kernels.delta_rule import DraftCounts


class StateProgress:
    """How many tokens of each request its states include. Owned by a model runner."""

    def __init__(self, max_num_seqs: int) -> None:
        self._num_tokens = [0] * max_num_seqs  # by request index, as in the tensors of states
        self._num_drafts = [0] * max_num_seqs  # that the layers keep

    def begin_step(self, inputs: StepInputs, scheduled: Sequence[ScheduledTokens]) -> StepInputs:
        """Add the slots of the sequences' states and the drafts to the inputs of a step, which the layers then compute
        once."""
        accepted = [self._advance(chunk) for chunk in scheduled]
        new = [len(chunk.draft_ids) for chunk in scheduled]
        slots = [chunk.req_index for chunk in scheduled]
        drafts = DraftCounts(accepted, new) if any(accepted) or any(new) else None
        return replace(inputs, state_slots=slots, state_drafts=drafts)

    def _advance(self, chunk: ScheduledTokens) -> int:
        """Return how many drafts of the sequence's last step were accepted."""
        index = chunk.req_index
        is_new = chunk.start == 0  # the drafts that are kept are those of another sequence
        num_accepted = 0 if is_new or not self._num_drafts[index] else chunk.start - self._num_tokens[index]
        assert 0 <= num_accepted <= self._num_drafts[index], "a step must start after the last token or a kept draft"
        self._num_drafts[index] = len(chunk.draft_ids)
        self._num_tokens[index] = chunk.start + chunk.count - len(chunk.draft_ids)
        return num_accepted
