"""Finding delimiters in text that is still being written."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from serve_llm.server.dialects.dialect import Delimiter, get_forms

_SPACE = re.compile(r"\s*")


class Incomplete(enum.Enum):
    """Result of reading text whose meaning depends on what follows."""

    INCOMPLETE = 0


INCOMPLETE: Final = Incomplete.INCOMPLETE


class Found(NamedTuple):
    label: str
    start: int
    end: int


class DelimiterSet:
    """Delimiters under labels. The leftmost wins, of those that begin together the longest.

    Whitespace inside a delimiter stands for any whitespace or none, whitespace around it does not count. Delimiters
    that are empty or whitespace are left out.
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

    def match(self, text: str, start: int, final: bool) -> Found | Incomplete | None:
        """The longest delimiter at `start`. final: the text is complete."""
        best: Found | None = None
        for label, words in self._forms:
            end = _match_words(text, start, words)
            if end is INCOMPLETE:
                if not final:
                    return INCOMPLETE
            elif end is not None and (best is None or end > best.end):
                best = Found(label, start, end)
        return best

    def find(self, text: str, start: int, final: bool) -> Found | int:
        """The first delimiter from `start` on; if there is none, the position from which text may still become one."""
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


def skip_space(text: str, start: int) -> int:
    """The position of the first character from `start` on that is no whitespace, or the end."""
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def _match_words(text: str, start: int, words: list[str]) -> int | Incomplete | None:
    """The end of words with any whitespace between them."""
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
