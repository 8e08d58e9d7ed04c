"""Arguments between delimiters: `<parameter=city>Paris</parameter>`."""

from __future__ import annotations

import ast
import json
import re

from serve_llm.server.dialects.delimiters import (
    INCOMPLETE,
    DelimiterMatch,
    DelimiterSet,
    Incomplete,
    get_edge_after,
    get_edge_before,
    skip_space,
)
from serve_llm.server.dialects.dialect import Delimiter, TaggedCodec
from serve_llm.server.dialects.json_codec import JsonScanner, Outcome, ReadResult, decode_json, escape_json
from serve_llm.server.dialects.schema_types import find_argument_types, find_type
from serve_llm.server.dialects.tool import Tool

# A number as JSON or Python writes it.
NUMBER = r"[-+]?(0[xXoObB][0-9a-fA-F_]+|[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9_]+)?|\.[0-9][0-9_]*([eE][-+]?[0-9_]+)?)"
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


class TaggedReader:
    """Writes the arguments' object. Of arguments with the same name, the first one counts.

    Strings are passed on as they arrive, other values when they are complete. A value that has none of the types in its
    schema is a string.
    """

    def __init__(self, codec: TaggedCodec, close: Delimiter, tool: Tool | None) -> None:
        """close: ends the call."""
        self._codec = codec
        self._tool = tool
        self._between = DelimiterSet([("key", codec.key_open), ("close", close)])
        self._key_end = DelimiterSet([("end", codec.key_end), ("json", codec.json_key_end)])
        self._value_end = DelimiterSet([("end", codec.value_end)])
        self._keys: set[str] = set()
        self._value: _Value | None = None
        self._is_in_key = False

    def read(self, text: str, start: int, final: bool) -> ReadResult:
        parts: list[str] = []
        position = start
        while True:
            if self._value is not None:
                end = self._value.read(text, position, final, parts)
                if end is INCOMPLETE:
                    return ReadResult(self._value.position, "".join(parts), Outcome.MORE)
                self._value = None
                position = end
            elif self._is_in_key:
                found = self._key_end.find(text, position, final)
                if isinstance(found, int):
                    return ReadResult(position, "".join(parts), Outcome.MORE)
                self._is_in_key = False
                key = text[position : found.start].strip()
                position = found.end
                self._value = self._begin_value(key, found.label, parts)
            else:
                following = skip_space(text, position)
                if following == len(text):
                    return ReadResult(following, "".join(parts), Outcome.MORE)
                match = self._between.match(text, following, final)
                if match is INCOMPLETE:
                    return ReadResult(following, "".join(parts), Outcome.MORE)
                if match is None:
                    return ReadResult(following, "".join(parts), Outcome.BROKEN)
                position = match.end
                if match.label == "close":
                    if final and self._between.match(text, following, final=False) is INCOMPLETE:
                        position = len(text)  # the turn was truncated in a longer form of the delimiter
                    parts.append("}" if self._keys else "{}")
                    return ReadResult(position, "".join(parts), Outcome.DONE)
                self._is_in_key = True

    def _begin_value(self, key: str, label: str, parts: list[str]) -> _Value:
        types = find_argument_types(self._tool, key)
        key_end = self._codec.key_end
        if self._codec.json_key_end:
            types = frozenset(("string",)) if label == "end" else frozenset()
            key_end = self._codec.key_end if label == "end" else self._codec.json_key_end
        is_first = key not in self._keys
        if is_first:
            parts.append(f'{", " if self._keys else "{"}"{escape_json(key)}": ')
            self._keys.add(key)
        return _Value(
            types, self._value_end, get_edge_after(key_end), get_edge_before(self._codec.value_end), not is_first
        )


