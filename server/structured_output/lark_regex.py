"""Translate a Lark grammar without recursion into the regular expression of the same texts.

A custom tool's text stands inside a JSON string or between a dialect's delimiters. Regular expressions can be enforced
there, because llguidance can quote them; a grammar of several rules cannot.
"""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

MAX_CHARACTERS = 2**16  # a longer regular expression is refused

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|//[^\n]*|\#[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<number>\d+)
    |(?P<mark>->|\.\.|[][:|()?!*+~{},.%\n])""",
    re.VERBOSE,
)
_COMMON = {
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "CR": r"\r",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SIGNED_INT": "[-+]?[0-9]+",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""Terminals of Lark's library `common`."""
_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f", "\v": r"\v"}
_FLAGS = frozenset("is")


class LarkError(ValueError):
    """The grammar is not one that can be translated."""


class _Token(NamedTuple):
    kind: str
    text: str


_END = _Token("end", "")


def translate_lark(grammar: str) -> str:
    """The regular expression of the texts of `start`, without anchors. Raises LarkError."""
    try:
        return _LarkRules(grammar).expand("start", ())
    except RecursionError:
        raise LarkError("it nests too deep") from None


class _LarkRules:
    def __init__(self, grammar: str) -> None:
        self._definitions: dict[str, list[_Token]] = {}
        self._expressions: dict[str, str] = {}
        for line in _split_definitions(_read_tokens(grammar)):
            self._define(line)

    def expand(self, name: str, path: tuple[str, ...]) -> str:
        """The expression of a rule or terminal. path: the names that are being expanded."""
        if name in path:
            raise LarkError(f"{name} is recursive")
        if name not in self._expressions:
            if name not in self._definitions:
                raise LarkError(f"{name} is not defined")
            reader = _BodyReader(self, self._definitions[name], (*path, name))
            self._expressions[name] = reader.read_whole()
        return self._expressions[name]

    def _define(self, line: list[_Token]) -> None:
        texts = [token.text for token in line]
        if texts[0] == "%":
            self._import(texts)
            return
        while line and line[0].text in ("?", "!"):
            line = line[1:]
        head = [token.text for token in line[:4]]
        if len(line) > 2 and head[1] == "." and line[2].kind == "number":  # a priority changes no text
            line = [line[0], *line[3:]]
        if len(line) < 2 or line[0].kind != "name" or line[1].text != ":":
            raise LarkError(f"{''.join(texts)[:100]!r} is no definition")
        if line[0].text in self._definitions:
            raise LarkError(f"{line[0].text} is defined twice")
        self._definitions[line[0].text] = line[2:]

    def _import(self, texts: list[str]) -> None:
        """`%import common.A`, `%import common.A -> B` or `%import common (A, B)`."""
        if texts[1:3] != ["import", "common"]:
            raise LarkError(f"{''.join(texts)[:100]} cannot be enforced")
        names = {name: name for name in texts[3:] if name not in (".", "(", ")", ",")}
        if "->" in texts:
            names = {texts[-1]: texts[4]}
        for name, source in names.items():
            if source not in _COMMON:
                raise LarkError(f"common.{source[:100]} is not known")
            self._expressions[name] = _COMMON[source]


