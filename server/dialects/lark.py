"""Write a Lark grammar for llguidance, piece by piece.

llguidance reads a text as terminals, each as long as possible and without backtracking. So adjacent terminals are
joined into one, and free text excludes what ends it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from llguidance import LLTokenizer

from serve_llm.server.dialects.dialect import Delimiter, get_forms
from serve_llm.server.structured_output.special_tokens import split_special_tokens

ANY_TEXT = "/(?s:.*)/"


class Symbol(NamedTuple):
    """A piece of a rule. Two adjacent terminals can be joined into one."""

    expression: str
    is_terminal: bool


Symbols = list[Symbol]


class GrammarTokens:
    """What a grammar must know about a tokenizer. Scans the whole vocabulary: build it once."""

    def __init__(self, tokenizer: LLTokenizer, end_ids: Collection[int] = ()) -> None:
        """end_ids: never part of free text. The engine allows them where a turn may end."""
        self._tokenizer = tokenizer
        token_ids = [token_id for token_id in range(tokenizer.vocab_size) if token_id not in end_ids]
        # Terminals match neither special tokens nor tokens that are not text by themselves.
        self._special_ids = [token_id for token_id in token_ids if tokenizer.is_special_token(token_id)]
        self._wordless_ids = [token_id for token_id in token_ids if self._is_wordless(token_id)]

    def split(self, text: str) -> list[str | int]:
        """Split a text at the special tokens in it, which become ids."""
        return split_special_tokens(self._tokenizer, text)

    def write_wordless(self, excluded: Iterable[int], *, special_only: bool = False) -> str:
        """Return an expression for any one token that free text cannot otherwise contain; "" if there is none."""
        without = set(excluded)
        ranges: list[list[int]] = []
        for token_id in self._special_ids if special_only else self._wordless_ids:
            if token_id in without:
                continue
            if ranges and ranges[-1][1] == token_id - 1:
                ranges[-1][1] = token_id
            else:
                ranges.append([token_id, token_id])
        texts = (f"{first}-{last}" if first != last else str(first) for first, last in ranges)
        return f"<[{','.join(texts)}]>" if ranges else ""

    def _is_wordless(self, token_id: int) -> bool:
        if self._tokenizer.is_special_token(token_id):
            return True
        try:
            self._tokenizer.decode_bytes([token_id]).decode()
        except UnicodeDecodeError:
            return True
        return False


class LarkWriter:
    """One grammar: its rules, its terminals, and the grammars that it refers to by name."""

    def __init__(self, tokens: GrammarTokens) -> None:
        self.tokens = tokens
        self._rules: list[str] = []
        self._terminals: dict[str, str] = {}
        self._grammars: list[dict[str, object]] = []
        self._grammar_names: dict[str, str] = {}  # by their JSON text

    def write(self, start: Symbol) -> str:
        """Return the grammar as llguidance takes it."""
        lines = [f"start: {self.write_body([start])}", *self._rules]
        lines += [f"{name}: {expression}" for expression, name in self._terminals.items()]
        main = {"name": "turn", "lark_grammar": "\n".join(lines)}
        return json.dumps({"grammars": [main, *self._grammars]}, ensure_ascii=False)

    def write_body(self, items: Sequence[Symbol]) -> str:
        """Return the body of a rule."""
        words = []
        for item in items:
            if item.is_terminal:
                name = self._terminals.setdefault(item.expression, f"T{len(self._terminals)}")
                words.append(name)
            else:
                words.append(item.expression)
        return " ".join(words) or '""'

    def add_rule(self, *alternatives: Sequence[Symbol]) -> Symbol:
        rule = self.reserve_rule()
        self.define_rule(rule, *alternatives)
        return rule

    def reserve_rule(self) -> Symbol:
        """Reserve a rule to be defined later, which other rules can refer to."""
        self._rules.append("")
        return Symbol(f"r{len(self._rules) - 1}", is_terminal=False)

    def define_rule(self, rule: Symbol, *alternatives: Sequence[Symbol]) -> None:
        bodies = " | ".join(map(self.write_body, alternatives))
        self._rules[int(rule.expression[1:])] = f"{rule.expression}: {bodies}"

    def add_schema(self, schema: object) -> Symbol:
        """schema: as llguidance takes it, including options."""
        return self._add_grammar({"json_schema": schema})

    def add_grammar(self, grammar: str) -> Symbol:
        """grammar: as it is sent to the engine."""
        if not grammar.startswith("{"):
            return self._add_grammar({"lark_grammar": grammar})
        first, *others = json.loads(grammar)["grammars"]
        self._grammars += others
        return self._add_grammar({key: value for key, value in first.items() if key != "name" and value is not None})

    def _add_grammar(self, grammar: dict[str, object]) -> Symbol:
        text = json.dumps(grammar)
        if text not in self._grammar_names:
            self._grammar_names[text] = f"grammar_{len(self._grammars)}"
            self._grammars.append({"name": self._grammar_names[text], **grammar})
        return Symbol(f"@{self._grammar_names[text]}", is_terminal=False)

    def repeat(self, items: Sequence[Symbol], suffix: str) -> Symbol:
        """suffix: `*`, `+`, `?` or `{0,3}`."""
        return Symbol(f"({self.write_body(items)}){suffix}", is_terminal=False)

    def write_text(self, text: str) -> Symbols:
        """Write a fixed text; special tokens in it are written as such."""
        return [
            write_special_token(piece) if isinstance(piece, int) else write_literal(piece)
            for piece in self.tokens.split(text)
        ]


def join(*parts: Sequence[Symbol]) -> Symbols:
    """Write the items in a row; adjacent terminals become one."""
    items: Symbols = []
    for part in parts:
        for item in part:
            if items and items[-1].is_terminal and item.is_terminal:
                items[-1] = Symbol(f"{items[-1].expression} {item.expression}", is_terminal=True)
            else:
                items.append(item)
    return items


def write_special_token(token_id: int) -> Symbol:
    return Symbol(f"<[{token_id}]>", is_terminal=False)


def write_literal(text: str) -> Symbol:
    return Symbol(_quote(text), is_terminal=True)


def write_regex(pattern: str) -> Symbol:
    return Symbol(f"/{pattern.replace('/', chr(92) + '/')}/", is_terminal=True)


def write_free_text(excluded: Sequence[str]) -> Symbol:
    """Write any text that contains none of the excluded expressions."""
    if not excluded:
        return Symbol(ANY_TEXT, is_terminal=True)
    return Symbol(f"({ANY_TEXT} & ~({ANY_TEXT} ({' | '.join(excluded)}) {ANY_TEXT}))", is_terminal=True)


def write_patterns(*delimiters: Delimiter) -> list[str]:
    """Write expressions that match what the parser accepts as one of the delimiters."""
    forms = [form for delimiter in delimiters for form in get_forms(delimiter) if form.strip()]
    return list(dict.fromkeys(r" /\s*/ ".join(map(_quote, form.split())) for form in forms))


def has_text(delimiter: Delimiter) -> bool:
    return any(form.strip() for form in get_forms(delimiter))


def _quote(text: str) -> str:
    """Return a text as a literal of llguidance's Lark, which allows no control characters in it, including U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
