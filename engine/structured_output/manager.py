"""The grammars of running requests: which ids each allows next, and when its text is complete.

Runs beside the scheduler, in the engine's process. A matcher's state is a function of the output ids alone, so it is
rebuilt from them when a request is admitted again after a preemption or a restart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLMatcher

from serve_llm.common.grammar import matcher_error
from serve_llm.common.types import EngineCoreRequest
from serve_llm.engine.pending_requests import WAIT_SECONDS, PendingRequests
from serve_llm.engine.scheduler.output import MaskSource, NewRequestData, RunnerOutput, SchedulerOutput
from serve_llm.engine.structured_output.builder import MatcherBuilder
from serve_llm.engine.structured_output.masks import MaskFiller, wait_for_any
from serve_llm.engine.structured_output.state import ConstraintState

if TYPE_CHECKING:  # the engine starts workers before it loads torch
    from serve_llm.engine.sampling.grammar_mask import Mask


class StructuredOutputManager:
    """Use it only in the engine's thread."""

    def __init__(
        self, compiler: MatcherBuilder, vocab_size: int, jump_forward: bool, fill_cheap_masks_at_once: bool
    ) -> None:
        """vocab_size: number of logits. jump_forward: append forced ids at once instead of sampling them one by one.
        fill_cheap_masks_at_once: fill masks known to be cheap before the step instead of during it."""
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._jump_forward = jump_forward
        self._filler = MaskFiller(vocab_size, fill_cheap_masks_at_once)
        self.compiling = PendingRequests(_find_error)
        self._states: dict[int, ConstraintState] = {}  # by req_index
        self._held: dict[int, Future[LLMatcher | None]] = {}  # by id, for requests that have not ended

    def begin(self, request: EngineCoreRequest) -> None:
        """Start to compile a request's grammar; the request waits in `compiling`."""
        future = self._compiler.compile(request.sampling.grammar)
        self._held[request.id] = future  # so that no step compiles it again after a preemption
        self.compiling.add(request, future)

    def end(self, request_id: int) -> None:
        """Record that the request has ended or been aborted. May be called for any request."""
        self._held.pop(request_id, None)
        self.compiling.abort(request_id)

    @property
    def costly_indices(self) -> set[int]:
        """Request indices whose grammars are costly: masks for their drafts would delay others."""
        return {index for index, state in self._states.items() if state.is_costly}

    @property
    def held_indices(self) -> set[int]:
        """Request indices that must not be scheduled yet: their grammars are costly and their masks are not ready."""
        return {index for index, state in self._states.items() if state.is_held}

    def wait_for_held(self) -> None:
        """Wait briefly until a held request can be scheduled."""
        wait_for_any([state for state in self._states.values() if state.is_held], WAIT_SECONDS)

    def prepare(self, scheduled: SchedulerOutput) -> tuple[SchedulerOutput, MaskSource | None]:
        """Return the step with the rows that need masks, and a function that waits for these masks."""
        new_states = {
            new.req_index: self._build_state(new) for new in scheduled.new_requests if new.sampling.is_constrained
        }
        for new in scheduled.new_requests:
            self._states.pop(new.req_index, None)
        self._states.update(new_states)
        if new_states:
            self._filler.start(list(new_states.values()), self._compiler.tokenizer)
        if not self._states:
            return scheduled, None
        rows: list[int] = []
        masks: list[Future[Mask]] = []
        first_rows = list(accumulate((chunk.num_samples for chunk in scheduled.scheduled), initial=0))
        for index, state in self._find_sampled(scheduled):
            if state.mask is None:
                continue
            draft_ids = scheduled.scheduled[index].draft_ids
            masks.append(state.mask)
            masks += self._filler.start_drafts(state, draft_ids, self._compiler.tokenizer)
            rows += range(first_rows[index], first_rows[index] + 1 + len(draft_ids))
        if not masks:
            return scheduled, None

        def wait_for_masks() -> bytes:
            return b"".join(mask.result().tobytes() for mask in masks)

        return msgspec.structs.replace(scheduled, masked_rows=rows), wait_for_masks

    def advance(self, scheduled: SchedulerOutput, results: Sequence[RunnerOutput]) -> None:
        """Process the sampled ids. Adds the ids that must follow them, and marks results that complete their text, or
        whose grammar has failed."""
        advanced: list[ConstraintState] = []
        for index, state in self._find_sampled(scheduled):
            result = results[index]
            if result.error is None and result.token_id is not None and not state.error:
                self._advance(state, result)
                advanced.append(state)
            if state.error:
                result.token_id = None
                result.error = f"the grammar cannot be followed any further: {state.error}"
        if advanced:
            self._filler.start(advanced, self._compiler.tokenizer)

    def _advance(self, state: ConstraintState, result: RunnerOutput) -> None:
        """Process the ids of a result, up to the one that ends the text, and add those that must follow."""
        for number, token_id in enumerate(result.accepted_ids):
            state.advance(token_id)
            # Without a grammar, ids after the end of the budget were sampled freely; now the end is forced.
            is_budget_spent = state.matcher is None and bool(state.forced_ids)
            if state.has_ended or state.is_complete or state.error or is_budget_spent:
                result.cut(number)
                break
        else:
            assert result.token_id is not None
            state.advance(result.token_id)
        if self._jump_forward:
            result.forced_ids = tuple(state.take_forced())
        result.ends_text = state.is_complete

    def _find_sampled(self, scheduled: SchedulerOutput) -> list[tuple[int, ConstraintState]]:
        """Return the constrained chunks, by index, after which the step samples."""
        if not self._states:
            return []
        found = []
        for index, chunk in enumerate(scheduled.scheduled):
            state = self._states.get(chunk.req_index)
            if state is not None and chunk.sample:
                found.append((index, state))
        return found

    def retain(self, indices: Collection[int]) -> None:
        """Forget the requests at all other indices."""
        if self._states:
            self._states = {index: state for index, state in self._states.items() if index in indices}

    def _build_state(self, new: NewRequestData) -> ConstraintState:
        """Build the state after the output so far."""
        template = self._compiler.compile(new.sampling.grammar).result()
        matcher = None if template is None else template.deep_copy()
        output_ids = new.token_ids[new.num_prompt :]
        return ConstraintState(matcher, self._compiler.tokenizer, self._vocab_size, new.sampling, output_ids)


def _find_error(future: Future[LLMatcher | None]) -> str:
    problem = future.exception()
    matcher = future.result() if problem is None else None
    error = str(problem or "") if matcher is None else matcher_error(matcher)
    return f"the grammar cannot be compiled: {error}" if error else ""
