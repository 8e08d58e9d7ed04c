"""Translate regular expressions of JSON schemas (ECMAScript) to Rust's, for llguidance."""

from __future__ import annotations

import re

from serve_llm.server.structured_output.errors import GrammarError

_PART = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)
_UNIT = re.compile(r"\\.|\[\^?(?:\\.|[^]\\])*\]|.", re.DOTALL)  # one unit: a character, an escape or a whole class
_DOT = r"[^\n\r\u2028\u2029]"
# ECMAScript's whitespace includes U+FEFF and excludes U+0085, unlike Rust's.
_SPACE = r"\t-\r\x20\u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_NO_SPACE = (
    r"\x00-\x08\x0E-\x1F!-\u009F\u00A1-\u167F\u1681-\u1FFF\u200B-\u2027\u202A-\u202E"
    r"\u2030-\u205E\u2060-\u2FFF\u3001-\uFEFE\uFF00-\U0010FFFF"
)
_JSON_SPACE = r"\x20\t\n\r"
_SPACES = {r"\s": _SPACE, r"\S": _NO_SPACE}
# ^(?![a-c]*$): not only such characters. pydantic writes it for Decimal.
_NOT_ONLY = re.compile(r"\^\(\?!\^?\[([^]\\^[&~][^]\\[&~]*)\]\*\$\)([^|]*)", re.DOTALL)
_TO_QUOTE = re.compile(r"[^\w\s\x80-\U0010ffff]|[\x00-\x1f\x7f]")  # ASCII except letters, digits, _ and the space
_DOT_ALL_FLAG = re.compile(r"\(\?[a-z]*s")


def translate_pattern(pattern: str) -> str:
    """Translate an expression where the two dialects differ. A translated pattern stays unchanged.

    In classes, Rust's [, &&, ~~ and -- are operators. Its dot matches more line ends, and its whitespace differs.
    Raises GrammarError.
    """
    dot = "." if _DOT_ALL_FLAG.search(pattern) else _DOT
    pieces: list[str] = []
    is_in_class = False
    for part in _PART.findall(pattern):
        if not is_in_class:
            if part in ("[]", "[^]"):
                raise GrammarError(f"the class {part} is not supported")
            is_in_class = part in ("[", "[^")
            pieces.append(f"[{_SPACES[part]}]" if part in _SPACES else dot if part == "." else part)
            continue
        if part == "-" and pieces[-1] == "-":
            raise GrammarError(r"two hyphens in a row in a class are not supported: write \- for a hyphen")
        is_in_class = not part.endswith("]") or part.startswith("\\")
        pieces.append(f"\\{part}" if part[0] in "[&~" else _SPACES.get(part, part))
    return "".join(pieces)


def split_lookahead(pattern: str) -> tuple[str, str] | None:
    """Return the expression without its lookahead, and another one that must also match; None without such a
    lookahead."""
    found = _NOT_ONLY.fullmatch(pattern)
    return None if found is None else (f"^{found[2]}", f"[^{found[1]}]")


def quote_pattern(text: str) -> str:
    """Return the expression that matches only this text."""
    return _TO_QUOTE.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def split_units(pattern: str) -> list[str]:
    """Split an expression into characters, where each escape and each class is one."""
    return _UNIT.findall(pattern)


def narrow_whitespace(pattern: str) -> str:
    """Replace `\\s`, which matches other characters too, by JSON's whitespace."""

    def narrow(unit: str) -> str:
        return re.sub(r"\\.", lambda escape: _JSON_SPACE if escape[0] == r"\s" else escape[0], unit, flags=re.DOTALL)

    return "".join(f"[{_JSON_SPACE}]" if unit == r"\s" else narrow(unit) for unit in split_units(pattern))


def closes_unopened_group(pattern: str) -> bool:
    """Whether the expression would change the meaning of the text around it."""
    depth = 0
    for unit in split_units(pattern):
        depth += (unit == "(") - (unit == ")")
        if depth < 0:
            return True
    return False
