"""Find delimiters in text that is still being written, and determine which of a dialect's delimiters apply where."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from serve_llm.server.dialects.dialect import CallFormat, Delimiter, Dialect, get_forms, get_written_form

_SPACE = re.compile(r"\s*")


class Incomplete(enum.Enum):
    """The result of reading text whose meaning depends on what follows."""

    INCOMPLETE = 0


INCOMPLETE: Final = Incomplete.INCOMPLETE


class DelimiterMatch(NamedTuple):
    label: str
    start: int
    end: int


class DelimiterSet:
    """Labelled delimiters. The leftmost one wins; of those that begin at the same position, the longest one.

    Whitespace inside a delimiter matches any whitespace or none; whitespace around it is ignored. Empty delimiters and
    those that are only whitespace are left out.
    """

    def __init__(self, delimiters: Iterable[tuple[str, Delimiter]]) -> None:
        """delimiters: label and delimiter. A label may occur several times."""
        self._forms: list[tuple[str, list[str]]] = []
        for label, delimiter in delimiters:
            self._forms += [(label, form.split()) for form in get_forms(delimiter) if form.strip()]
        first = "".join(sorted({re.escape(words[0][0]) for _, words in self._forms}))
        self._candidate = re.compile(f"[{first}]" if first else r"(?!)")

    def __bool__(self) -> bool:
        return bool(self._forms)

    def is_absent(self, text: str) -> bool:
        """Whether no delimiter begins in a text."""
        return self._candidate.search(text) is None

    def match(self, text: str, start: int, final: bool) -> DelimiterMatch | Incomplete | None:
        """Return the longest delimiter at `start`. final: the text is complete."""
        best: DelimiterMatch | None = None
        for label, words in self._forms:
            end = _match_words(text, start, words)
            if end is INCOMPLETE:
                if not final:
                    return INCOMPLETE
            elif end is not None and (best is None or end > best.end):
                best = DelimiterMatch(label, start, end)
        return best

    def find(self, text: str, start: int, final: bool) -> DelimiterMatch | int:
        """Return the first delimiter from `start` on; if there is none, the position from which text may still become
        one."""
        while True:
            candidate = self._candidate.search(text, start)
            if candidate is None:
                return len(text)
            found = self.match(text, candidate.start(), final)
            if found is INCOMPLETE:
                return candidate.start()
            if found is not None:
                return found
            start = candidate.start() + 1


class TurnDelimiters:
    """The delimiters that apply in each state of the parser."""

    def __init__(self, dialect: Dialect, calls: CallFormat | None, spelled_ends: Sequence[str] | None) -> None:
        """calls: None if calls are not parsed. spelled_ends: see `DialectParser`."""
        pure_ends = dialect.list_pure_ends()
        ends = [("end", end) for end in pure_ends if spelled_ends is None or end in spelled_ends]
        closing_ends = [("skip", end) for end in dialect.ends if end not in pure_ends]
        content = dialect.content
        content_open = [] if content is None else [("content", content.open)]
        reasoning = dialect.reasoning
        reasoning_open = [] if reasoning is None else [("reasoning", reasoning.open)]
        reasoning_close = [] if reasoning is None else [("close", reasoning.close)]
        first: list[tuple[str, Delimiter]] = []
        if calls is not None and not calls.is_bare:
            has_section = any(form.strip() for form in get_forms(calls.section_open))
            first = [("call", calls.section_open if has_section else calls.open)]
        call_close = [] if calls is None else [("close", calls.close)]
        section_close = [] if calls is None else [("close", calls.section_close)]
        outside = [("skip", dialect.start), *closing_ends, *first, *content_open]
        repeats = reasoning is not None and reasoning.repeats
        ends_at_call = reasoning is not None and reasoning.ends_at_call
        self._start = DelimiterSet(outside)
        self._start_with_reasoning = DelimiterSet([*outside, *reasoning_open])
        self.outside = DelimiterSet([*outside, *(reasoning_open if repeats else []), *ends])
        self.message_close = DelimiterSet([] if content is None else [("close", content.close)])
        self.reasoning_end = DelimiterSet([*reasoning_close, *(first if ends_at_call else [])])
        self.call_close = DelimiterSet(call_close)
        self.section_close = DelimiterSet(section_close)
        self.separator = DelimiterSet([] if calls is None else [("separator", calls.separator)])
        self.call_end = DelimiterSet([*call_close, *section_close, *first])

    def get_start(self, can_reason: bool) -> DelimiterSet:
        return self._start_with_reasoning if can_reason else self._start


def get_edge_after(delimiter: Delimiter) -> str:
    """Return the whitespace at the end of a delimiter's written form."""
    form = get_written_form(delimiter)
    return form[len(form.rstrip()) :]


def get_edge_before(delimiter: Delimiter) -> str:
    form = get_written_form(delimiter)
    return form[: len(form) - len(form.lstrip())]


def skip_space(text: str, start: int) -> int:
    """Return the position of the first non-whitespace character from `start` on, or the end."""
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def _match_words(text: str, start: int, words: list[str]) -> int | Incomplete | None:
    """Return the end of words with any whitespace between them."""
    position = start
    for number, word in enumerate(words):
        if number:
            position = skip_space(text, position)
        if text.startswith(word, position):
            position += len(word)
        elif word.startswith(text[position : position + len(word)]):
            return INCOMPLETE
        else:
            return None
    return position
