"""Regular expressions for all texts that others do not match."""

from __future__ import annotations

import re
from collections.abc import Iterable

from serve_llm.server.structured_output.pattern import quote_pattern, split_units

_MAX_CHARACTERS = 4000  # limit on all texts together
_MAX_LENGTH = 100  # limit on one text: each character is a group nested in another
_ANY = "(?s:.)"
_OPPOSITES = {r"\d": r"\D", r"\D": r"\d", r"\w": r"\W", r"\W": r"\w", r"\s": r"\S", r"\S": r"\s"}
_LITERAL = re.compile(r"[^\\.^$*+?()\[\]{}|]|\\([^\w\s])", re.DOTALL)

Trie = dict[str, "Trie"]  # by the next character; "" stands for the end of a text


def negate_texts(texts: Iterable[str], *, and_longer: bool = False) -> str | None:
    """Return an expression for all texts except these; None if there is none, or if it would be too long.

    and_longer: also exclude texts that begin with one of these.
    """
    texts = list(texts)
    if sum(map(len, texts)) > _MAX_CHARACTERS or max(map(len, texts), default=0) > _MAX_LENGTH:
        return None
    root: Trie = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    if and_longer and "" in root:
        return None
    return f"^{_negate(root, and_longer)}$"


def negate_pattern(pattern: str) -> str | None:
    """Return an expression, in the same syntax, for all texts that `pattern` does not match; None if none is known.

    Supports fixed texts from the start on, and one class of characters.
    """
    units = split_units(pattern)
    is_anchored = units[:1] == ["^"]
    is_full = is_anchored and units[-1:] == ["$"]
    inner = units[is_anchored : len(units) - is_full]
    if is_anchored and (texts := _list_texts(inner)):
        return negate_texts(texts, and_longer=not is_full)
    if not inner or len(inner) > 2 or (other := _negate_class(inner[0])) is None:
        return None
    quantifier = inner[1] if len(inner) == 2 else ""
    if quantifier not in ("", "+", "*"):
        return None
    if not is_anchored:
        return None if quantifier == "*" else f"^{other}*$"
    if not is_full:
        return None if quantifier == "*" else f"^(?:{other}{_ANY}*)?$"
    if not quantifier:
        return f"^(?:{other}|{_ANY}{{2,}})?$"
    return f"^{_ANY}*{other}{_ANY}*$" if quantifier == "*" else f"^(?:{_ANY}*{other}{_ANY}*)?$"


def _negate(node: Trie, and_longer: bool) -> str:
    """Return what may follow the characters that lead to a node."""
    nexts = {character: child for character, child in node.items() if character}
    others = f"[^{''.join(map(quote_pattern, nexts))}]" if nexts else _ANY
    ways = [f"{others}{_ANY}*"]
    for character, child in nexts.items():
        if not (and_longer and "" in child):
            ways.append(quote_pattern(character) + _negate(child, and_longer))
    return f"(?:{'|'.join(ways)}){'' if '' in node else '?'}"


def _list_texts(units: list[str]) -> list[str] | None:
    """Return the fixed texts that a part of an expression matches; None if it is neither a text nor a group of
    texts."""
    if units[:1] == ["("] and units[-1:] == [")"]:
        units = units[3:-1] if units[1:3] == ["?", ":"] else units[1:-1]
    elif "|" in units:
        return None
    texts = [""]
    for unit in units:
        literal = _LITERAL.fullmatch(unit)
        if unit == "|":
            texts.append("")
        elif literal is None:
            return None
        else:
            texts[-1] += literal[1] or unit
    return texts


def _negate_class(unit: str) -> str | None:
    """Return an expression for the characters that a class, or a single character, does not match."""
    if unit in _OPPOSITES:
        return _OPPOSITES[unit]
    if unit.startswith("[") and len(unit) > 2:
        return f"[{unit[2:]}" if unit.startswith("[^") else f"[^{unit[1:]}"
    literal = _LITERAL.fullmatch(unit)
    return None if literal is None else f"[^{quote_pattern(literal[1] or unit)}]"
