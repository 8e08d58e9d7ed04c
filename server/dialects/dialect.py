"""`Dialect`: how a model writes reasoning, content and tool calls, as data.

The streaming parser and the grammar of a turn are both derived from it; neither has code for one model family. A
dialect can be written as JSON, so that users can define their own.

A turn of a model is text with delimiters:

    <reasoning.open> ... <reasoning.close> content
    <calls.section_open> call <calls.separator> call <calls.section_close>

and a call, depending on the codec, is one of

    <open> {"name": "f", "arguments": {...}} <close>                                      json with name_key
    <open> f [<id_open> id] <name_end> {...} <close>                                      json
    <open> f <name_end> [<key_open> key <key_end> value <value_end>]... <close>           tagged
    <open> f <name_end> key=literal, ... <close>                                          pythonic
    <open> f <name_end> {key:value, ...} <close>                                          gemma

The grammar writes whitespace in delimiters as it is; the parser accepts any whitespace, or none, in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

# One text or several: the grammar writes the first one, the parser accepts all of them.
Delimiter = str | tuple[str, ...]

IdRule = Literal["random", "kimi", "mistral"]


class DialectError(ValueError):
    """A dialect cannot be read. The message names the key."""


class _Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Base of the parts of a dialect."""

    def list_delimiters(self) -> Iterator[str]:
        """Yield all delimiters of this part and of the parts in it."""
        return iter(())


class JsonCodec(_Format, frozen=True, kw_only=True, tag="json"):
    """Arguments are a JSON object; with name_key, the call is an object that holds the name and the arguments."""

    name_key: str = ""  # "": the name comes before the arguments
    arguments_key: str = "arguments"
    id_key: str = ""  # key of a number, as text, that the model writes before the name; "": none


class TaggedCodec(_Format, frozen=True, kw_only=True, tag="tagged"):
    """Each argument is between delimiters: strings as they are, everything else in JSON, by the tool's schema."""

    key_open: Delimiter
    key_end: Delimiter
    value_end: Delimiter
    json_key_end: str = ""  # replaces key_end if the value is JSON; "": the schema alone decides

    def __post_init__(self) -> None:
        _check_delimiters(self, "key_open", "key_end", "value_end")

    def list_delimiters(self) -> Iterator[str]:
        yield from get_forms(self.key_open)
        yield from get_forms(self.key_end)
        yield from get_forms(self.value_end)
        yield from get_forms(self.json_key_end)


class PythonicCodec(_Format, frozen=True, kw_only=True, tag="pythonic"):
    """Arguments are keyword arguments of a Python call, with literals as values."""

    json_literals: bool = False  # whether true, false and null are written instead of True, False and None


class GemmaCodec(_Format, frozen=True, kw_only=True, tag="gemma"):
    """Arguments are an object with bare keys and strings between special quotes."""

    quote: str

    def __post_init__(self) -> None:
        _check_delimiters(self, "quote")

    def list_delimiters(self) -> Iterator[str]:
        yield self.quote


Codec = JsonCodec | TaggedCodec | PythonicCodec | GemmaCodec


class ContentFormat(_Format, frozen=True, kw_only=True):
    """Delimiters of content, if a model writes any."""

    open: Delimiter
    close: Delimiter

    def __post_init__(self) -> None:
        _check_delimiters(self, "open", "close")

    def list_delimiters(self) -> Iterator[str]:
        yield from get_forms(self.open)
        yield from get_forms(self.close)


class ReasoningFormat(ContentFormat, frozen=True, kw_only=True):
    """The text that a model writes before it answers. Whitespace at both ends is not part of it."""

    repeats: bool = False  # whether it can also open after content or calls, not only at the start of the turn
    ends_at_call: bool = False  # whether a call that opens inside it closes it
    is_open_at_start: bool = False  # whether a turn begins inside it without `open` in prompt or output


