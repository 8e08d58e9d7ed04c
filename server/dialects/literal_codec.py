"""Arguments in literals of a language other than JSON: Python's, or an object with bare keys and special quotes.

A tokenizing automaton with a stack of containers. Strings are passed on as they arrive, all other tokens when they are
complete.
"""

from __future__ import annotations

import ast
import json
import re

from serve_llm.server.dialects.delimiters import INCOMPLETE, Incomplete, skip_space
from serve_llm.server.dialects.json_codec import Outcome, ReadResult, escape_json

BARE_KEY = re.compile(r"[^\W\d][\w.$-]*")
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_SCALAR = re.compile(r"[\w.+-]+")
_CONSTANTS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class _Container:
    """An open list, tuple, object, or the arguments themselves."""

    def __init__(self, closer: str, key_mark: str) -> None:
        """key_mark: between key and value; "" in lists."""
        self.closer = closer
        self.key_mark = key_mark
        self.keys: set[str] = set()
        self.num_items = 0
        self.is_dropped = False  # whether the member being read repeats a key


class LiteralReader:
    """Reads arguments up to their closing bracket. Of members with the same key, the first one counts."""

    def __init__(self, quote: str | None) -> None:
        """quote: around strings, without escapes; then the arguments are an object in braces. None: Python's keyword
        arguments, after the opening parenthesis."""
        self._quote = quote
        self._stack: list[_Container] = [] if quote is not None else [_Container(")", "=")]
        self._parts: list[str] = [] if quote is not None else ["{"]
        self._string_end: str | None = None  # the quote that ends the string being read
        self._is_key_string = False
        self._key: list[str] = []
        self._expects_value = quote is not None
        self._has_item = False  # whether the last thing read is a complete member or item

    def read(self, text: str, start: int, final: bool) -> ReadResult:
        position = start
        while True:
            step = self._read_string(text, position) if self._string_end else self._read_token(text, position, final)
            if step is None or step is INCOMPLETE:
                outcome = Outcome.MORE if step is INCOMPLETE else Outcome.BROKEN
                return ReadResult(position, self._take(), outcome)
            if step == position and self._string_end:
                return ReadResult(position, self._take(), Outcome.MORE)
            position = step
            if not self._stack:
                return ReadResult(position, self._take(), Outcome.DONE)

    def _take(self) -> str:
        json_text = "".join(self._parts)
        self._parts = []
        return json_text

    def _write(self, json_text: str) -> None:
        if not any(container.is_dropped for container in self._stack):
            self._parts.append(json_text)

    def _read_token(self, text: str, start: int, final: bool) -> int | Incomplete | None:
        """Return the end of the next token; None if it is not allowed here."""
        start = skip_space(text, start)
        if start == len(text):
            return INCOMPLETE
        char = text[start]
        if not self._stack:
            return self._open(char, start)
        container = self._stack[-1]
        if self._has_item:
            if char == ",":
                self._has_item = False
                return start + 1
            return self._close(start) if char == container.closer else None
        if not self._expects_value and char == container.closer:
            return self._close(start)
        if container.key_mark and not self._expects_value:
            return self._read_key(text, start)
        if not container.key_mark and not self._expects_value:
            if char == container.closer:
                return self._close(start)
            self._write(", " if container.num_items else "")
            container.num_items += 1
            self._expects_value = True
        return self._read_value(text, start, final)

    def _read_key(self, text: str, start: int) -> int | Incomplete | None:
        quote = self._find_quote(text, start)
        if quote is INCOMPLETE:
            return INCOMPLETE
        if quote is not None and self._stack[-1].key_mark == ":":
            self._string_end = quote
            self._is_key_string = True
            self._key = []
            return start + len(quote)
        found = BARE_KEY.match(text, start)
        if found is None:
            return None
        if found.end() == len(text):
            return INCOMPLETE
        return self._end_key(text, found[0], found.end())

    def _end_key(self, text: str, key: str, end: int) -> int | Incomplete | None:
        container = self._stack[-1]
        end = skip_space(text, end)
        if end == len(text):
            return INCOMPLETE
        if text[end] != container.key_mark:
            return None
        container.is_dropped = key in container.keys
        container.keys.add(key)
        self._write(f'{", " if container.num_items else ""}"{escape_json(key)}": ')
        container.num_items += not container.is_dropped
        self._expects_value = True
        return end + 1

    def _read_value(self, text: str, start: int, final: bool) -> int | Incomplete | None:
        char = text[start]
        if char in _CLOSERS and not (self._quote is not None and char == "("):
            return self._open(char, start)
        quote = self._find_quote(text, start)
        if quote is INCOMPLETE:
            return INCOMPLETE
        if quote is not None:
            self._string_end = quote
            self._write('"')
            return start + len(quote)
        found = _SCALAR.match(text, start)
        if found is None:
            return None
        if found.end() == len(text) and not final:
            return INCOMPLETE
        scalar = _write_scalar(found[0])
        if scalar is None:
            return None
        self._write(scalar)
        self._end_item()
        return found.end()

    def _find_quote(self, text: str, start: int) -> str | Incomplete | None:
        """Return the quote that begins a string at `start`."""
        if text[start] == '"' or (text[start] == "'" and self._quote is None):
            return text[start]
        if self._quote is None:
            return None
        beginning = text[start : start + len(self._quote)]
        if beginning == self._quote:
            return self._quote
        return INCOMPLETE if self._quote.startswith(beginning) else None

    def _open(self, bracket: str, start: int) -> int | None:
        if not self._stack and bracket != "{":
            return None
        is_object = bracket == "{"
        self._write("{" if is_object else "[")
        self._stack.append(_Container(_CLOSERS[bracket], ":" if is_object else ""))
        self._expects_value = False
        self._has_item = False
        return start + 1

    def _close(self, start: int) -> int:
        container = self._stack.pop()
        self._write("}" if container.key_mark else "]")
        self._end_item()
        return start + 1

    def _end_item(self) -> None:
        self._expects_value = False
        self._has_item = True
        if self._stack:
            self._stack[-1].is_dropped = False

    def _read_string(self, text: str, start: int) -> int | Incomplete | None:
        """Continue to read a string; returns `start` if more text is needed."""
        assert self._string_end is not None
        has_escapes = self._string_end in ("'", '"')
        mark = self._string_end[0]
        position = start
        while position < len(text):
            char = text[position]
            if char == mark:
                if text.startswith(self._string_end, position):
                    return self._end_string(text, position)
                if self._string_end.startswith(text[position:]):
                    return position
            if char == "\\" and has_escapes:
                escape = _read_escape(text, position, self._quote is None)
                if escape is INCOMPLETE:
                    return position
                self._add_to_string(escape[0])
                position = escape[1]
                continue
            following = _find_any(text, position + 1, (mark, "\\") if has_escapes else (mark,))
            self._add_to_string(text[position:following])
            position = following
        return position

    def _end_string(self, text: str, position: int) -> int | Incomplete | None:
        assert self._string_end is not None
        end = position + len(self._string_end)
        if not self._is_key_string:
            self._string_end = None
            self._write('"')
            self._end_item()
            return end
        following = self._end_key(text, "".join(self._key), end)
        if following is INCOMPLETE:
            return position
        self._string_end = None
        self._is_key_string = False
        return following

    def _add_to_string(self, text: str) -> None:
        if self._is_key_string:
            self._key.append(text)
        else:
            self._write(escape_json(text))


