"""The streaming parser: from the text of a turn, in any pieces, to reasoning, content and calls.

The result depends on the text alone, not on how it is divided into pieces. The parser never raises: text that matches
nothing in the dialect is content, as it was written.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from serve_llm.server.dialects.call_header import CallHeader, CallHeaderReader
from serve_llm.server.dialects.call_ids import CallIdMaker
from serve_llm.server.dialects.delimiters import (
    INCOMPLETE,
    DelimiterMatch,
    DelimiterSet,
    Incomplete,
    TurnDelimiters,
    get_edge_after,
    get_edge_before,
    skip_space,
)
from serve_llm.server.dialects.dialect import Dialect, PythonicCodec, TaggedCodec
from serve_llm.server.dialects.json_codec import ArgumentsReader, Outcome
from serve_llm.server.dialects.pieces import ArgumentsPiece, CallBegin, CallEnd, ContentPiece, Piece, ReasoningPiece
from serve_llm.server.dialects.readers import create_reader
from serve_llm.server.dialects.tool import Tool

_PART_SEPARATOR = "\n"  # between two parts of the reasoning, or two messages of the content
_NO_DELIMITERS = DelimiterSet([])


class DialectParser:
    """The parser of one choice of a request."""

    def __init__(
        self,
        dialect: Dialect,
        tools: Sequence[Tool],
        *,
        in_reasoning: bool = False,
        parse_calls: bool = True,
        requires_call: bool = False,
        content_has_form: bool = False,
        spelled_ends: Sequence[str] | None = None,
        generator: random.Random | None = None,
        num_previous_calls: int = 0,
    ) -> None:
        """in_reasoning: the prompt has already opened the reasoning. parse_calls: False leaves calls in the content.
        requires_call: a grammar allows only calls after the reasoning, so that an incomplete delimiter at the end of a
        truncated turn is not content.

        content_has_form: a grammar constrains the content, so that calls replace content and never occur inside it, and
        the content ends only with the turn.

        spelled_ends: those of the dialect's `ends` that are not tokens, so that the model spells them; they count only
        at the very end of the turn, and other ends are content when spelled. None: all of them.

        generator: source of randomness for ids of calls. num_previous_calls: calls of the conversation so far, for ids
        that count them.
        """
        self._dialect = dialect
        self._tools = {tool.name: tool for tool in tools}
        self._calls = dialect.calls if parse_calls else None
        self._requires_call = requires_call
        self._content_has_form = content_has_form
        self._header_reader = CallHeaderReader(self._calls, self._tools) if self._calls is not None else None
        self._ids = CallIdMaker(generator or random.Random(), num_previous_calls)
        self._delimiters = TurnDelimiters(dialect, self._calls, spelled_ends)

        self._pieces: list[Piece] = []
        self._buffer = ""  # text that no state has read yet
        self._is_final = False  # whether no text follows the buffer
        self._read_state: Callable[[], bool] = self._read_start
        self._num_calls = 0
        self._arguments: ArgumentsReader | None = None  # reads the open call

        self.is_reasoning = False  # whether the text so far ends inside the reasoning
        self._can_reason = dialect.reasoning is not None
        self._is_in_message = False  # between the delimiters of content
        # Whether whitespace that comes next does not belong to the part.
        self._drops_space = dialect.trims_content and not content_has_form
        self._lead = ""  # the whitespace that ends the delimiter before the part
        self._indentation = ""  # text before the first line of content
        self._has_text = False  # whether the current part of the reasoning or content has text
        self._needs_separator = False  # whether text of the current part follows that of an earlier one
        self._has_reasoning = False
        self._has_content = False
        if in_reasoning and dialect.reasoning is not None:
            self._begin_reasoning()
        else:
            self._buffer = dialect.start

    @property
    def is_content(self) -> bool:
        """Whether the text so far ends where content may follow."""
        return not self.is_reasoning and self._read_state in (self._read_start, self._read_text)

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that become certain with this text."""
        if not self._buffer and self._is_plain(text):
            return [ReasoningPiece(text) if self.is_reasoning else ContentPiece(text)]
        self._buffer += text
        return self._read()

    def finish(self) -> list[Piece]:
        """Return the rest, once the turn has ended."""
        self._is_final = True
        return self._read()

    def _read(self) -> list[Piece]:
        while self._buffer and self._read_state():
            pass
        pieces = self._pieces
        self._pieces = []
        return pieces

    def _is_plain(self, text: str) -> bool:
        """Whether text continues the current part and is not part of a delimiter, whatever follows it."""
        return (
            self._has_text
            and self._read_state == self._read_text
            and bool(text)
            and not text[-1].isspace()
            and self._watched.is_absent(text)
        )

    @property
    def _watched(self) -> DelimiterSet:
        """Return the delimiters that count in the current part."""
        if self.is_reasoning:
            return self._delimiters.reasoning_end
        if self._is_in_message:
            return self._delimiters.message_close
        return _NO_DELIMITERS if self._is_formed else self._delimiters.outside

    # The states. Each reads what is certain from the beginning of the buffer, and returns whether another state can
    # continue.

    def _read_start(self) -> bool:
        """Read at the start of content, where reasoning may open and calls may come without a delimiter."""
        start = skip_space(self._buffer, 0)
        if start == len(self._buffer) and not self._is_final:
            return False
        found = self._delimiters.get_start(self._can_reason).match(self._buffer, start, self._is_final)
        if found is INCOMPLETE:
            return False
        if found is not None and found.label != "call":
            self._cross(found)
            return True
        if self._calls is not None and (self._calls.is_bare or found is not None):
            header = self._read_first_header(start)
            if header is INCOMPLETE:
                return False
            if header is not None:
                self._begin_call(header, start)
                return True
        self._read_state = self._read_text
        return True

    def _read_text(self) -> bool:
        """Read reasoning or content, up to the delimiter that ends it."""
        if self._drops_space and not self._drop_space():
            return False
        start = 0
        while True:
            found = self._watched.find(self._buffer, start, self._is_final)
            if isinstance(found, int):
                self._add_text(found)
                return False
            if self._must_be_last(found):
                if skip_space(self._buffer, found.end) < len(self._buffer):
                    start = found.start + 1
                    continue
                if not self._is_final:
                    self._add_text(found.start)
                    return False
            if found.label != "call":
                self._cross(found)
                return True
            header = self._read_first_header(found.start)
            if header is INCOMPLETE:
                self._add_text(found.start)
                return False
            if header is not None:
                self._begin_call(header, found.start)
                return True
            start = found.start + 1

    def _drop_space(self) -> bool:
        """Drop the whitespace between a delimiter and the part after it. Returns False if this needs more text.

        Content under a grammar begins with whitespace if the grammar says so: only that of the delimiter is dropped.
        Other content keeps the indentation of its first line.
        """
        if self._is_formed and self._lead:
            if len(self._buffer) < len(self._lead) and self._lead.startswith(self._buffer):
                if not self._is_final:
                    return False
                self._buffer = ""  # the turn was truncated in the delimiter
            self._buffer = self._buffer.removeprefix(self._lead)
            self._lead = ""
            return True
        if self._is_formed:
            return True
        text = self._buffer.lstrip()
        space = self._buffer[: len(self._buffer) - len(text)]
        if space and not self.is_reasoning and not self._dialect.trims_content:
            if not text and not self._is_final:
                return False
            _, line_end, indentation = space.rpartition("\n")
            self._indentation = indentation if line_end else ""
        self._buffer = text
        return True

    @property
    def _is_formed(self) -> bool:
        """Whether the text being read is content under a grammar."""
        return self._content_has_form and not self.is_reasoning and not self._num_calls

    def _must_be_last(self, found: DelimiterMatch) -> bool:
        """Whether a delimiter counts only if nothing follows it."""
        return found.label == "end" or (found.label == "close" and self._is_in_message and self._content_has_form)

    def _read_arguments(self) -> bool:
        assert self._arguments is not None
        result = self._arguments.read(self._buffer, 0, self._is_final)
        self._buffer = self._buffer[result.end :]
        self._add_arguments(result.json)
        if result.outcome is Outcome.MORE:
            return False
        if result.outcome is Outcome.BROKEN:
            self._read_state = self._read_malformed
            return True
        self._pieces.append(CallEnd(self._num_calls - 1))
        assert self._calls is not None
        is_closed = isinstance(self._calls.codec, TaggedCodec | PythonicCodec)
        self._read_state = self._read_between if is_closed else self._read_call_close
        return True

    def _read_malformed(self) -> bool:
        """Read a call whose arguments are invalid: its whole text is passed on as it is."""
        found = self._delimiters.call_end.find(self._buffer, 0, self._is_final)
        end = found if isinstance(found, int) else found.start
        self._add_arguments(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if isinstance(found, int):
            return False
        self._read_state = self._read_call_close
        return True

    def _read_call_close(self) -> bool:
        start = skip_space(self._buffer, 0)
        found = self._delimiters.call_close.match(self._buffer, start, final=False)
        if found is INCOMPLETE:
            return self._drop_cut_close()
        if found is not None:
            self._buffer = self._buffer[found.end :]
        self._read_state = self._read_between
        return True

    def _read_between(self) -> bool:
        """Read after a call: another call of the section, its end, or text that belongs to neither."""
        assert self._header_reader is not None
        start = skip_space(self._buffer, 0)
        if start == len(self._buffer):
            return False
        found = self._delimiters.section_close.match(self._buffer, start, final=False)
        if found is INCOMPLETE:
            return self._drop_cut_close()
        if found is not None:
            self._buffer = self._buffer[found.end :]
        else:
            separator = self._delimiters.separator.match(self._buffer, start, self._is_final)
            if separator is INCOMPLETE:
                return False
            header = self._header_reader.read(self._buffer, separator.end if separator else start, self._is_final)
            if header is INCOMPLETE:
                return False
            if header is not None:
                self._begin_call(header, start)
                return True
        self._begin_content()
        self._drops_space = self._dialect.trims_content
        self._read_state = self._read_text
        return True

    def _drop_cut_close(self) -> bool:
        """Drop the beginning of a delimiter that closes a call. If the turn ends in it, it is not content."""
        if self._is_final:
            self._buffer = ""
        return False

    # Transitions between states.

    def _read_first_header(self, start: int) -> CallHeader | Incomplete | None:
        assert self._header_reader is not None
        return self._header_reader.read_first(self._buffer, start, self._is_final)

    def _cross(self, found: DelimiterMatch) -> None:
        """Continue after a delimiter that is not one of calls."""
        if found.label in ("skip", "end"):
            text = self._buffer[: found.start]
            kept = text.rstrip()
            self._emit(kept)
            self._buffer = text[len(kept) :] + self._buffer[found.end :]
            return
        self._end_part(found.start)
        self._buffer = self._buffer[found.end :]
        if found.label == "reasoning":
            self._begin_reasoning()
            return
        was_reasoning = self.is_reasoning
        self._begin_content()
        if found.label == "content" and self._dialect.content is not None:
            self._lead = get_edge_after(self._dialect.content.open)
            self._is_in_message = True
            self._read_state = self._read_text
        elif was_reasoning and self._dialect.reasoning is not None:
            self._lead = get_edge_after(self._dialect.reasoning.close)

    def _begin_reasoning(self) -> None:
        assert self._dialect.reasoning is not None
        self._can_reason = self._dialect.reasoning.repeats and not self._content_has_form
        self._drops_space = True
        self._has_text = False
        self._needs_separator = self._has_reasoning
        self.is_reasoning = True
        self._read_state = self._read_text

    def _begin_content(self) -> None:
        self.is_reasoning = False
        self._is_in_message = False
        self._drops_space = True
        self._lead = ""
        self._indentation = ""
        self._has_text = False
        self._needs_separator = self._has_content and self._dialect.content is not None
        self._read_state = self._read_start

    def _begin_call(self, header: CallHeader, start: int) -> None:
        """start: of the call's first delimiter."""
        assert self._calls is not None
        self._end_part(start)
        self.is_reasoning = False
        self._is_in_message = False
        self._buffer = self._buffer[header.end :]
        self._can_reason = self._dialect.reasoning is not None and self._dialect.reasoning.repeats
        call_id = self._ids.make(self._calls.id_rule, header.name, header.written_id, self._num_calls)
        self._pieces.append(CallBegin(self._num_calls, call_id, header.name))
        self._num_calls += 1
        self._arguments = create_reader(self._calls, self._tools.get(header.name))
        self._read_state = self._read_arguments

    # Text of the current part.

    def _add_text(self, end: int) -> None:
        """Pass on the buffer up to a position, except whitespace that may turn out to belong to a delimiter."""
        text = self._buffer[:end]
        kept = text.rstrip()
        if self._is_final and end == len(self._buffer) and self._keeps_last_space(kept):
            kept = text
        self._emit(kept)
        self._buffer = self._buffer[len(kept) :]

    def _keeps_last_space(self, text: str) -> bool:
        """Whether whitespace at the end of the turn is content. text: what comes before it in the buffer."""
        if self.is_reasoning or (self._dialect.trims_content and not self._content_has_form):
            return False
        return bool(text) or self._has_text or not self._num_calls

    def _end_part(self, end: int) -> None:
        """Pass on the rest of a part: the buffer up to the delimiter that ends it."""
        text = self._buffer[:end]
        if self._is_formed and self._is_in_message and self._dialect.content is not None:
            self._emit(text.removesuffix(get_edge_before(self._dialect.content.close)))
        else:
            self._emit(text.rstrip())

    def _emit(self, text: str) -> None:
        if not text or (self._is_final and self._requires_call and not self.is_reasoning):
            return
        text = self._indentation + text
        self._indentation = ""
        if self._needs_separator:
            text = _PART_SEPARATOR + text
            self._needs_separator = False
        self._has_text = True
        self._drops_space = False
        if self.is_reasoning:
            self._has_reasoning = True
            self._pieces.append(ReasoningPiece(text))
        else:
            self._has_content = True
            self._pieces.append(ContentPiece(text))

    def _add_arguments(self, text: str) -> None:
        if text:
            self._pieces.append(ArgumentsPiece(self._num_calls - 1, text))