class _Value:
    """One value that is being read. `position`: everything before it has been read."""

    def __init__(self, types: frozenset[str], value_end: DelimiterSet, lead: str, trail: str, is_dropped: bool) -> None:
        """lead, trail: whitespace at both ends that belongs to the delimiters, if present."""
        self._types = types
        self._value_end = value_end
        self._lead = lead
        self._trail = trail
        self._is_dropped = is_dropped
        self._is_raw = types == {"string"}
        self._has_begun = False
        self.position = 0
        # For a value that is not raw, whose position does not move; the lengths count from there.
        self._scanner = JsonScanner()
        self._num_scanned = 0
        self._num_passed = 0  # up to the end of the last delimiter inside the value
        self._first_end: tuple[int, int] | None = None  # the first delimiter, if it is in a JSON string

    def read(self, text: str, start: int, final: bool, parts: list[str]) -> int | Incomplete:
        """Return the end of the value and its delimiter. Adds JSON text to parts."""
        self.position = start
        if not self._has_begun:
            if self._lead.startswith(text[start : start + len(self._lead)]) and len(text) < start + len(self._lead):
                return INCOMPLETE
            if text.startswith(self._lead, start):
                self.position += len(self._lead)
            self._has_begun = True
            self._add(parts, '"' if self._is_raw else "")
        found = self._find_end(text, final)
        if isinstance(found, int):
            if self._is_raw:
                end = self._find_safe_end(text, found)
                self._add(parts, escape_json(text[self.position : end]))
                self.position = end
            return INCOMPLETE
        end = found.start
        if self._trail and text.endswith(self._trail, self.position, end):
            end -= len(self._trail)
        value = text[self.position : end]
        self._add(parts, f'{escape_json(value)}"' if self._is_raw else _write_value(value, self._types))
        return found.end

    def _find_end(self, text: str, final: bool) -> DelimiterMatch | int:
        """Return the delimiter that ends the value. In JSON it may occur in strings, unless the JSON never ends."""
        while True:
            found = self._value_end.find(text, self.position + self._num_passed, final)
            if isinstance(found, int):
                return self._get_first_end() if final and self._first_end is not None else found
            if self._is_raw:
                return found
            self._scanner.scan(text[self.position + self._num_scanned : found.start], 0)
            self._num_scanned = found.start - self.position
            value = text[self.position : found.start]
            if self._first_end is None:
                if not self._is_cut(value):
                    return found
                self._first_end = (found.start - self.position, found.end - self.position)
            elif self._scanner.is_done:
                return found if decode_json(value.strip()) is not None else self._get_first_end()
            self._num_passed = found.end - self.position

    def _get_first_end(self) -> DelimiterMatch:
        assert self._first_end is not None
        start, end = self._first_end
        return DelimiterMatch("end", self.position + start, self.position + end)

    def _is_cut(self, value: str) -> bool:
        """Whether a value up to the first delimiter ends inside a JSON string."""
        begins = '[{"'
        if "string" in self._types:
            begins = ("[" if "array" in self._types else "") + ("{" if "object" in self._types else "")
        return (
            value.lstrip().startswith(tuple(begins))
            and self._scanner.is_in_string
            and _read_literal(value.strip()) is None
        )

    def _add(self, parts: list[str], json_text: str) -> None:
        if not self._is_dropped:
            parts.append(json_text)

    def _find_safe_end(self, text: str, end: int) -> int:
        """Return the end of the text that cannot belong to the delimiter that may begin at `end`."""
        for length in range(len(self._trail), 0, -1):
            if text.endswith(self._trail[:length], self.position, end):
                return end - length
        return end


def _write_value(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of a value that is not only a string. types: those that it may have; empty: all."""
    written = text.strip()
    value = decode_json(written)
    if value is None and written != "null":
        value = _read_literal(written)
        if value is None and written.lower() not in ("none", "null"):
            return json.dumps(text, ensure_ascii=False)
        written = json.dumps(value, ensure_ascii=False)
    kind = find_type(value)
    if not types or kind in types or (kind == "integer" and "number" in types):
        return written
    return json.dumps(text, ensure_ascii=False)


def _read_literal(text: str) -> object:
    """Return the value of a Python literal that JSON can represent; None if there is none."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if not text.startswith(("[", "{")) and re.fullmatch(NUMBER, text) is None:
        return None
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, int | float | list | dict) else None
