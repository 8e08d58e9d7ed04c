"""Read the `response_template` of a checkpoint: transformers' declaration of how a model writes its turns.

Its fields give delimiters as texts or regular expressions; the forms used by published checkpoints become a `Dialect`.
Anything else is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from serve_llm.server.dialects.dialect import (
    CallFormat,
    Codec,
    ContentFormat,
    Delimiter,
    Dialect,
    DialectError,
    GemmaCodec,
    JsonCodec,
    ReasoningFormat,
    TaggedCodec,
    get_forms,
    get_written_form,
)
from serve_llm.server.dialects.pattern import Form, NamedGroup, read_pattern
from serve_llm.server.dialects.table import BUILT_IN

_REASONING_NAMES = ("thinking", "reasoning_content", "reasoning")
_OPEN_ELEMENT = re.compile(r"<([\w:]+)[= ]")
_OBJECT_START = re.compile(r'\{\s*"(?P<name>\w+)":\s*"')
_OBJECT_MIDDLE = re.compile(r'",\s*"(?P<arguments>\w+)":\s*')
_CONTENT_KEY = re.compile(r"\{content\.(\w+)\}")
_ITEM_KEY = re.compile(r"\{(\w+)\}")


class _Field(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A field of the message, as transformers declares it."""

    open: str | list[str] | None = None
    open_pattern: str | None = None
    close: str | list[str] | None = None
    close_pattern: str | None = None
    content: str = "text"
    content_args: dict[str, object] = {}
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: object = None
    transform_each: bool = False

    def read_open(self) -> list[Form]:
        return _read_delimiter(self.open, self.open_pattern)

    def read_close(self) -> list[str]:
        return [_get_text(form) for form in _read_delimiter(self.close, self.close_pattern)]


