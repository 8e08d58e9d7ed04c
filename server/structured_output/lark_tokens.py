"""Split a Lark grammar into tokens and definitions; the terminals of Lark's library `common`."""

from __future__ import annotations

import re
from typing import NamedTuple

from serve_llm.server.structured_output.errors import LarkError

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|//[^\n]*|\#[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<number>\d+)
    |(?P<mark>->|\.\.|[][:|()?!*+~&{},.%\n])""",
    re.VERBOSE,
)

_EXPONENT = "[eE][-+]?[0-9]+"
_DECIMAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_FLOAT = f"(?:[0-9]+{_EXPONENT}|{_DECIMAL}(?:{_EXPONENT})?)"
_NUMBER = f"(?:{_FLOAT}|[0-9]+)"
# Terminals of Lark's library `common`, as regular expressions.
COMMON_TERMINALS = {
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "CPP_COMMENT": r"//[^\n]*",
    "CR": r"\r",
    "C_COMMENT": r"/\*[^*]*\*+(?:[^*/][^*]*\*+)*/",
    "DECIMAL": _DECIMAL,
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "FLOAT": _FLOAT,
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[a-zA-Z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": _NUMBER,
    "SH_COMMENT": r"#[^\n]*",
    "SIGNED_FLOAT": f"[-+]?{_FLOAT}",
    "SIGNED_INT": "[-+]?[0-9]+",
    "SIGNED_NUMBER": f"[-+]?{_NUMBER}",
    "SQL_COMMENT": r"--[^\n]*",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[a-zA-Z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}


class LarkToken(NamedTuple):
    kind: str
    text: str


END = LarkToken("end", "")


def read_tokens(grammar: str) -> list[LarkToken]:
    tokens = []
    position = 0
    while position < len(grammar):
        found = _TOKEN.match(grammar, position)
        if found is None or found.lastgroup is None:
            raise LarkError(f"{grammar[position : position + 20]!r} is not Lark")
        if found.lastgroup != "space":
            tokens.append(LarkToken(found.lastgroup, found[0]))
        position = found.end()
    return tokens


def split_definitions(tokens: list[LarkToken]) -> list[list[LarkToken]]:
    """A definition ends at the end of its line, unless a parenthesis is open or the next line begins with `|`."""
    lines: list[list[LarkToken]] = [[]]
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
