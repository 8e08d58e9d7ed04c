"""Find out from a chat template how the model writes its turns.

A conversation with sentinel tools, calls and texts is rendered. The model's dialect is the one that reads the sentinels
back from the rendered turn, with the least text left over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

import msgspec

from serve_llm.server.dialects.dialect import (
    CallFormat,
    Delimiter,
    Dialect,
    ReasoningFormat,
    TaggedCodec,
    get_forms,
    get_written_form,
)
from serve_llm.server.dialects.table import BUILT_IN
from serve_llm.server.dialects.tool import Tool
from serve_llm.server.dialects.turn import Turn, opens_reasoning, parse_turn
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.prompt.template import ChatTemplate, Message

_MAX_CHARACTERS = 2**20
_QUESTION = "sentinel question"
_CONTENT = "sentinel answer"
_REASONING = "sentinel reasoning"
_ARGUMENTS: dict[str, object] = {"first_key": "sentinel value", "second_key": 42}
_NUMBER: dict[str, object] = {"second_key": 42}
_ID_FORMS = ("call0000{number}", "functions.{name}:{number}")
_NAMES = ("first_sentinel", "second_sentinel")
_PARAMETERS: dict[str, object] = {
    "type": "object",
    "properties": {
        "first_key": {"type": "string", "description": "A text."},
        "second_key": {"type": "integer", "description": "A number."},
    },
    "required": ["second_key"],
}

_TOKEN = re.compile(r"<[^<>\s]+[>=]|\[[A-Z_]+\]")
_TAG = re.compile(r"<[\w:]+>|\[\w+\]")

TOOLS = tuple(Tool(name, "A sentinel.", _PARAMETERS) for name in _NAMES)


_TOOL_OBJECTS = [
    {"type": "function", "function": {"name": name, "description": "A sentinel.", "parameters": _PARAMETERS}}
    for name in _NAMES
]
_REASONING_FORMATS = [dialect.reasoning for dialect in BUILT_IN.values() if dialect.reasoning is not None]


class SentinelCall(NamedTuple):
    id: str
    name: str
    arguments: object


class RenderedTurn(NamedTuple):
    """A turn of the model as written by the chat template."""

    prompt: str
    text: str  # written by the model
    end: str  # text after the turn
    calls: tuple[SentinelCall, ...]

    def parse(self, dialect: Dialect) -> Turn:
        in_reasoning = opens_reasoning(dialect, self.prompt, "")
        return parse_turn(dialect, TOOLS, self.text, in_reasoning=in_reasoning)

    def is_read_by(self, turn: Turn) -> bool:
        """Whether the calls of `turn` are those that were rendered. Texts of values count, not their types."""
        found = [(call.name, _to_text(call.read_arguments())) for call in turn.calls]
        return found == [(call.name, _to_text(call.arguments)) for call in self.calls]


def find_dialect(template: ChatTemplate, added_tokens: Collection[str]) -> Dialect | None:
    """Return the dialect of the model that uses `template`; None if it writes no known calls or reasoning.

    added_tokens: of the tokenizer. They and the template's source decide if the template renders no calls.
    """
    found, text = _find_by_calls(template) or (_find_by_marks(template, added_tokens), "")
    reasoning = _find_reasoning(template, found)
    if found is None:
        return None if reasoning is None else Dialect(name="reasoning", reasoning=reasoning)
    dialect = _add_reasoning(found, reasoning)
    assert dialect.calls is not None
    return msgspec.structs.replace(dialect, calls=_fit_separator(dialect.calls, text))


def fit_dialect(dialect: Dialect, template: ChatTemplate) -> Dialect:
    """Return `dialect` with the whitespace that the template writes around reasoning."""
    rendered = _render_turn(template, _CONTENT, _REASONING, ())
    if dialect.reasoning is None or rendered is None:
        return dialect
    fitted = _fit_reasoning(dialect.reasoning, rendered)
    return dialect if fitted is None else msgspec.structs.replace(dialect, reasoning=fitted)


def find_header(template: ChatTemplate) -> str:
    """Return the constant part of the text that the template writes between a user's message and the model's turn."""
    rendered = _render_turn(template, _CONTENT, None, ())
    if rendered is None:
        return ""
    prompt = rendered.prompt
    if _QUESTION not in prompt:  # the template writes a user's last message differently
        prompt = _render(template, None) or ""
    header = prompt.rpartition(_QUESTION)[2].strip()
    for reasoning in _REASONING_FORMATS:
        for form in get_forms(reasoning.open):
            header = header.partition(form.strip())[0]
            closing = _get_element_end(form)
            header = header.partition(closing)[0] if closing else header
    return header.rstrip()


def render_turns(template: ChatTemplate) -> Iterator[RenderedTurn]:
    """Yield sentinel turns with calls that the template accepts, those with the most content first."""
    for arguments in (_ARGUMENTS, _NUMBER):
        for content in (_CONTENT, ""):
            for names in (_NAMES, _NAMES[:1]):
                for id_form in _ID_FORMS:
                    calls = tuple(
                        SentinelCall(id_form.format(name=name, number=number), name, arguments)
                        for number, name in enumerate(names)
                    )
                    rendered = _render_turn(template, content, _REASONING, calls)
                    if rendered is not None and all(name in rendered.text for name in names):
                        yield rendered
                        break


def render_again(template: ChatTemplate, rendered: RenderedTurn, turn: Turn) -> str | None:
    """Render the conversation with the message that was read from a rendered turn; None if the template refuses it."""
    calls = [
        SentinelCall(sentinel.id, call.name, call.read_arguments())
        for sentinel, call in zip(rendered.calls, turn.calls, strict=True)
    ]
    return _render(template, build_message(turn.content, turn.reasoning, calls))


def _render_turn(
    template: ChatTemplate, content: str, reasoning: str | None, calls: tuple[SentinelCall, ...]
) -> RenderedTurn | None:
    """Return None if the template refuses the turn."""
    prompt = _render(template, None)
    turn = _render(template, build_message(content, reasoning, calls))
    if prompt is None or turn is None:
        return None
    begin = _find_common_end(prompt, turn)
    end = len(turn) - len(_find_end(template, turn))
    return RenderedTurn(turn[:begin], turn[begin:end], turn[end:], calls)


def _find_end(template: ChatTemplate, turn: str) -> str:
    """Return what the template writes after the text of a turn, including the whitespace before it."""
    answer = _render(template, build_message(_CONTENT, None, ())) or ""
    _, has_content, after = answer.rpartition(_CONTENT)
    after = after.strip()
    if not has_content or not after or not turn.rstrip().endswith(after):
        return ""
    return turn[len(turn[: turn.rindex(after)].rstrip()) :]


def _render(template: ChatTemplate, message: Message | None) -> str | None:
    """Render the sentinel question with its answer, if there is one; None if the template refuses it."""
    question: Message = {"role": "user", "content": _QUESTION}
    messages = [question] if message is None else [question, message]
    try:
        return template.render(
            messages, tools=_TOOL_OBJECTS, add_generation_prompt=message is None, max_characters=_MAX_CHARACTERS
        )
    except InvalidRequest:
        return None


def _find_common_end(prompt: str, turn: str) -> int:
    """Return the length of the common prefix, excluding a token in angle brackets in which the texts differ."""
    end = next(
        (place for place, pair in enumerate(zip(prompt, turn, strict=False)) if pair[0] != pair[1]),
        min(len(prompt), len(turn)),
    )
    opened = turn.rfind("<", 0, end)
    return opened if end < len(prompt) and opened > turn.rfind(">", 0, end) else end


def build_message(content: str, reasoning: str | None, calls: Iterable[SentinelCall]) -> Message:
    """Build a message of the assistant, with its reasoning under all names that templates know."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning, "thinking": reasoning}
    objects = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    if objects:
        message["tool_calls"] = objects
    return message


