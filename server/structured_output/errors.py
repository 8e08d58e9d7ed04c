"""The errors of grammars and of the schemas and tags that they are written from."""

from __future__ import annotations


class GrammarError(Exception):
    """pointer: JSON pointer to the part at fault. keyword: the field at fault in it, if it is known."""

    def __init__(self, message: str, pointer: str = "", keyword: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.pointer = pointer
        self.keyword = keyword


class WhitespaceError(GrammarError):
    """The fault is in `whitespace_pattern`."""


class LarkError(ValueError):
    """The grammar cannot be translated."""


class UnsupportedLark(LarkError):
    """The part that was read is well-formed."""