class _Template(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    fields: dict[str, _Field]
    version: Literal[1] = 1
    defaults: dict[str, object] = {}
    start_anchor: str | list[str] | None = None
    start_anchor_pattern: str | None = None


class _Keys(NamedTuple):
    """The keys from which a transform takes a call's name and arguments; "": the name is a group of the pattern."""

    name: str
    arguments: str


def read_response_template(template: object) -> Dialect:
    """Return the dialect that a response_template declares. Raises DialectError."""
    try:
        spec = msgspec.convert(template, _Template)
    except msgspec.ValidationError as error:
        raise DialectError(f"response_template: {error}") from None
    reasoning = next((name for name in _REASONING_NAMES if name in spec.fields), None)
    unknown = set(spec.fields) - {reasoning, "content", "tool_calls"}
    if unknown:
        raise DialectError(f"response_template: the field {min(unknown)} is not supported")
    for name, field in spec.fields.items():
        if not field.optional:
            raise DialectError(f"response_template: {name} must be optional, since a model may omit it")
    content = spec.fields.get("content")
    calls = spec.fields.get("tool_calls")
    builtin = None if calls is None else _find_builtin(calls)
    if builtin is not None and builtin.start:
        return builtin  # its messages have more forms than a response_template can express
    try:
        return Dialect(
            name="response_template",
            reasoning=None if reasoning is None else _read_reasoning(spec, spec.fields[reasoning]),
            content=None if content is None else _read_content(content),
            calls=None if calls is None else _read_calls(calls, builtin),
            ends=() if content is None or content.read_open() else tuple(filter(None, content.read_close())),
            trims_content=content is not None and content.content_args.get("strip", True) is True,
        )
    except (DialectError, ValueError) as error:
        raise DialectError(f"response_template: {error}") from None


def _read_reasoning(spec: _Template, field: _Field) -> ReasoningFormat:
    close = tuple(filter(None, field.read_close()))
    if not close:
        raise DialectError("the reasoning has no `close`")
    anchors = [spec.start_anchor] if isinstance(spec.start_anchor, str) else spec.start_anchor or []
    anchor = " ".join([*anchors, spec.start_anchor_pattern or ""])
    opening = close[0].strip().replace("</", "<", 1)
    is_in_anchor = opening in anchor and field.open_pattern is not None
    forms = [opening] if is_in_anchor else [_get_text(form) for form in field.read_open()]
    texts = tuple(filter(None, forms))
    return ReasoningFormat(
        open=texts or opening,
        close=close,
        repeats=field.repeats,
        is_open_at_start=len(texts) < len(forms),
    )


def _read_content(field: _Field) -> ContentFormat | None:
    opening = tuple(_get_text(form) for form in field.read_open())
    return ContentFormat(open=opening, close=tuple(filter(None, field.read_close()))) if opening else None


def _read_calls(field: _Field, builtin: Dialect | None) -> CallFormat:
    try:
        return _use_builtin_whitespace(_convert_calls(field))
    except DialectError:
        if builtin is not None and builtin.calls is not None:
            return builtin.calls
        raise


def _find_builtin(field: _Field) -> Dialect | None:
    """Return the built-in dialect whose calls open as the field's pattern says."""
    text = (field.open_pattern or str(field.open)).replace("\\", "")
    best: tuple[int, Dialect] | None = None
    for dialect in BUILT_IN.values():
        assert dialect.calls is not None
        for opening in (*get_forms(dialect.calls.section_open), *get_forms(dialect.calls.open)):
            length = len(opening.strip())
            if not dialect.calls.is_bare and opening.strip() in text and (best is None or length > best[0]):
                best = (length, dialect)
    return best[1] if best is not None and best[0] else None


def _use_builtin_whitespace(calls: CallFormat) -> CallFormat:
    """Return the built-in format that differs only in whitespace, if any: patterns do not say what models write."""
    for dialect in BUILT_IN.values():
        if dialect.calls is not None and _list_words(dialect.calls) == _list_words(calls):
            return dialect.calls
    return calls


def _list_words(calls: CallFormat) -> list[object]:
    codec = calls.codec
    delimiters: list[Delimiter] = [calls.section_open, calls.open, calls.name_end, calls.close, calls.section_close]
    if isinstance(codec, TaggedCodec):
        delimiters += [codec.key_open, codec.key_end, codec.value_end, codec.json_key_end]
    words: list[object] = [get_written_form(delimiter).split() for delimiter in delimiters]
    if isinstance(codec, JsonCodec):
        words += [codec.name_key, codec.arguments_key]
    return [*words, type(codec), calls.is_bare]


def _convert_calls(field: _Field) -> CallFormat:
    opening, ending = _split_at_name(field.read_open())
    close = tuple(filter(None, field.read_close()))
    if field.content == "xml-inline":
        return CallFormat(codec=_read_tags(field), open=opening, name_end=ending, close=_close_elements(opening, close))
    if field.content != "json":
        raise DialectError(f"tool_calls.content {field.content!r} is not supported")
    keys = _read_transform(field)
    if field.transform_each:
        codec = JsonCodec(name_key=keys.name, arguments_key=keys.arguments)
        return CallFormat(
            codec=codec,
            section_open=tuple(f"{form}[" for form in get_forms(opening)),
            section_close=tuple(f"]{form}" for form in close),
            separator=", ",
        )
    if keys.name:
        codec = JsonCodec(name_key=keys.name, arguments_key=keys.arguments)
        return CallFormat(codec=codec, open=opening, close=close, separator="\n")
    bare = _read_bare_object(opening, ending)
    if bare is not None:
        return CallFormat(codec=bare, is_bare=True, separator="; ")
    return CallFormat(codec=_read_json_codec(field), open=opening, name_end=ending, close=close)


def _read_transform(field: _Field) -> _Keys:
    transform = field.transform
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if function == "{content}":
        return _Keys("name", "arguments")
    if isinstance(function, Mapping):
        name = str(function.get("name"))
        arguments = str(function.get("arguments"))
        pattern = _ITEM_KEY if field.transform_each else _CONTENT_KEY
        keys = [pattern.fullmatch(text) for text in (name, arguments)]
        if keys[0] is not None and keys[1] is not None:
            return _Keys(keys[0][1], keys[1][1])
        if (name, arguments) == ("{name}", "{content}"):
            return _Keys("", "")
    raise DialectError("tool_calls.transform must name the function's name and arguments")


def _read_json_codec(field: _Field) -> Codec:
    delimiters = field.content_args.get("string_delims")
    if not delimiters:
        return JsonCodec()
    match delimiters:
        case [[str(quote), str(end)]] if quote == end:
            return GemmaCodec(quote=quote)
    raise DialectError("tool_calls.content_args.string_delims must be one delimiter that opens and closes")


def _read_tags(field: _Field) -> TaggedCodec:
    pattern = field.content_args.get("tag_pattern")
    forms = read_pattern(pattern) if isinstance(pattern, str) else []
    match forms:
        case [(key_open, NamedGroup("key"), key_end, NamedGroup("value"), value_end)]:
            return TaggedCodec(key_open=key_open, key_end=key_end, value_end=value_end)
    raise DialectError(f"tool_calls.content_args.tag_pattern {pattern!r} is not supported")


def _read_bare_object(opening: Delimiter, ending: Delimiter) -> JsonCodec | None:
    """Return the codec of calls whose opening is the start of a JSON object."""
    start = _OBJECT_START.fullmatch(get_forms(opening)[0])
    middle = _OBJECT_MIDDLE.fullmatch(get_forms(ending)[0])
    if start is None or middle is None:
        return None
    return JsonCodec(name_key=start["name"], arguments_key=middle["arguments"])


def _close_elements(opening: Delimiter, close: tuple[str, ...]) -> tuple[str, ...]:
    """Return the closing delimiters, including the end of an element that `opening` leaves open: `<function=`."""
    names = [found[1] for form in get_forms(opening) for found in _OPEN_ELEMENT.finditer(form)]
    ends = [f"</{name}>" for name in dict.fromkeys(names)]
    return (*(f"{end}\n{form}" for form in close for end in ends if end not in form), *close)


def _split_at_name(forms: list[Form]) -> tuple[Delimiter, Delimiter]:
    """Return the texts before and after the group `name`."""
    before: list[str] = []
    after: list[str] = []
    for form in forms:
        number = next((place for place, part in enumerate(form) if isinstance(part, NamedGroup)), len(form))
        before.append(_get_text(form[:number]))
        after.append(_get_text(form[number + 1 :]))
    openings = tuple(dict.fromkeys(before))
    endings = tuple(dict.fromkeys(after))
    return (openings or "", endings if any(endings) else "")


def _read_delimiter(literal: str | list[str] | None, pattern: str | None) -> list[Form]:
    if literal is not None:
        return [(text,) for text in ([literal] if isinstance(literal, str) else literal)]
    return [] if pattern is None else read_pattern(pattern)


def _get_text(form: Form) -> str:
    if any(isinstance(part, NamedGroup) for part in form):
        raise DialectError(
            f"the group {next(part for part in form if isinstance(part, NamedGroup))!r} is not supported"
        )
    return "".join(form)
