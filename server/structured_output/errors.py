"""Errors of grammars, and of the schemas and tags from which they are written."""

from __future__ import annotations


class GrammarError(Exception):
    """pointer: JSON pointer to the invalid part. keyword: the invalid field in it, if known."""

    def __init__(self, message: str, pointer: str = "", keyword: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.pointer = pointer
        self.keyword = keyword


class WhitespaceError(GrammarError):
    """`whitespace_pattern` is invalid."""


class LarkError(ValueError):
    """The grammar cannot be translated."""


class UnsupportedLark(LarkError):
    """The part read so far is well-formed."""
