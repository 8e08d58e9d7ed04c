"""The budget of a request's reasoning tokens: how many it has had, and when its reasoning must close."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serve_llm.common.types import ThinkingBudget


class ThinkingTracker:
    """Follows the output ids of one request in and out of its reasoning region.

    Delimiters are found in the text of the ids, because a model may write them with other ids than the tokenizer does.
    """

    def __init__(self, budget: ThinkingBudget, decode: Callable[[list[int]], bytes]) -> None:
        """decode: the text of ids, special tokens included."""
        self._budget = budget
        self._decode = decode
        self._open = decode(list(budget.open_ids))
        self._ends = [decode(list(ids)) for ids in (budget.close_ids, *budget.end_ids)]
        self._max_delimiter = max(len(delimiter) for delimiter in (self._open, *self._ends))
        self._is_open = budget.is_open
        self._num_tokens = 0  # inside the region
        self._text = b""  # the end of the output, as much as a delimiter can reach back
        self._ids: list[int] = []  # the latest ones inside the region

    def push(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._text += self._decode([token_id])
            if self._is_open:
                self._num_tokens += 1
                self._ids = [*self._ids, token_id][-len(self._budget.close_ids) :]
            while self._pass_delimiter():
                pass
            self._text = self._text[-self._max_delimiter :]

    def find_close_ids(self) -> list[int]:
        """The ids that must come next because the budget is spent: what is missing of the closing delimiter."""
        if not self._is_open or self._num_tokens < self._budget.num_tokens:
            return []
        close_ids = list(self._budget.close_ids)
        for count in range(len(close_ids) - 1, 0, -1):
            if self._ids[-count:] == close_ids[:count]:
                return close_ids[count:]
        return close_ids

    def _pass_delimiter(self) -> bool:
        """Enter or leave the region at the first delimiter of the text, and drop the text up to there."""
        delimiters = self._ends if self._is_open else [self._open]
        ends = [self._text.index(one) + len(one) for one in delimiters if one and one in self._text]
        if not ends:
            return False
        self._text = self._text[min(ends) :]
        self._is_open = not self._is_open
        self._ids = []
        return True