def _find_by_calls(template: ChatTemplate) -> tuple[Dialect, str] | None:
    """Return the dialect that reads back the rendered calls, and the text that it reads."""
    for rendered in render_turns(template):
        best: tuple[int, int, bool] | None = None
        found = None
        for dialect in BUILT_IN.values():
            assert dialect.calls is not None
            if not _may_hold(rendered.text, dialect.calls):
                continue
            turn = rendered.parse(dialect)
            if not rendered.is_read_by(turn):
                continue
            num_missing = sum(delimiter not in rendered.text for delimiter in _list_written(dialect.calls))
            ends_otherwise = not any(end in rendered.end for end in dialect.ends)
            rank = (len(turn.content) + len(turn.reasoning), num_missing, ends_otherwise)
            if best is None or rank < best:
                best = rank
                found = dialect
        if found is not None:
            return found, rendered.text
    return None


def _may_hold(text: str, calls: CallFormat) -> bool:
    """Whether `text` contains the opening of a call."""
    delimiter = calls.section_open if any(form.strip() for form in get_forms(calls.section_open)) else calls.open
    return calls.is_bare or any(form.split()[0] in text for form in get_forms(delimiter) if form.strip())


def _list_written(calls: CallFormat) -> Iterator[str]:
    """Yield the delimiters of a call as the grammar writes them."""
    for delimiter in (calls.section_open, calls.open, calls.name_end, calls.close, calls.section_close):
        yield get_written_form(delimiter)
    if isinstance(calls.codec, TaggedCodec):
        yield get_written_form(calls.codec.key_end)