class CallFormat(_Format, frozen=True, kw_only=True):
    """How calls are written: a section of calls, which may have no delimiters of its own."""

    codec: Codec
    section_open: Delimiter = ""
    section_close: Delimiter = ""
    lead: str = ""  # whitespace that the model writes before the section, even without content
    open: Delimiter = ""
    name_end: Delimiter = ""
    close: Delimiter = ""
    separator: str = ""  # between two calls
    id_open: str = ""  # between the name and an id that the model writes; "": it writes no id
    id_rule: IdRule = "random"
    is_bare: bool = False  # calls without an opening delimiter: only at the start of content, only known tools

    def __post_init__(self) -> None:
        if self.lead.strip():
            raise ValueError("`lead` must be whitespace")
        if not self.is_bare and not any(get_forms(self.section_open)) and not any(get_forms(self.open)):
            raise ValueError("one of `section_open` and `open` is needed, or `is_bare`")
        if self.is_bare and not self.is_name_in_object and not isinstance(self.codec, PythonicCodec):
            raise ValueError("`is_bare` needs the codec json with `name_key`, or pythonic")
        if self.is_name_in_object and (any(get_forms(self.name_end)) or self.id_open):
            raise ValueError("`name_end` and `id_open` exclude the codec's `name_key`")

    @property
    def is_name_in_object(self) -> bool:
        return isinstance(self.codec, JsonCodec) and bool(self.codec.name_key)

    def list_delimiters(self) -> Iterator[str]:
        for delimiter in (self.section_open, self.section_close, self.open, self.name_end, self.close, self.id_open):
            yield from get_forms(delimiter)
        yield self.separator
        yield from self.codec.list_delimiters()


class Dialect(_Format, frozen=True, kw_only=True):
    """How a model writes a turn. Without reasoning, content and calls, all text is content."""

    name: str
    reasoning: ReasoningFormat | None = None
    content: ContentFormat | None = None
    calls: CallFormat | None = None
    start: str = ""  # end of the prompt that the turn continues, if it opens a message: `<|start|>assistant`
    ends: tuple[str, ...] = ()  # tokens that can end a turn and are not content; spelled as text, they are content
    trims_content: bool = False  # whether whitespace at both ends of the turn's content is dropped

    def list_delimiters(self) -> Iterator[str]:
        yield from self._list_inner_delimiters()
        yield from self.ends

    def list_pure_ends(self) -> list[str]:
        """Return the `ends` that close nothing: they never occur between two parts of a turn."""
        inner = set(self._list_inner_delimiters())
        return [end for end in self.ends if end not in inner]

    def find_tokens(self, added_tokens: Iterable[str]) -> frozenset[str]:
        """Return the tokenizer's added tokens that occur as delimiters of this dialect, except those of
        `list_pure_ends`."""
        text = "\0".join(self._list_inner_delimiters())
        return frozenset(token for token in added_tokens if token and token in text)

    def _list_inner_delimiters(self) -> Iterator[str]:
        """Yield all delimiters except `ends`."""
        for part in (self.reasoning, self.content, self.calls):
            if part is not None:
                yield from part.list_delimiters()
        yield self.start


def get_forms(delimiter: Delimiter) -> tuple[str, ...]:
    """Return all forms of a delimiter, starting with the one to write."""
    return (delimiter,) if isinstance(delimiter, str) else delimiter


def get_written_form(delimiter: Delimiter) -> str:
    """Return the form that the grammar writes."""
    return get_forms(delimiter)[0]


def read_dialect(text: str | bytes) -> Dialect:
    """Read a dialect from JSON. Raises DialectError."""
    try:
        return msgspec.json.decode(text, type=Dialect)
    except msgspec.DecodeError as error:
        raise DialectError(str(error)) from None


def write_dialect(dialect: Dialect) -> str:
    """Return the JSON that `read_dialect` reads, without keys that have their defaults."""
    return msgspec.json.format(msgspec.json.encode(dialect), indent=2).decode()


def _check_delimiters(part: _Format, *names: str) -> None:
    for name in names:
        forms = get_forms(getattr(part, name))
        if not forms or not all(form.strip() for form in forms):
            raise ValueError(f"`{name}` must be a text, or several, and not only whitespace")
