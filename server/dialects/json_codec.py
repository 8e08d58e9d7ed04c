"""Arguments that a model writes as JSON: passed on unchanged, while looking for their end."""

from __future__ import annotations

import enum
import json
import re
from typing import NamedTuple, Protocol

from serve_llm.server.dialects.delimiters import INCOMPLETE, Incomplete, skip_space
from serve_llm.server.structured_output.json_schema import refuse_constant

_OUTSIDE_STRING = re.compile(r'["{}\[\]]')
_INSIDE_STRING = re.compile(r'["\\\x00-\x1f]')
_SURROGATE = re.compile("[\ud800-\udfff]")
_SCALAR = re.compile(r"[^\s,}\]]*")


class Outcome(enum.Enum):
    MORE = 0  # the arguments continue
    DONE = 1  # they are complete, and a JSON object
    BROKEN = 2  # they are not arguments: the rest of the call cannot be read


class ReadResult(NamedTuple):
    end: int  # text before this position has been read
    json: str  # next part of the JSON text
    outcome: Outcome


class ArgumentsReader(Protocol):
    """Turns the text of one call's arguments into JSON text, in pieces."""

    def read(self, text: str, start: int, final: bool) -> ReadResult:
        """Continue to read at `start`. Text before the end of the result is not passed again. final: `text` is
        complete."""
        ...


class JsonScanner:
    """Finds the end of one JSON object, array or string, by counting brackets outside strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_escaped = False
        self.is_in_string = False
        self.is_done = False

    def scan(self, text: str, start: int) -> tuple[int, str]:
        """Return the end of the scanned text, and the text itself with control characters in strings escaped."""
        position = start
        parts: list[str] = []
        copied = start  # text before this position is in parts
        while not self.is_done and position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            found = (_INSIDE_STRING if self.is_in_string else _OUTSIDE_STRING).search(text, position)
            if found is None:
                position = len(text)
                break
            position = found.end()
            char = found[0]
            if char == '"':
                self.is_in_string = not self.is_in_string
            elif char == "\\":
                self._is_escaped = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            else:
                parts += (text[copied : found.start()], json.dumps(char)[1:-1])
                copied = position
            self.is_done = self._depth <= 0 and not self.is_in_string and not self._is_escaped
        parts.append(text[copied:position])
        return position, "".join(parts)


class JsonReader:
    """Arguments as a JSON object, or as a string that contains one, or null."""

    def __init__(self) -> None:
        self._scanner: JsonScanner | None = None
        self._is_string = False
        self._parts: list[str] = []

    def read(self, text: str, start: int, final: bool) -> ReadResult:
        if self._scanner is None:
            start = skip_space(text, start)
            rest = text[start : start + 4]
            if rest == "null":
                return ReadResult(start + 4, "{}", Outcome.DONE)
            if not rest or ("null".startswith(rest) and not final):
                return ReadResult(start, "", Outcome.MORE)
            if rest[0] not in '{"':
                return ReadResult(start, "", Outcome.BROKEN)
            self._scanner = JsonScanner()
            self._is_string = rest[0] == '"'
        end, scanned = self._scanner.scan(text, start)
        self._parts.append(scanned)
        if not self._scanner.is_done:
            return ReadResult(end, "" if self._is_string else scanned, Outcome.MORE)
        whole = "".join(self._parts)
        if self._is_string:
            decoded = decode_json(whole)
            whole = scanned = decoded.strip() if isinstance(decoded, str) else whole
        is_object = isinstance(decode_json(whole), dict)
        return ReadResult(end, scanned, Outcome.DONE if is_object else Outcome.BROKEN)


class ObjectReader:
    """A call that is one object with a name and arguments. Starts at its opening brace; other keys are skipped."""

    def __init__(self, arguments_key: str) -> None:
        self._arguments_key = arguments_key
        self._has_begun = False
        self._arguments: JsonReader | None = None  # while they are being read
        self._skipped: JsonScanner | None = None  # a value that is being skipped
        self._has_arguments = False

    def read(self, text: str, start: int, final: bool) -> ReadResult:
        position = start
        arguments = ""
        if not self._has_begun:
            position = skip_space(text, start) + 1
            self._has_begun = True
        while True:
            if self._arguments is not None:
                result = self._arguments.read(text, position, final)
                if result.outcome is not Outcome.DONE:
                    return result
                self._arguments = None
                self._has_arguments = True
                position = result.end
                arguments = result.json
            if self._skipped is not None:
                position, _ = self._skipped.scan(text, position)
                if not self._skipped.is_done:
                    return ReadResult(position, arguments, Outcome.MORE)
                self._skipped = None
            following = skip_space(text, position)
            if following < len(text) and text[following] == ",":
                following = skip_space(text, following + 1)
            if following == len(text):
                return ReadResult(position, arguments, Outcome.MORE)
            if text[following] == "}":
                return ReadResult(following + 1, arguments if self._has_arguments else "{}", Outcome.DONE)
            member = read_key(text, following)
            if member is INCOMPLETE:
                return ReadResult(position, arguments, Outcome.MORE)
            if member is None:
                return ReadResult(following, arguments, Outcome.BROKEN)
            key, value = member
            if key == self._arguments_key and not self._has_arguments:
                self._arguments = JsonReader()
                position = value
            elif text[value] in '"{[':
                self._skipped = JsonScanner()
                position = value
            else:
                scalar = _SCALAR.match(text, value)
                assert scalar is not None
                if scalar.end() == len(text):
                    return ReadResult(position, arguments, Outcome.MORE)
                if not scalar[0]:
                    return ReadResult(value, arguments, Outcome.BROKEN)
                position = scalar.end()


def read_key(text: str, start: int) -> tuple[str, int] | Incomplete | None:
    """Return the key of an object's member at `start`, and the position of the first character of its value."""
    key = read_string(text, start)
    if key is None or key is INCOMPLETE:
        return key
    position = skip_space(text, key[1])
    if position < len(text) and text[position] != ":":
        return None
    position = skip_space(text, position + 1)
    return (key[0], position) if position < len(text) else INCOMPLETE


def read_string(text: str, start: int) -> tuple[str, int] | Incomplete | None:
    """Return the value of a JSON string at `start`, and its end."""
    if start == len(text):
        return INCOMPLETE
    if text[start] != '"':
        return None
    scanner = JsonScanner()
    end, scanned = scanner.scan(text, start)
    if not scanner.is_done:
        return INCOMPLETE
    value = decode_json(scanned)
    return (value, end) if isinstance(value, str) else None


def decode_json(text: str) -> object:
    """Return the value of a JSON text; None if it is invalid."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None


def escape_json(text: str) -> str:
    """Return a text as it is written between the quotes of a JSON string; lone surrogates stay escaped."""
    has_surrogates = _SURROGATE.search(text) is not None
    return json.dumps(text, ensure_ascii=has_surrogates)[1:-1]
