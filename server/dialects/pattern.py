"""Read a regular expression for a delimiter as the texts that it matches.

Supports only what delimiters need: literal text, whitespace, alternatives, optional parts, and named groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, auto

from serve_llm.server.dialects.dialect import DialectError

_MAX_FORMS = 32
_MAX_CHARACTERS = 1000
_MAX_DEPTH = 8  # maximum nesting of groups
_ANCHORS = ("^", "$", r"\Z", r"\A")
_ESCAPES = {"n": "\n", "t": "\t"}
_ATOM = re.compile(r"\\.|\(\?P<\w+>|\(\?:|\(|.", re.DOTALL)
_QUANTIFIER = re.compile(r"(?:[*?]|\{0*,\d*\}|\{0+\}|(?P<required>\+|\{\d+(?:,\d*)?\}))[?+]?")


class NamedGroup(str):
    """The name of a named group."""


class _Space(Enum):
    """Whitespace, of any length."""

    OPTIONAL = auto()
    REQUIRED = auto()


Form = tuple[str, ...]  # texts and groups, in order
_Parts = tuple[str | _Space, ...]
_EMPTY: list[_Parts] = [()]


def read_pattern(pattern: str) -> list[Form]:
    """Return all texts that `pattern` matches, each as texts between named groups. Raises DialectError."""
    reader = _PatternReader(pattern)
    if len(pattern) > _MAX_CHARACTERS:
        raise reader.error()
    forms = reader.read_alternatives()
    if reader.position != len(pattern):
        raise reader.error()
    return [_join(form) for form in forms]


class _PatternReader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.position = 0
        self._depth = 0

    def error(self) -> DialectError:
        return DialectError(f"the pattern {self._pattern[:_MAX_CHARACTERS]!r} is more than a delimiter")

    def read_alternatives(self) -> list[_Parts]:
        """Read up to a closing parenthesis or the end."""
        forms = self._read_sequence()
        while self._pattern.startswith("|", self.position):
            self.position += 1
            forms = [*forms, *self._read_sequence()]
        return forms

    def _read_sequence(self) -> list[_Parts]:
        forms = _EMPTY
        while self.position < len(self._pattern) and self._pattern[self.position] not in "|)":
            atom = self._read_quantified()
            forms = [(*before, *after) for before in forms for after in atom]
            if len(forms) > _MAX_FORMS:
                raise self.error()
        return forms

    def _read_quantified(self) -> list[_Parts]:
        forms = self._read_atom()
        quantifier = _QUANTIFIER.match(self._pattern, self.position)
        if quantifier is None:
            return forms
        self.position = quantifier.end()
        if all(isinstance(part, _Space) or part.isspace() for form in forms for part in form):
            is_required = quantifier["required"] is not None and all(forms)
            return [(_Space.REQUIRED if is_required else _Space.OPTIONAL,)]
        if quantifier[0] != "?":
            raise self.error()
        return [*forms, ()]

    def _read_atom(self) -> list[_Parts]:
        found = _ATOM.match(self._pattern, self.position)
        assert found is not None
        atom = found[0]
        self.position = found.end()
        if atom in _ANCHORS:
            return _EMPTY
        if atom.startswith("(?P<"):
            self._skip_group()
            return [(NamedGroup(atom[4:-1]),)]
        if atom in ("(?:", "("):
            if atom == "(" and self._pattern.startswith("?", self.position):
                raise self.error()
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise self.error()
            forms = self.read_alternatives()
            self._close()
            return forms
        if atom.startswith("\\"):
            return self._read_escape(atom[1:])
        if atom in ".[":
            raise self.error()
        return [(atom,)]

    def _read_escape(self, char: str) -> list[_Parts]:
        if char == "s":
            return [(_Space.REQUIRED,)]
        if char in _ESCAPES:
            return [(_ESCAPES[char],)]
        if not char or char.isalnum():
            raise self.error()
        return [(char,)]

    def _skip_group(self) -> None:
        """Skip the content of a group, whatever it is."""
        depth = 1
        is_in_class = False
        while depth:
            if self.position >= len(self._pattern):
                raise self.error()
            char = self._pattern[self.position]
            if char == "\\":
                self.position += 1
            elif is_in_class:
                is_in_class = char != "]"
            elif char == "[":
                is_in_class = True
            elif char in "()":
                depth += 1 if char == "(" else -1
            self.position += 1

    def _close(self) -> None:
        if not self._pattern.startswith(")", self.position):
            raise self.error()
        self.position += 1
        self._depth -= 1


def _join(parts: _Parts) -> Form:
    """Join adjacent texts. Whitespace becomes a line break, or a space after a colon or comma.

    Optional whitespace at the end is left out.
    """
    return tuple(_merge(parts))


def _merge(parts: _Parts) -> Iterator[str]:
    text = ""
    for number, part in enumerate(parts):
        if isinstance(part, NamedGroup):
            if text:
                yield text
            text = ""
            yield part
        elif isinstance(part, _Space):
            if part is _Space.REQUIRED or number != len(parts) - 1:
                text += " " if text.endswith((":", ",")) else "\n"
        else:
            text += part
    if text:
        yield text
