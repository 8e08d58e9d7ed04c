"""Read the beginning of a call, up to the point where the called tool is known."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from serve_llm.server.dialects.delimiters import INCOMPLETE, DelimiterSet, Incomplete, skip_space
from serve_llm.server.dialects.dialect import CallFormat, GemmaCodec, JsonCodec, PythonicCodec, TaggedCodec, get_forms
from serve_llm.server.dialects.json_codec import JsonScanner, read_key, read_string

MAX_HEADER = 4096  # maximum characters before the name is known; a longer beginning is not a call

_NAME = re.compile(r"[\w./-]{1,256}")
_ID = re.compile(r"\w{1,256}")
_SCALAR = re.compile(r"[^\s,}\]]*")


class CallHeader(NamedTuple):
    name: str
    written_id: str  # "" if the model wrote none
    end: int  # the position from which arguments are read: the object itself, if it contains the name


class CallHeaderReader:
    """Reads the headers of one dialect's calls. A header is a function of the text alone: nothing is consumed."""

    def __init__(self, calls: CallFormat, names: Collection[str]) -> None:
        """names: of the tools."""
        self._calls = calls
        self._names = names
        self._codec = calls.codec
        self._section_open = DelimiterSet([("section", calls.section_open)])
        self._open = DelimiterSet([("open", calls.open)])
        self._name_end = DelimiterSet([("id", calls.id_open), ("end", calls.name_end)])
        self._has_name_end = any(form.strip() for form in get_forms(calls.name_end))
        self._body = DelimiterSet([])
        if isinstance(self._codec, TaggedCodec):
            self._body = DelimiterSet([("key", self._codec.key_open), ("close", calls.close)])
        self._can_skip_section_open = any(not form.strip() for form in get_forms(calls.section_open))

    def read_first(self, text: str, start: int, final: bool) -> CallHeader | Incomplete | None:
        """Return the header of a section's first call, at the beginning of the section."""
        if self._section_open:
            found = self._section_open.match(text, start, final)
            if found is INCOMPLETE:
                return INCOMPLETE
            if found is not None:
                start = found.end
            elif not self._can_skip_section_open:
                return None
        return self.read(text, start, final)

    def read(self, text: str, start: int, final: bool) -> CallHeader | Incomplete | None:
        """Return the header of a call that begins at `start` or after whitespace."""
        is_cut = len(text) > start + MAX_HEADER
        header = self._read(text[: start + MAX_HEADER], start, final and not is_cut)
        return None if header is INCOMPLETE and (is_cut or final) else header

    def _read(self, text: str, start: int, final: bool) -> CallHeader | Incomplete | None:
        start = skip_space(text, start)
        if self._open:
            found = self._open.match(text, start, final)
            if found is None or found is INCOMPLETE:
                return found
            start = skip_space(text, found.end)
        if isinstance(self._codec, JsonCodec) and self._codec.name_key:
            return self._read_object(text, start, self._codec)
        return self._read_name(text, start, final)

    def _read_name(self, text: str, start: int, final: bool) -> CallHeader | Incomplete | None:
        if start == len(text):
            return INCOMPLETE
        found = _NAME.match(text, start)
        if found is None:
            return None
        name = found[0]
        if found.end() == len(text):
            can_be_known = not self._calls.is_bare or any(known.startswith(name) for known in self._names)
            return INCOMPLETE if can_be_known else None
        if self._calls.is_bare and name not in self._names:
            return None
        end = skip_space(text, found.end())
        if end == len(text):
            return INCOMPLETE
        written_id = ""
        mark = self._name_end.match(text, end, final)
        if mark is INCOMPLETE:
            return INCOMPLETE
        if mark is not None and mark.label == "id":
            found = _ID.match(text, skip_space(text, mark.end))
            if found is None or found.end() == len(text):
                return INCOMPLETE if mark.end == len(text) or found is not None else None
            written_id = found[0]
            end = skip_space(text, found.end())
            mark = self._name_end.match(text, end, final)
            if mark is INCOMPLETE:
                return INCOMPLETE
        if mark is not None and mark.label == "end":
            return CallHeader(name, written_id, mark.end)
        if self._has_name_end:
            return None
        return self._check_body(text, end, final, CallHeader(name, written_id, end))

    def _check_body(self, text: str, start: int, final: bool, header: CallHeader) -> CallHeader | Incomplete | None:
        """Return the header, if arguments can begin there although no delimiter marks them."""
        if start == len(text):
            return INCOMPLETE
        if isinstance(self._codec, PythonicCodec):
            return header._replace(end=start + 1) if text[start] == "(" else None
        if isinstance(self._codec, GemmaCodec):
            return header if text[start] == "{" else None
        if isinstance(self._codec, TaggedCodec):
            found = self._body.match(text, start, final)
            return header if found is not None and found is not INCOMPLETE else found
        return header if text[start] == "{" else None

    def _read_object(self, text: str, start: int, codec: JsonCodec) -> CallHeader | Incomplete | None:
        """Return the name in an object that begins at `start`."""
        if start == len(text):
            return INCOMPLETE
        if text[start] != "{":
            return None
        position = start + 1
        while True:
            position = skip_space(text, position)
            member = read_key(text, position)
            if member is INCOMPLETE:
                return INCOMPLETE if self._can_be_key(text[position:], codec) else None
            if member is None or not self._can_be_key(f'"{member[0]}"', codec):
                return None
            key, position = member
            if key == codec.name_key:
                name = read_string(text, position)
                if name is INCOMPLETE:
                    written = text[position + 1 :]
                    can_be_known = not self._calls.is_bare or any(known.startswith(written) for known in self._names)
                    return INCOMPLETE if can_be_known else None
                if name is None or not name[0] or (self._calls.is_bare and name[0] not in self._names):
                    return None
                return CallHeader(name[0], "", start)
            end = _skip_value(text, position)
            if end is INCOMPLETE:
                return INCOMPLETE
            position = skip_space(text, end)
            if position == len(text):
                return INCOMPLETE
            if text[position] != ",":
                return None
            position += 1

    def _can_be_key(self, written: str, codec: JsonCodec) -> bool:
        """Whether a key, which may be incomplete, can come before the name."""
        if not self._calls.is_bare:
            return True
        keys = (codec.name_key, codec.arguments_key, "type", codec.id_key)
        return any(f'"{key}"'.startswith(written) or written.startswith(f'"{key}"') for key in keys if key)


def _skip_value(text: str, start: int) -> int | Incomplete:
    if text[start] in '"{[':
        scanner = JsonScanner()
        end, _ = scanner.scan(text, start)
        return end if scanner.is_done else INCOMPLETE
    scalar = _SCALAR.match(text, start)
    assert scalar is not None
    return scalar.end() if scalar.end() < len(text) else INCOMPLETE
