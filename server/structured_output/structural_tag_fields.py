"""The formats of structural tags: their fields and allowed values.

Every function raises GrammarError with the given pointer, which leads to the format, and the field's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from serve_llm.server.structured_output.errors import GrammarError

_REQUIRED = object()
_COMPOUND: dict[str, object] = {"content": _REQUIRED}

# The fields of each format, with their defaults. xgrammar writes all of them.
_FIELDS: dict[str, dict[str, object]] = {
    "const_string": {"value": _REQUIRED},
    "json_schema": {
        "json_schema": _REQUIRED,
        "style": "json",
        "any_order": False,
        "max_whitespace_cnt": None,
        "excludes": [],
    },
    "any_text": {"excludes": [], "max_tokens": None, "max_chars": None},
    "regex": {"pattern": _REQUIRED},
    "grammar": {"grammar": _REQUIRED},
    "sequence": {"elements": _REQUIRED},
    "or": {"elements": _REQUIRED},
    "tag": {"begin": _REQUIRED, "content": _REQUIRED, "end": _REQUIRED},
    "triggered_tags": {
        "triggers": _REQUIRED,
        "tags": _REQUIRED,
        "at_least_one": False,
        "stop_after_first": False,
        "excludes": [],
    },
    "optional": _COMPOUND,
    "plus": _COMPOUND,
    "star": _COMPOUND,
    "repeat": {"min": _REQUIRED, "max": _REQUIRED, "content": _REQUIRED},
}
# Fields that must have their default.
_UNSUPPORTED = {
    "json_schema": ("style", "any_order", "max_whitespace_cnt", "excludes"),
    "any_text": ("max_tokens", "max_chars"),
}

Format = Mapping[str, object]


def check_format(value: object, pointer: str) -> Format:
    """Return the fields of a format, including defaults. Raises GrammarError for fields that it does not have."""
    if not isinstance(value, dict):
        raise GrammarError("must be an object", pointer)
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise GrammarError(f"must be one of {', '.join(_FIELDS)}, not {json.dumps(kind)[:100]}", pointer, "type")
    fields = _FIELDS[kind]
    for name in value:
        if name != "type" and name not in fields:
            raise GrammarError(f"{kind} has no such field", pointer, str(name))
    found = {"type": kind, **fields, **value}
    for name, field in found.items():
        if field is _REQUIRED:
            raise GrammarError(f"{kind} needs it", pointer, name)
    for name in _UNSUPPORTED.get(kind, ()):
        if found[name] not in (fields[name], None):
            raise GrammarError(f"{json.dumps(found[name])[:100]} is not supported", pointer, name)
    return found


def check_text(format_: Format, name: str, pointer: str) -> str:
    text = format_[name]
    if not isinstance(text, str) or not text:
        raise GrammarError("must be a string that is not empty", pointer, name)
    _check_characters(text, pointer, name)
    return text


def check_texts(value: object, pointer: str, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise GrammarError("must be a list of strings that are not empty", pointer, name)
    for text in value:
        _check_characters(text, pointer, name)
    return tuple(value)


def check_ends(value: object, pointer: str) -> tuple[str, ...]:
    """Return the texts of which one ends a tag."""
    if isinstance(value, str):
        _check_characters(value, pointer, "end")
        return (value,)
    texts = check_texts(value, pointer, "end")
    if not texts:
        raise GrammarError("must be a string or a list of strings", pointer, "end")
    return texts


def _check_characters(text: str, pointer: str, name: str) -> None:
    if re.search("[\ud800-\udfff]", text):
        raise GrammarError("holds a lone surrogate, which no text can have", pointer, name)


def check_list(value: object, pointer: str, name: str) -> list[object]:
    if not isinstance(value, list) or not value:
        raise GrammarError("must be a list that is not empty", pointer, name)
    return value


def check_flag(format_: Format, name: str, pointer: str) -> bool:
    flag = format_[name]
    if not isinstance(flag, bool):
        raise GrammarError("must be true or false", pointer, name)
    return flag


def check_triggers(triggers: Sequence[str], pointer: str) -> None:
    if not triggers:
        raise GrammarError("must not be empty", pointer, "triggers")
    for trigger in triggers:
        for other in triggers:
            if trigger is not other and trigger in other:
                raise GrammarError(f"{other!r} holds {trigger!r}: it would never be reached", pointer, "triggers")