def _find_any(text: str, start: int, marks: tuple[str, ...]) -> int:
    found = [position for mark in marks if (position := text.find(mark, start)) >= 0]
    return min(found, default=len(text))


def _write_scalar(text: str) -> str | None:
    """Return the JSON text of a constant or number; None if it is neither."""
    if constant := _CONSTANTS.get(text.lower()):
        return constant
    if _JSON_NUMBER.fullmatch(text):
        return text  # also if it is too large for Python
    try:
        value = ast.literal_eval(text.lstrip("+"))
        return json.dumps(value, allow_nan=False) if type(value) in (int, float) else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _read_escape(text: str, start: int, is_python: bool) -> tuple[str, int] | Incomplete:
    """Return the characters that a backslash at `start` stands for, and the end of the escape."""
    if start + 1 == len(text):
        return INCOMPLETE
    kind = text[start + 1]
    end = start + 2
    if kind in _HEX_LENGTHS and (is_python or kind == "u"):
        end += _HEX_LENGTHS[kind]
        digits = text[start + 2 : end]
        if not re.fullmatch("[0-9a-fA-F]*", digits):
            return text[start : start + 2], start + 2
        if len(digits) < _HEX_LENGTHS[kind]:
            return INCOMPLETE
        code = int(digits, 16)
        return (chr(code), end) if code <= 0x10FFFF else (text[start:end], end)
    if kind in "\\'\"/":
        return kind, end
    if kind in _ESCAPES:
        return _ESCAPES[kind], end
    return text[start:end], end
