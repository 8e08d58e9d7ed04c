"""A whole turn: parse its text at once, and find where in it the prompt ends."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import msgspec

from serve_llm.server.dialects.dialect import Delimiter, Dialect, get_forms
from serve_llm.server.dialects.parser import DialectParser
from serve_llm.server.dialects.pieces import ArgumentsPiece, CallBegin, ContentPiece, ReasoningPiece
from serve_llm.server.dialects.tool import Tool


class ParsedCall(msgspec.Struct):
    id: str
    name: str
    arguments: str = ""  # JSON text

    def read_arguments(self) -> object:
        """Return the value of the arguments, or their text if the call was truncated."""
        try:
            return json.loads(self.arguments)
        except ValueError:
            return self.arguments


class Turn(msgspec.Struct):
    reasoning: str = ""
    content: str = ""
    calls: list[ParsedCall] = msgspec.field(default_factory=list)


def parse_turn(dialect: Dialect, tools: Sequence[Tool], text: str, *, in_reasoning: bool = False) -> Turn:
    """Parse a turn from its text. in_reasoning: the prompt has opened the reasoning."""
    parser = DialectParser(dialect, tools, in_reasoning=in_reasoning, generator=random.Random(0))
    turn = Turn()
    for piece in [*parser.push(text), *parser.finish()]:
        match piece:
            case ReasoningPiece(text=part):
                turn.reasoning += part
            case ContentPiece(text=part):
                turn.content += part
            case CallBegin(id=call_id, name=name):
                turn.calls.append(ParsedCall(call_id, name))
            case ArgumentsPiece(index=index, text=part):
                turn.calls[index].arguments += part
    return turn


def opens_reasoning(dialect: Dialect, prompt: str, header: str) -> bool:
    """Whether the turn that continues `prompt` begins inside reasoning.

    header: what the chat template writes before a turn, such as `<|im_start|>assistant`; only what follows the last
    one counts, so that delimiters in earlier messages do not. Without it, only a delimiter at the very end does.
    """
    reasoning = dialect.reasoning
    if reasoning is None:
        return False
    if not header or header not in prompt:
        return _ends_with(prompt, reasoning.open) or (
            reasoning.is_open_at_start and not _ends_with(prompt, reasoning.close)
        )
    begun = prompt[prompt.rfind(header) + len(header) :]
    opened = max(begun.rfind(form.strip()) for form in get_forms(reasoning.open))
    closed = max(begun.rfind(form.strip()) for form in get_forms(reasoning.close))
    if opened == closed == -1:
        return reasoning.is_open_at_start
    return opened > closed


def _ends_with(prompt: str, delimiter: Delimiter) -> bool:
    return prompt.rstrip().endswith(tuple(form.strip() for form in get_forms(delimiter)))
