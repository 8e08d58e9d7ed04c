"""The ids that a running request may generate next: those that its grammar allows, and forced ones."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

from serve_llm.common.grammar import matcher_error
from serve_llm.common.types import Sampling
from serve_llm.engine.structured_output.thinking import ThinkingTracker

if TYPE_CHECKING:  # the engine starts workers before it loads torch
    from serve_llm.engine.sampling.grammar_mask import Mask

COSTLY_SECONDS = 0.002  # a request whose last mask took longer is scheduled only when its next one is ready


class ConstraintState:
    """A request's matcher and thinking budget after the output so far, and the ids that they force next.

    Forced ids are the tokenizer's own tokens of the only text that the grammar allows, or the end of reasoning whose
    budget is used up. They are the same whether they are sampled one by one or appended at once, so both give the same
    output.
    """

    def __init__(
        self,
        matcher: LLMatcher | None,
        tokenizer: LLTokenizer,
        vocab_size: int,
        sampling: Sampling,
        output_ids: Sequence[int],
    ) -> None:
        """matcher: at the start of the text; this object owns it. None: there is only a budget."""
        self.matcher = matcher
        self.sampling = sampling
        self._banned = {word[0] for word in sampling.bad_words_ids if len(word) == 1}
        has_longer_words = any(len(word) > 1 for word in sampling.bad_words_ids)
        self._may_take_forced = not sampling.allowed_token_ids and not has_longer_words
        self.num_output = 0
        self.error = ""
        self.has_ended = False  # by a stop id
        self.forced_ids: deque[int] = deque()
        # The mask of the next id; None: every id is allowed. Until it is filled, nothing else may touch this object.
        self.mask: Future[Mask] | None = None
        self.mask_seconds: float | None = None  # processor time of the last mask; None before the first one
        self._thinking: ThinkingTracker | None = None
        if sampling.thinking is not None:
            self._thinking = ThinkingTracker(sampling.thinking, tokenizer.decode_bytes)
        self._vocab_size = vocab_size
        self._end_ids = frozenset((*sampling.stop_token_ids, *tokenizer.eos_tokens))
        self._consume(output_ids)

    @property
    def needs_mask(self) -> bool:
        """Whether the next id is restricted."""
        return self.matcher is not None or bool(self.forced_ids)

    @property
    def is_costly(self) -> bool:
        return self.mask_seconds is not None and self.mask_seconds > COSTLY_SECONDS

    @property
    def is_held(self) -> bool:
        """Whether the request must not be scheduled yet, so that others do not wait for its mask."""
        return self.is_costly and self.mask is not None and not self.mask.done()

    @property
    def is_complete(self) -> bool:
        """Whether the text satisfies the grammar and nothing can follow."""
        if self.matcher is None or self.error:
            return False
        return self.matcher.is_stopped() and self.matcher.is_accepting()

    def advance(self, token_id: int) -> None:
        """Process a sampled id. Sets `error` if the grammar does not allow it."""
        if token_id in self.sampling.stop_token_ids and self.num_output + 1 >= self.sampling.min_tokens:
            self.num_output += 1  # the text ends here, whether or not the grammar knows this id
            self.has_ended = True
            self.forced_ids.clear()
            return
        self._consume([token_id])

    def copy(self) -> ConstraintState:
        """Return an independent copy. Copying a matcher takes a microsecond."""
        other = copy.copy(self)
        other.matcher = None if self.matcher is None else self.matcher.deep_copy()
        other.forced_ids = deque(self.forced_ids)
        other.mask = None
        other._thinking = copy.copy(self._thinking)
        return other

    def take_forced(self) -> list[int]:
        """Process all forced ids and return them; returns none if the request's restrictions on ids may forbid one."""
        taken: list[int] = []
        if not self._may_take_forced:
            return taken
        while self.forced_ids and self._banned.isdisjoint(self.forced_ids):
            ids = list(self.forced_ids)
            taken += ids
            self._consume(ids)
        return taken

    def _consume(self, ids: Sequence[int]) -> None:
        self.num_output += len(ids)
        if self._thinking is not None:
            self._thinking.push(ids)
        if self.matcher is not None and ids and not self.matcher.consume_tokens(list(ids)):
            self.error = self.error or matcher_error(self.matcher)
            self.forced_ids.clear()
            return
        for _ in range(min(len(ids), len(self.forced_ids))):
            self.forced_ids.popleft()
        if not self.forced_ids:
            self.forced_ids.extend(self._find_forced())

    def _is_allowed(self, ids: list[int]) -> bool:
        """Whether the grammar allows these ids next. Inside a call or a character, it allows no end of the
        reasoning."""
        return self.matcher is None or self.matcher.validate_tokens(ids) == len(ids)

    def _find_forced(self) -> list[int]:
        if self._thinking is not None:
            close_ids = self._thinking.find_close_ids()
            if close_ids and self._is_allowed(close_ids):
                return close_ids
        if self.matcher is None or self.matcher.is_stopped():
            return []
        forced: list[int] = []
        for token_id in self.matcher.compute_ff_tokens():
            if token_id in self._end_ids or token_id >= self._vocab_size:
                break
            forced.append(token_id)
        return forced