class _BodyReader:
    """Reads the body of one definition."""

    def __init__(self, grammar: _LarkRules, tokens: list[_Token], path: tuple[str, ...]) -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._path = path
        self._position = 0

    def read_whole(self) -> str:
        expression = self._read_alternatives()
        if self._next is not _END:
            raise LarkError(f"{self._next.text!r} in {self._path[-1]} cannot be read")
        return expression

    @property
    def _next(self) -> _Token:
        return self._tokens[self._position] if self._position < len(self._tokens) else _END

    def _take(self) -> _Token:
        token = self._next
        self._position += 1
        return token

    def _read_alternatives(self) -> str:
        expression = self._read_sequence()
        while self._next.text == "|":
            self._take()
            expression = _check_size(f"{expression}|{self._read_sequence()}")
        return expression

    def _read_sequence(self) -> str:
        expression = ""
        while self._next is not _END and self._next.text not in ("|", ")", "]", "->"):
            expression = _check_size(expression + self._read_quantified())
        if self._next.text == "->":  # an alias
            self._position += 2
        return expression

    def _read_quantified(self) -> str:
        atom = self._read_atom()
        mark = self._next.text
        if mark in ("?", "*", "+"):
            self._take()
            return f"(?:{atom}){mark}"
        if mark == "~":
            self._take()
            least = self._take_number()
            most = least
            if self._next.text == "..":
                self._take()
                most = self._take_number()
            return f"(?:{atom}){{{least},{most}}}"
        return atom

    def _take_number(self) -> str:
        if self._next.kind != "number":
            raise LarkError("~ needs a number")
        return self._take().text

    def _read_atom(self) -> str:
        token = self._take()
        if token.text == "(":
            return f"(?:{self._read_until(')')})"
        if token.text == "[":
            return f"(?:{self._read_until(']')})?"
        match token.kind:
            case "name":
                return f"(?:{self._grammar.expand(token.text, self._path)})"
            case "regex":
                return _read_regex(token.text)
            case "string":
                return self._read_string(token.text)
        raise LarkError(f"{token.text!r} in {self._path[-1]} cannot be enforced")

    def _read_until(self, end: str) -> str:
        expression = self._read_alternatives()
        if self._take().text != end:
            raise LarkError(f"{self._path[-1]} lacks {end!r}")
        return expression

    def _read_string(self, text: str) -> str:
        first = _unquote(text)
        if self._next.text != "..":
            return f"(?i:{_escape(first)})" if text.endswith("i") else f"(?:{_escape(first)})"
        self._take()
        last = _unquote(self._take().text)
        if len(first) != 1 or len(last) != 1:
            raise LarkError(f"{text}..: a range has single characters")
        return f"[{_escape(first)}-{_escape(last)}]"


def _read_tokens(grammar: str) -> list[_Token]:
    tokens = []
    position = 0
    while position < len(grammar):
        found = _TOKEN.match(grammar, position)
        if found is None or found.lastgroup is None:
            raise LarkError(f"{grammar[position : position + 20]!r} is not Lark")
        if found.lastgroup != "space":
            tokens.append(_Token(found.lastgroup, found[0]))
        position = found.end()
    return tokens


def _split_definitions(tokens: list[_Token]) -> list[list[_Token]]:
    """A definition ends with its line, unless a parenthesis is open or the next line begins with `|`."""
    lines: list[list[_Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
        if token.text == "\n":
            if depth == 0:
                lines.append([])
        elif token.text == "|" and not lines[-1]:
            while len(lines) > 1 and not lines[-1]:
                lines.pop()
            lines[-1].append(token)
        else:
            lines[-1].append(token)
    return [line for line in lines if line]


def _read_regex(text: str) -> str:
    pattern, _, flags = text[1:].rpartition("/")
    pattern = pattern.replace(r"\/", "/")
    if set(flags) - _FLAGS:
        raise LarkError(f"flags of {text[:100]} cannot be enforced")
    return f"(?{flags}:{pattern})"


def _unquote(text: str) -> str:
    try:
        return str(ast.literal_eval(text.rstrip("i")))
    except (SyntaxError, ValueError):
        raise LarkError(f"{text[:100]} is no string") from None


def _escape(text: str) -> str:
    return "".join(_CONTROLS.get(char) or (f"\\{char}" if char in r"\.+*?()|[]{}^$-/" else char) for char in text)


def _check_size(expression: str) -> str:
    if len(expression) > MAX_CHARACTERS:
        raise LarkError(f"it takes more than {MAX_CHARACTERS} characters as a regular expression")
    return expression
