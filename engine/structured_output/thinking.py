"""The thinking budget: count a request's reasoning tokens, and decide when its reasoning must end."""

from __future__ import annotations

import codecs
import enum
from collections.abc import Callable, Sequence

from serve_llm.common.types import ThinkingBudget

MAX_CHARACTER_BYTES = 4  # UTF-8


class _Region(enum.Enum):
    START = enum.auto()  # only whitespace was written, or what may become the opening delimiter
    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()


class ThinkingTracker:
    """Follows the output ids of one request into and out of its reasoning region, like the parser of its dialect.

    Delimiters are found in the text of the ids, because a model may write them with other ids than the tokenizer does.
    """

    def __init__(self, budget: ThinkingBudget, decode: Callable[[list[int]], bytes]) -> None:
        """decode: the text of ids, special tokens included."""

        def decode_all(delimiters: Sequence[Sequence[int]]) -> list[bytes]:
            return [text for ids in delimiters if (text := decode(list(ids)))]

        self._budget = budget
        self._decode = decode
        self._opens = decode_all(budget.open_ids)
        closes = dict.fromkeys(decode_all([budget.close_ids, *budget.other_close_ids]), _Region.CONTENT)
        calls = dict.fromkeys(decode_all(budget.call_open_ids), _Region.CALL)
        # By region: the delimiters that end it, and the regions that follow them.
        self._next_regions: dict[_Region, dict[bytes, _Region]] = {
            _Region.REASONING: calls | closes if budget.ends_at_call else closes,
            _Region.CONTENT: {},
            _Region.CALL: {},
        }
        if budget.repeats:
            self._next_regions[_Region.CONTENT] = calls | dict.fromkeys(self._opens, _Region.REASONING)
            self._next_regions[_Region.CALL] = dict.fromkeys(decode_all(budget.call_close_ids), _Region.CONTENT)
        delimiters = [*self._opens, *(one for found in self._next_regions.values() for one in found)]
        self._max_kept = max([MAX_CHARACTER_BYTES, *map(len, delimiters)])
        self._region = _Region.REASONING if budget.is_open else _Region.START
        self._num_tokens = 0  # inside the region
        self._text = b""  # the end of the output, as far back as a delimiter or a character can reach
        self._ids: list[int] = []  # the latest ids inside the region

    def push(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._text += self._decode([token_id])
            if self._region is _Region.REASONING:
                self._num_tokens += 1
                self._ids = [*self._ids, token_id][-len(self._budget.close_ids) :]
            if self._region is _Region.START:
                self._pass_start()
            if self._region is not _Region.START:
                while self._pass_delimiter():
                    pass
                self._text = self._text[-self._max_kept :]

    def find_close_ids(self) -> list[int]:
        """Return the ids that must come next because the budget is used up: the rest of the closing delimiter.

        A character of several tokens is completed first.
        """
        if self._region is not _Region.REASONING or self._num_tokens < self._budget.num_tokens:
            return []
        if _ends_inside_character(self._text):
            return []
        close_ids = list(self._budget.close_ids)
        for count in range(len(close_ids) - 1, 0, -1):
            if self._ids[-count:] == close_ids[:count]:
                return close_ids[count:]
        return close_ids

    def _pass_start(self) -> None:
        """Enter the region if the text begins with an opening delimiter, or the content once it can no longer do so."""
        text = self._text.lstrip()
        opening = next((one for one in self._opens if text.startswith(one)), None)
        if opening is not None:
            self._enter(_Region.REASONING, text[len(opening) :])
        elif not any(one.startswith(text) for one in self._opens):
            self._region = _Region.CONTENT
        else:
            self._text = text  # so that whitespace does not accumulate

    def _pass_delimiter(self) -> bool:
        """Enter the next region at the first delimiter of the text, and drop the text up to there."""
        found = [
            (self._text.index(one) + len(one), region)
            for one, region in self._next_regions[self._region].items()
            if one in self._text
        ]
        if not found:
            return False
        end, region = min(found, key=lambda one: one[0])
        self._enter(region, self._text[end:])
        return True

    def _enter(self, region: _Region, text: bytes) -> None:
        """text: the text after the delimiter."""
        self._region = region
        self._text = text
        self._ids = []


def _ends_inside_character(text: bytes) -> bool:
    """Whether the last bytes begin a UTF-8 character without completing it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(text)
    pending, _ = decoder.getstate()
    return bool(pending)
