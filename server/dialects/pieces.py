"""The pieces that a parser finds in the text of a turn, in the order in which they were written."""

from __future__ import annotations

import msgspec


class ReasoningPiece(msgspec.Struct, frozen=True, gc=False):
    text: str


class ContentPiece(msgspec.Struct, frozen=True, gc=False):
    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    index: int  # among the calls of the turn
    id: str
    name: str


class ArgumentsPiece(msgspec.Struct, frozen=True, gc=False):
    """More of a call's arguments: pieces of one JSON text."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """The call is complete: its arguments are a JSON object."""

    index: int


Piece = ReasoningPiece | ContentPiece | CallBegin | ArgumentsPiece | CallEnd
