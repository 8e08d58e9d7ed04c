"""The grammar of a whole turn: reasoning, then content, calls, or both, in the model's own format.

If the model may choose whether to call a tool, all other text stays free: every token is allowed until an opening
delimiter of calls is complete, and from there on only a call. Delimiters are recognised both as special tokens, if the
tokenizer has them, and as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serve_llm.server.dialects.argument_grammar import ArgumentsWriter
from serve_llm.server.dialects.delimiters import get_edge_after
from serve_llm.server.dialects.dialect import (
    CallFormat,
    Delimiter,
    Dialect,
    JsonCodec,
    get_forms,
    get_written_form,
)
from serve_llm.server.dialects.lark import (
    ANY_TEXT,
    GrammarTokens,
    LarkWriter,
    Symbol,
    Symbols,
    has_text,
    join,
    write_free_text,
    write_literal,
    write_patterns,
    write_regex,
    write_special_token,
)
from serve_llm.server.dialects.schema_members import list_names
from serve_llm.server.dialects.tool import Tool, ToolChoice
from serve_llm.server.structured_output.errors import GrammarError

_SPACE = write_regex(r"\s{1,4}")  # between two parts of a turn
_IDS = {"kimi": "[0-9]{1,3}", "mistral": "[a-zA-Z0-9]{9}", "random": "[a-zA-Z0-9]{1,40}"}


def write_turn_grammar(
    dialect: Dialect,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool = True,
    in_reasoning: bool = False,
    content: str | None = None,
    tokens: GrammarTokens,
    write_schema: Callable[[object], object],
) -> str | None:
    """Write the grammar as it is sent to the engine; None if there is nothing to enforce.

    parallel: whether a turn may have several calls. in_reasoning: the prompt has opened the reasoning. content: the
    grammar of the content; None leaves it free. write_schema: returns a JSON schema as llguidance takes it.

    Arguments must match the tool's schema if the tool is strict or a call is required; otherwise they must be
    well-formed. Raises GrammarError if such a schema cannot be enforced.
    """
    callable_tools = choice.select(tools) if dialect.calls is not None else ()
    if not callable_tools and content is None:
        return None
    writer = _TurnWriter(dialect, callable_tools, choice, parallel, LarkWriter(tokens), write_schema)
    return writer.write(in_reasoning, content)


class _TurnWriter:
    def __init__(
        self,
        dialect: Dialect,
        tools: Sequence[Tool],
        choice: ToolChoice,
        parallel: bool,
        lark: LarkWriter,
        write_schema: Callable[[object], object],
    ) -> None:
        self._dialect = dialect
        self._tools = tools
        self._choice = choice
        self._lark = lark
        self._arguments = ArgumentsWriter(
            lark, write_schema, (name for tool in tools for name in list_names(tool.parameters))
        )
        self._calls = dialect.calls if tools else None
        self._repeats = parallel and not choice.is_named
        self._call_rules: dict[str, Symbol] = {}
        self._writes_objects = False  # whether calls can come in place of JSON content
        if self._calls is not None and any(form in dialect.ends for form in get_forms(self._calls.close)):
            self._repeats = False  # a call ends the turn

    def write(self, in_reasoning: bool, content: str | None) -> str:
        if self._choice.mode == "required" and self._calls is not None:
            return self._lark.write(self._write_answer(in_reasoning, [self._write_section()], None))
        if content is not None:
            formed = self._write_content(content)
            self._writes_objects = self._calls is not None and self._calls.is_bare
            section = [self._write_section()] if self._calls is not None else None
            return self._lark.write(self._write_answer(in_reasoning, section, formed))
        return self._lark.write(self._write_free_turn(in_reasoning))

    # Turns that must contain something.

    def _write_answer(self, in_reasoning: bool, section: Symbols | None, content: Symbols | None) -> Symbol:
        """Write reasoning, if any, and a section of calls or content.

        Content may begin with whitespace, so the delimiter before it has exactly its written form.
        """
        reasoning = self._dialect.reasoning
        answer = self._lark.add_rule(*(way for way in (content, section) if way is not None))
        if reasoning is None:
            return answer
        between: Symbols = [self._lark.repeat([_SPACE], "?"), *self._lark.write_text(self._dialect.start)]
        following = join(between, [answer])
        edge = get_edge_after(reasoning.close)
        if content is not None and self._dialect.content is None:
            before: Symbols = [write_literal(edge)] if edge else []
            following = join(before, [answer])
            if section is not None and edge:
                following = [self._lark.add_rule(following, section)]
        openings: tuple[Delimiter, ...] = ()
        if reasoning.ends_at_call and self._calls is not None:
            openings = (self._calls.section_open, self._calls.open)
        text, close = self._write_text_until(reasoning.close, *openings)
        rest = self._lark.add_rule([text, close, *following])
        if in_reasoning:
            return rest
        opening = self._lark.write_text(get_written_form(reasoning.open))
        return self._lark.add_rule([answer], join(opening, [rest]))

    def _write_content(self, content: str) -> Symbols:
        grammar = [self._lark.add_grammar(content)]
        frame = self._dialect.content
        if frame is None:
            return grammar
        close = get_written_form(frame.close)
        ends_turn = any(form in self._dialect.ends for form in get_forms(frame.close))
        return join(
            self._lark.write_text(get_written_form(frame.open)),
            grammar,
            [] if ends_turn else self._lark.write_text(close),
        )

    def _write_section(self) -> Symbol:
        """Write a section of calls with all its delimiters."""
        assert self._calls is not None
        calls = self._calls
        lead = [self._lark.repeat([write_literal(calls.lead)], "?")] if calls.lead else []
        opening = get_written_form(calls.section_open) + get_written_form(calls.open)
        return self._lark.add_rule([*lead, self._write_call(opening), *self._write_more()])

    def _write_more(self) -> Symbols:
        """Write what follows the first call of a section."""
        assert self._calls is not None
        items: Symbols = []
        if self._repeats:
            call = self._write_call(self._calls.separator + get_written_form(self._calls.open))
            items.append(self._lark.repeat([call], "*"))
        return [*items, *self._lark.write_text(get_written_form(self._calls.section_close))]

    def _write_call(self, opening: str) -> Symbol:
        """Write a call of any tool. opening: everything before the name, or before the object that contains it."""
        if opening not in self._call_rules:
            ways = [self._write_tool(tool, opening) for tool in self._tools]
            self._call_rules[opening] = self._lark.add_rule(*ways)
        return self._call_rules[opening]

    def _write_tool(self, tool: Tool, opening: str) -> Symbols:
        assert self._calls is not None
        calls = self._calls
        codec = calls.codec
        close = get_written_form(calls.close)
        if close in self._dialect.ends:
            close = ""
        if isinstance(codec, JsonCodec) and codec.name_key:
            if self._writes_objects:
                return [*self._lark.write_text(opening), self._write_object(codec, tool), *self._lark.write_text(close)]
            header = join(self._lark.write_text(opening + "{"), self._write_id_member(codec))
            header = join(header, [write_literal(f'"{codec.name_key}": "{tool.name}", "{codec.arguments_key}": ')])
            close = "}" + close
        else:
            header = self._lark.write_text(opening + tool.name + (calls.id_open or get_written_form(calls.name_end)))
            if calls.id_open:
                name_end = self._lark.write_text(get_written_form(calls.name_end))
                header = join(header, [write_regex(_IDS[calls.id_rule])], name_end)
        return [*header, *self._write_arguments(tool), *self._lark.write_text(close)]

    def _write_object(self, codec: JsonCodec, tool: Tool) -> Symbol:
        """Write a call as a JSON object, like the content's objects, because a lexer could not tell them from a fixed
        text."""
        return self._arguments.write_object(codec, tool.name, self._find_schema(tool))

    def _write_id_member(self, codec: JsonCodec) -> Symbols:
        if not codec.id_key:
            return []
        return join([write_literal(f'"{codec.id_key}": "')], [write_regex("[0-9]{1,3}")], [write_literal('", ')])

    def _find_schema(self, tool: Tool) -> dict[str, object] | None:
        """Return the schema that the arguments must match, if any."""
        return tool.argument_schema if self._choice.binds(tool) else None

    def _write_arguments(self, tool: Tool) -> Symbols:
        assert self._calls is not None
        try:
            return self._arguments.write(self._calls.codec, self._find_schema(tool))
        except GrammarError as error:
            raise GrammarError(f"{error.message} (function {tool.name})", error.pointer, error.keyword) from None

    # Turns that may contain anything.

    def _write_free_turn(self, in_reasoning: bool) -> Symbol:
        body = self._write_free_body()
        reasoning = self._dialect.reasoning
        if reasoning is None or reasoning.repeats or reasoning.ends_at_call:
            return body
        text, close = self._write_text_until(reasoning.close)
        unclosed = self._write_any_text(reasoning.close)
        inside = self._lark.add_rule([text, close, body], [unclosed])
        if in_reasoning:
            return inside
        opening = self._lark.write_text(get_written_form(reasoning.open).strip())
        if opening[0].is_terminal:
            return body  # the free text contains it
        return self._lark.add_rule([body], [*opening, inside])

    def _write_text_until(self, delimiter: Delimiter, *excluded: Delimiter) -> tuple[Symbol, Symbol]:
        """Write text of any tokens up to the first of the delimiters, which ends it."""
        free = write_free_text(write_patterns(delimiter, *excluded))
        other = self._lark.tokens.write_wordless(self._find_first_ids(delimiter, *excluded))
        text = self._lark.add_rule([])
        if other:
            text = self._lark.repeat([free, Symbol(other, is_terminal=False)], "*")
        patterns = " | ".join(write_patterns(delimiter))
        ways = [join([free], [Symbol(f"({patterns})", is_terminal=True)])]
        for form in get_forms(delimiter):
            items = self._lark.write_text(form.strip())
            if not items[0].is_terminal:
                ways.append([free, *items])
        return text, self._lark.add_rule(*ways)

    def _write_any_text(self, *excluded: Delimiter) -> Symbol:
        """Write text of any tokens without the delimiters."""
        free = write_free_text(write_patterns(*excluded))
        other = self._lark.tokens.write_wordless(self._find_first_ids(*excluded))
        if not other:
            return self._lark.add_rule([free])
        return self._lark.add_rule([free, self._lark.repeat([Symbol(other, is_terminal=False), free], "*")])

    def _find_first_ids(self, *delimiters: Delimiter) -> list[int]:
        """Return the special tokens with which forms of the delimiters begin."""
        forms = [form.strip() for delimiter in delimiters for form in get_forms(delimiter) if form.strip()]
        pieces = [self._lark.tokens.split(form) for form in forms]
        return [found[0] for found in pieces if isinstance(found[0], int)]

    def _write_free_body(self) -> Symbol:
        """Write free text with calls in it: any text that does not begin a call, and calls after their opening
        delimiters.

            body:  text rest | text trigger section after
            rest:  nothing | token text rest | token trigger section after
        """
        assert self._calls is not None
        openings = _find_openings(self._dialect, self._calls, self._tools, self._lark)
        free = write_free_text(write_patterns(openings.text_forms))
        rest = self._lark.reserve_rule()
        after = self._lark.reserve_rule()

        def follow(text: Symbol) -> Symbol:
            called = [
                [
                    *join([text], [Symbol(write_patterns(form)[0], is_terminal=True)]),
                    *self._write_begun("", form),
                    after,
                ]
                for form in openings.text_forms
            ]
            return self._lark.add_rule([text, rest], *called)

        more = follow(free)
        ways: list[Symbols] = [[]]
        # A delimiter with non-ASCII characters could be composed of tokens that are not text by themselves.
        is_hidden = any(not form.isascii() and not self._find_first_ids(form) for form in openings.text_forms)
        other = self._lark.tokens.write_wordless(openings.by_token, special_only=is_hidden)
        if other:
            ways.append([Symbol(other, is_terminal=False), more])
        for token_id, token in openings.by_token.items():
            if token.is_shared:
                text = follow(_exclude_start(free, token.rests))
                ways.append([write_special_token(token_id), text])
            ways += [[*self._write_begun(form.strip(), form), after] for form in token.forms]
        self._lark.define_rule(rest, *ways)
        self._lark.define_rule(after, [more] if self._repeats else [])
        if not openings.start_forms:
            return more
        starts = [[*self._write_begun(form.rstrip(), form), after] for form in openings.start_forms]
        return self._lark.add_rule([follow(_exclude_start(free, openings.start_patterns))], *starts)

    def _write_begun(self, opening: str, form: str) -> Symbols:
        """Write a section of calls after its opening. form: of the delimiter that contains the opening."""
        assert self._calls is not None
        opening += form[len(form.rstrip()) :]
        if not has_text(self._calls.section_open) and not self._calls.is_bare:
            return [self._write_call(opening)]
        return [self._write_call(opening + get_written_form(self._calls.open)), *self._write_more()]


@dataclass
class _OpeningToken:
    """A special token that opens calls."""

    is_shared: bool  # whether it also begins other text
    forms: list[str] = field(default_factory=list)  # forms of the delimiter that begin with this token
    rests: list[str] = field(default_factory=list)  # patterns of the text that makes it the opening of a call


@dataclass
class _Openings:
    """Where calls can open in free text."""

    text_forms: tuple[str, ...] = ()  # anywhere, as text
    by_token: dict[int, _OpeningToken] = field(default_factory=dict)
    start_forms: list[str] = field(default_factory=list)  # only at the start of the text
    start_patterns: list[str] = field(default_factory=list)  # patterns of calls at the start


def _find_openings(dialect: Dialect, calls: CallFormat, tools: Sequence[Tool], lark: LarkWriter) -> _Openings:
    is_sectioned = has_text(calls.section_open) or calls.is_bare
    forms = list(get_forms(calls.section_open if is_sectioned else calls.open))
    openings = _Openings()
    header = _write_header_pattern(calls, tools) if calls.is_bare else ""
    if dialect.start:
        # Delimiters that are not single tokens count only after the beginning of the message.
        openings.start_forms = [f" {form}" for form in forms if isinstance(lark.tokens.split(form)[0], str)]
        openings.start_patterns = write_patterns(tuple(openings.start_forms))
        forms = [f"{dialect.start} {form}" if f" {form}" in openings.start_forms else form for form in forms]
    if calls.is_bare:
        openings.start_forms = forms
    for form in forms:
        first, *others = [*lark.tokens.split(form.strip()), ""]
        rest = write_patterns(others[0]) if others and isinstance(others[0], str) else []
        pattern = " ".join((*rest, header)) if header else " ".join(rest)
        if isinstance(first, int):
            is_shared = calls.is_bare or first in _find_other_ids(dialect, lark)
            token = openings.by_token.setdefault(first, _OpeningToken(is_shared))
            token.forms += [] if calls.is_bare else [form]
            token.rests += [pattern] if pattern else []
        elif calls.is_bare:
            openings.start_patterns.append(" ".join((*write_patterns(first), header)))
    if not calls.is_bare and not dialect.start:
        openings.text_forms = tuple(forms)
    return openings


def _find_other_ids(dialect: Dialect, lark: LarkWriter) -> set[int]:
    """Return the special tokens that begin delimiters other than those of calls."""
    texts = [dialect.start, *dialect.ends]
    for part in (dialect.reasoning, dialect.content):
        texts += part.list_delimiters() if part is not None else ()
    pieces = [lark.tokens.split(text.strip()) for text in texts if text.strip()]
    return {found[0] for found in pieces if isinstance(found[0], int)}


def _write_header_pattern(calls: CallFormat, tools: Sequence[Tool]) -> str:
    """Return the pattern with which a call without delimiter begins."""
    names = " | ".join(write_literal(tool.name).expression for tool in tools)
    if isinstance(calls.codec, JsonCodec):
        key = write_literal(f'"{calls.codec.name_key}"').expression
        return f'/\\s*/ "{{" /\\s*/ {key} /\\s*/ ":" /\\s*/ "\\"" ({names}) "\\""'
    return f'/\\s*/ ({names}) /\\s*/ "("'


def _exclude_start(free: Symbol, patterns: Sequence[str]) -> Symbol:
    """Return free text that begins with none of the patterns."""
    if not patterns:
        return free
    return Symbol(f"({free.expression} & ~(/\\s*/ ({' | '.join(patterns)}) {ANY_TEXT}))", is_terminal=True)
