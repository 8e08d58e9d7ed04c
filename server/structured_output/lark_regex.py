"""Translate a Lark grammar into a regular expression of its texts.

A custom tool's text is inside a JSON string or between a dialect's delimiters. Regular expressions can be enforced
there, because llguidance can quote them; a grammar of several rules cannot. A rule that is recursive at its beginning
or end becomes a repetition. A rule that contains itself elsewhere is expanded to a limited depth, so that the
expression matches only texts of the grammar, but not those that nest deeper. What `%ignore` names may follow each token
of a rule. As with Lark's default parser (Earley), a token need not be the longest possible.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from serve_llm.server.structured_output.errors import LarkError, UnsupportedLark
from serve_llm.server.structured_output.lark_tokens import (
    COMMON_TERMINALS,
    END,
    LarkToken,
    read_tokens,
    split_definitions,
)
from serve_llm.server.structured_output.pattern import closes_unopened_group

MAX_CHARACTERS = 2**16  # a longer regular expression is refused
MAX_DEPTH = 8  # how often a rule may be nested in itself
MAX_EXPANSIONS = 800  # limit on expansions of rules, at all depths together
_TOO_LONG = f"it takes more than {MAX_CHARACTERS} characters as a regular expression"

_CONTROLS = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f", "\v": r"\v"}
_FLAGS = frozenset("is")
_UNSUPPORTED_FLAGS = frozenset("lmux")
_UNSUPPORTED_DIRECTIVES = frozenset({"declare", "extend", "import", "override"})  # they define names elsewhere
_UNSUPPORTED_MARKS = frozenset("%{&~")  # an inner grammar, arguments of a template, llguidance's "and" and "not"


class _TooLong(UnsupportedLark):
    pass


class _Name(NamedTuple):
    """A rule or terminal by its name."""

    name: str


class _Repeat(NamedTuple):
    """suffix: as in regular expressions; empty for a single occurrence."""

    body: Alternatives
    suffix: str

    @property
    def may_be_absent(self) -> bool:
        return self.suffix in ("?", "*") or self.suffix.startswith("{0,")


Item = str | _Name | _Repeat  # a text is a regular expression that can be part of a sequence
Alternatives = list[list[Item]]


def translate_lark(grammar: str) -> str:
    """Return a regular expression of the texts of `start`, without anchors. Raises LarkError."""
    try:
        rules = _LarkRules(grammar)
        expression = _translate(rules)
    except RecursionError:
        raise UnsupportedLark("it nests too deep") from None
    if rules.unsupported is not None:
        raise rules.unsupported
    return expression


def nests_without_end(grammar: str) -> bool:
    """Whether texts are missing that nest deeper than `translate_lark` expands rules. Call it after that."""
    expander = _Expander(_LarkRules(grammar))
    expander.expand_start()
    return expander.is_cut


def _translate(rules: _LarkRules) -> str:
    """Expand rules as deeply as possible. Raises LarkError."""
    expander = _Expander(rules)
    expression = expander.expand_start()
    while expander.is_cut and expander.depth < MAX_DEPTH:
        expander.deepen()
        try:
            expression = expander.expand_start()
        except _TooLong:
            break
    if expression is None:
        raise LarkError("start is recursive without end")
    return expression


class _LarkRules:
    """The definitions of a grammar, parsed on demand."""

    def __init__(self, grammar: str) -> None:
        self._definitions: dict[str, list[LarkToken]] = {}
        self._bodies: dict[str, Alternatives] = {}
        self._reached: dict[str, set[str]] = {}  # names in a rule, and in the rules that it uses
        self._ignored: list[list[LarkToken]] = []  # what each %ignore names
        self.unsupported: UnsupportedLark | None = None  # because of a directive
        for line in split_definitions(read_tokens(grammar)):
            self._define(line)

    def read(self, name: str) -> Alternatives:
        """Raises LarkError."""
        if name not in self._bodies:
            if name not in self._definitions:
                if self.unsupported is not None:
                    raise self.unsupported
                raise LarkError(f"{name} is not defined")
            body = _BodyReader(name, self._definitions[name]).read_whole()
            self._bodies[name] = _write_as_repetition(name, body)
        return self._bodies[name]

    def read_ignored(self) -> Alternatives:
        """Return what may occur before, between and after the tokens of rules. Raises LarkError."""
        return [row for tokens in self._ignored for row in _BodyReader("%ignore", tokens).read_whole()]

    def is_recursive(self, name: str) -> bool:
        """Whether the rule contains itself. Raises LarkError."""
        if name not in self._reached:
            reached: set[str] = set()
            waiting = list(_list_names(self.read(name)))
            while waiting:
                if (found := waiting.pop()) not in reached:
                    reached.add(found)
                    waiting += _list_names(self.read(found))
            self._reached[name] = reached
        return name in self._reached[name]

    def _define(self, line: list[LarkToken]) -> None:
        texts = [token.text for token in line]
        if texts[0] == "%":
            self._read_directive(line)
            return
        while line and line[0].text in ("?", "!"):
            line = line[1:]
        head = [token.text for token in line[:4]]
        if len(line) > 2 and head[1] == "." and line[2].kind == "number":  # a priority changes no text
            line = [line[0], *line[3:]]
        if line[0].kind == "name" and head[1:2] in (["{"], ["["]):
            raise UnsupportedLark(f"{''.join(texts)[:100]!r} cannot be enforced")
        if len(line) < 2 or line[0].kind != "name" or line[1].text != ":":
            raise LarkError(f"{''.join(texts)[:100]!r} is not a definition")
        if line[0].text in self._definitions:
            raise LarkError(f"{line[0].text} is defined twice")
        self._definitions[line[0].text] = line[2:]

    def _read_directive(self, line: list[LarkToken]) -> None:
        """Read `%ignore A`, `%import common.A`, `%import common.A -> B` or `%import common (A, B)`. Other directives
        are kept in `unsupported`, so that errors in rules are reported before them."""
        texts = [token.text for token in line]
        if texts[1:2] == ["ignore"] and len(line) > 2:
            self._ignored.append(line[2:])
            return
        if texts[1:3] != ["import", "common"]:
            if texts[1:2] == [] or texts[1] not in _UNSUPPORTED_DIRECTIVES:
                raise LarkError(f"{' '.join(texts)[:100]} is not a directive")
            self.unsupported = UnsupportedLark(f"{''.join(texts)[:100]} cannot be enforced")
            return
        names = {name: name for name in texts[3:] if name not in (".", "(", ")", ",")}
        if "->" in texts:
            names = {texts[-1]: texts[4]}
        for name, source in names.items():
            if source not in COMMON_TERMINALS:
                raise LarkError(f"common.{source[:100]} is not known")
            self._bodies[name] = [[f"(?:{COMMON_TERMINALS[source]})"]]


def _list_names(body: Alternatives) -> Iterator[str]:
    for item in itertools.chain.from_iterable(body):
        if isinstance(item, _Name):
            yield item.name
        elif isinstance(item, _Repeat):
            yield from _list_names(item.body)


def _write_as_repetition(name: str, body: Alternatives) -> Alternatives:
    """Return the body of a rule that begins or ends with the rule itself, as a repetition."""
    itself = _Name(name)
    whole = [row for items in body for row in _open_last_group(items, itself)]
    for place, rest in ((0, slice(1, None)), (-1, slice(None, -1))):
        repeated = [items[rest] for items in whole if len(items) > 1 and items[place] == itself]
        others = [items for items in whole if not items or items[place] != itself]
        if repeated and others:
            parts: list[Item] = [_Repeat(others, ""), _Repeat(repeated, "*")]
            return [parts if place == 0 else parts[::-1]]
    return whole


def _open_last_group(items: list[Item], itself: _Name) -> Alternatives:
    """Split the row into several without the group at its end, if that can end with the rule itself."""
    last = items[-1] if items else None
    if not isinstance(last, _Repeat) or last.suffix not in ("", "?"):
        return [items]
    rows = [row for inner in last.body for row in _open_last_group([*items[:-1], *inner], itself)]
    if all(row[-1:] != [itself] for row in rows):
        return [items]
    return rows if last.suffix == "" else [items[:-1], *rows]


def _is_terminal(name: str) -> bool:
    """Whether the name is that of a token; other names are those of rules."""
    return name.isupper()


class _Expander:
    """Expands rules; recursive ones up to `depth` times."""

    def __init__(self, rules: _LarkRules) -> None:
        self._rules = rules
        self._num_left = MAX_EXPANSIONS
        self._found: dict[tuple[str, tuple[str, ...]], str | None] = {}
        self.depth = 0
        self.is_cut = False  # whether a rule contains itself
        self._gap = ""  # what may follow each token of a rule
        if ignored := self._write(rules.read_ignored(), (), gap=""):
            self._gap = f"(?:{ignored})*"
        self._found.clear()  # rules were expanded without gaps

    def expand_start(self) -> str | None:
        """Return the texts of `start`. None: all nest deeper than `depth`. Raises LarkError."""
        expression = self.expand("start")
        return f"{self._gap}(?:{expression})" if expression is not None and self._gap else expression

    def expand(self, name: str, path: tuple[str, ...] = ()) -> str | None:
        """path: the recursive rules being expanded, sorted. None: there is no text of this depth. Raises LarkError."""
        if path.count(name) > self.depth:
            return None
        key = (name, path)
        if key not in self._found:
            self._num_left -= 1
            if self._num_left < 0:
                raise _TooLong(_TOO_LONG)
            if self._rules.is_recursive(name):
                self.is_cut = True
                path = tuple(sorted((*path, name)))
            gap = "" if _is_terminal(name) else self._gap
            self._found[key] = self._write(self._rules.read(name), path, gap)
        return self._found[key]

    def deepen(self) -> None:
        self.depth += 1
        self._found.clear()

    def _write(self, body: Alternatives, path: tuple[str, ...], gap: str) -> str | None:
        ways = [way for items in body if (way := self._write_row(items, path, gap)) is not None]
        return _check_size("|".join(ways)) if ways else None

    def _write_row(self, items: list[Item], path: tuple[str, ...], gap: str) -> str | None:
        row = ""
        for item in items:
            match item:
                case str():
                    row += item + gap
                case _Name(name):
                    expression = self.expand(name, path)
                    if expression is None:
                        return None
                    row += f"(?:{expression})" + (gap if _is_terminal(name) else "")
                case _Repeat(inner, suffix):
                    expression = self._write(inner, path, gap)
                    if expression is None and not item.may_be_absent:
                        return None
                    row += "" if expression is None else f"(?:{expression}){suffix}"
            _check_size(row)
        return row


class _BodyReader:
    """Reads the body of one definition."""

    def __init__(self, name: str, tokens: list[LarkToken]) -> None:
        self._name = name
        self._tokens = tokens
        self._position = 0

    def read_whole(self) -> Alternatives:
        body = self._read_alternatives()
        if self._next is not END:
            raise LarkError(f"{self._next.text!r} in {self._name} cannot be read")
        return body

    @property
    def _next(self) -> LarkToken:
        return self._tokens[self._position] if self._position < len(self._tokens) else END

    def _take(self) -> LarkToken:
        token = self._next
        self._position += 1
        return token

    def _read_alternatives(self) -> Alternatives:
        body = [self._read_row()]
        while self._next.text == "|":
            self._take()
            body.append(self._read_row())
        return body

    def _read_row(self) -> list[Item]:
        items = []
        while self._next is not END and self._next.text not in ("|", ")", "]", "->"):
            items.append(self._read_quantified())
        if self._next.text == "->":
            self._take()
            if self._take().kind != "name":
                raise LarkError(f"-> in {self._name} needs a name")
        return items

    def _read_quantified(self) -> Item:
        atom = self._read_atom()
        mark = self._next.text
        if mark in ("?", "*", "+"):
            self._take()
            return _Repeat([[atom]], mark)
        if mark == "~":
            self._take()
            least = self._take_number()
            most = least
            if self._next.text == "..":
                self._take()
                most = self._take_number()
            return _Repeat([[atom]], f"{{{least},{most}}}")
        return atom

    def _take_number(self) -> str:
        if self._next.kind != "number":
            raise LarkError("~ needs a number")
        return self._take().text

    def _read_atom(self) -> Item:
        token = self._take()
        if token.text == "(":
            return _Repeat(self._read_until(")"), "")
        if token.text == "[":
            return _Repeat(self._read_until("]"), "?")
        match token.kind:
            case "name":
                return _Name(token.text)
            case "regex":
                return _read_regex(token.text)
            case "string":
                return self._read_string(token.text)
        if token.text in _UNSUPPORTED_MARKS:
            raise UnsupportedLark(f"{token.text!r} in {self._name} cannot be enforced")
        raise LarkError(f"{token.text!r} in {self._name} cannot be read")

    def _read_until(self, end: str) -> Alternatives:
        body = self._read_alternatives()
        if self._take().text != end:
            raise LarkError(f"{self._name} lacks {end!r}")
        return body

    def _read_string(self, text: str) -> str:
        first = _unquote(text)
        if self._next.text != "..":
            return f"(?i:{_escape(first)})" if text.endswith("i") else f"(?:{_escape(first)})"
        self._take()
        last = _unquote(self._take().text)
        if len(first) != 1 or len(last) != 1:
            raise LarkError(f"{text}..: a range has single characters")
        return f"[{_escape(first)}-{_escape(last)}]"


def _read_regex(text: str) -> str:
    pattern, _, flags = text[1:].rpartition("/")
    pattern = pattern.replace(r"\/", "/")
    if unknown := set(flags) - _FLAGS:
        if unknown <= _UNSUPPORTED_FLAGS:
            raise UnsupportedLark(f"flags of {text[:100]} cannot be enforced")
        raise LarkError(f"{text[:100]} has flags that are not Lark flags")
    if closes_unopened_group(pattern):
        raise LarkError(f"{text[:100]} closes a group that it does not open")
    return f"(?{flags}:{pattern})"


def _unquote(text: str) -> str:
    try:
        return str(ast.literal_eval(text.rstrip("i")))
    except (SyntaxError, ValueError):
        raise LarkError(f"{text[:100]} is not a string") from None


def _escape(text: str) -> str:
    return "".join(_CONTROLS.get(char) or (f"\\{char}" if char in r"\.+*?()|[]{}^$-/" else char) for char in text)


def _check_size(expression: str) -> str:
    if len(expression) > MAX_CHARACTERS:
        raise _TooLong(_TOO_LONG)
    return expression