def _fit_separator(calls: CallFormat, text: str) -> CallFormat:
    """Return `calls` with the whitespace that the template writes between two calls."""
    if calls.separator.strip() or (len(calls.separator) == 0 and not calls.close):
        return calls
    ending = re.escape(get_written_form(calls.close).strip())
    opening = re.escape(get_written_form(calls.open).split()[0]) if get_written_form(calls.open) else ""
    found = re.search(rf"{ending}(\s*){opening}", text) if ending and opening else None
    return calls if found is None else msgspec.structs.replace(calls, separator=found[1])


def _find_by_marks(template: ChatTemplate, added_tokens: Collection[str]) -> Dialect | None:
    """Return the dialect whose delimiters occur in the template's source or among the tokens, for a template that shows
    tools but renders no calls."""
    if not template.shows_tools:
        return None
    best: tuple[int, Dialect] | None = None
    for dialect in BUILT_IN.values():
        assert dialect.calls is not None
        marks = list(_list_marks(dialect.calls))
        if marks and all(mark in template.tool_source or mark in added_tokens for mark in marks):
            length = sum(map(len, marks))
            if best is None or length > best[0]:
                best = (length, dialect)
    return None if best is None else best[1]


def _list_marks(calls: CallFormat) -> Iterator[str]:
    """Yield tokens and words that the model always writes in a call."""
    if calls.is_bare:
        return
    for delimiter in _list_written(calls):
        for word in delimiter.split():
            yield from _TOKEN.findall(word) or filter(None, [word.strip("[](){}")])


def _find_reasoning(template: ChatTemplate, found: Dialect | None) -> ReasoningFormat | None:
    """Return the format that the template renders, with its whitespace, else that of its prompt or its source."""
    own = [] if found is None or found.reasoning is None else [found.reasoning]
    formats = [*own, *_REASONING_FORMATS]
    rendered = _render_turn(template, _CONTENT, _REASONING, ())
    if rendered is not None:
        for reasoning in formats:
            if (fitted := _fit_reasoning(reasoning, rendered)) is not None:
                return fitted
    for reasoning in formats:
        opening = get_written_form(reasoning.open).strip()
        closing = get_written_form(reasoning.close).strip()
        if closing in template.tool_source and (
            opening in template.tool_source or closing == _get_element_end(opening)
        ):
            return reasoning
    return None


def _fit_reasoning(reasoning: ReasoningFormat, rendered: RenderedTurn) -> ReasoningFormat | None:
    """Return `reasoning` with the whitespace that the template writes around its delimiters; None if they differ."""
    for opening in get_forms(reasoning.open):
        for closing in get_forms(reasoning.close):
            pattern = rf"{re.escape(opening.strip())}(\s*){_REASONING}(\s*){re.escape(closing.strip())}(\s*)"
            found = re.search(pattern, rendered.prompt + rendered.text)
            if found is not None:
                before, after, behind = found.groups()
                text = rendered.text
                begins = text.lstrip().startswith(opening.strip())
                lead = text[: len(text) - len(text.lstrip())] if begins else ""
                return msgspec.structs.replace(
                    reasoning,
                    open=_add_form(lead + opening.strip() + before, reasoning.open),
                    close=_add_form(after + closing.strip() + behind, reasoning.close),
                )
    return None


def _get_element_end(opening: str) -> str:
    """Return the delimiter that closes an XML tag or the like; "" if `opening` is none."""
    opening = opening.strip()
    return f"{opening[0]}/{opening[1:]}" if _TAG.fullmatch(opening) else ""


def _add_form(form: str, delimiter: Delimiter) -> Delimiter:
    """Return `delimiter` with `form` as the one to write; forms that differ only in whitespace are listed once."""
    others = [other for other in get_forms(delimiter) if other.split() != form.split()]
    return (form, *others) if others else form


def _add_reasoning(found: Dialect, reasoning: ReasoningFormat | None) -> Dialect:
    """Return the built-in dialect with the calls of `found` and this reasoning, else `found` with it."""
    for dialect in (found, *BUILT_IN.values()):
        if dialect.calls == found.calls and _get_words(dialect.reasoning) == _get_words(reasoning):
            break
    else:
        dialect = found
    if reasoning is not None and dialect.reasoning is not None:
        reasoning = msgspec.structs.replace(dialect.reasoning, open=reasoning.open, close=reasoning.close)
    return msgspec.structs.replace(dialect, reasoning=reasoning)


def _get_words(reasoning: ReasoningFormat | None) -> list[str]:
    return [] if reasoning is None else get_written_form(reasoning.close).split()


def _to_text(arguments: object) -> dict[str, str] | str:
    if isinstance(arguments, dict):
        return {str(key): str(value) for key, value in arguments.items()}
    return str(arguments)
