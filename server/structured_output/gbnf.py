"""Grammars in GBNF, written in Lark by llguidance."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from serve_llm.server.structured_output.errors import GrammarError

_LARK = re.compile(r"^\s*(?:%llguidance\b|[?!]*start\s*(?:\.\d+|\[[^]\n]*\]|\{[^}\n]*\})?\s*:(?!:=))", re.MULTILINE)
_PART = re.compile(r'(?P<literal>"(?:\\.|[^"\\])*")|(?P<klass>\[(?:\\.|[^]\\])*\])|#[^\n]*|[^"\[#]+', re.DOTALL)
_CHARACTER = re.compile(
    r"\\x(?P<x>[0-9a-fA-F]{2})|\\u(?P<u>[0-9a-fA-F]{4})|\\U(?P<U>[0-9a-fA-F]{8})|\\.|(?P<raw>.)", re.DOTALL
)
_OPERATORS = "&~"  # two of them in a row are one in Rust's classes
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t", '"': r"\"", "\\": r"\\"}


def is_lark(grammar: str) -> bool:
    """Whether a rule `start` or an option of llguidance marks the grammar as Lark. Otherwise it is GBNF, with a rule
    `root`."""
    return _LARK.search(grammar) is not None


def write_as_lark(grammar: str) -> str:
    """Raises GrammarError."""
    try:
        return gbnf_to_lark(_PART.sub(_rewrite_part, grammar))
    except GrammarError:
        raise
    except Exception as error:  # the converter raises exactly this class for an unknown rule
        raise GrammarError(f"neither Lark with a rule `start:` nor GBNF: {error}") from None


def _rewrite_part(part: re.Match[str]) -> str:
    """Replace escapes that the converter misreads by the characters themselves."""
    if part["literal"]:
        return f'"{_CHARACTER.sub(_rewrite_in_literal, part[0][1:-1])}"'
    if part["klass"]:
        return f"[{_CHARACTER.sub(_rewrite_in_class, part[0][1:-1])}]"
    return part[0]


def _rewrite_in_literal(found: re.Match[str]) -> str:
    char = found["raw"] or _read_escape(found)
    if char is None:
        return found[0]
    return _SHORT.get(char) or (f"\\x{ord(char):02x}" if char < " " or char == "\x7f" else char)


def _rewrite_in_class(found: re.Match[str]) -> str:
    raw = found["raw"]
    if raw and raw >= " " and raw not in _OPERATORS:
        return raw
    char = raw or _read_escape(found)
    if char is None:
        return found[0]
    return f"\\x{ord(char):02x}" if char < "\x80" else char


def _read_escape(found: re.Match[str]) -> str | None:
    """Return the character of \\x, \\u or \\U; None for other escapes."""
    digits = found["x"] or found["u"] or found["U"]
    if digits is None:
        return None
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise GrammarError(f"{found[0]} is no character")
    return chr(code)
