"""Lark grammars as regular expressions: they match the same texts, for recursive grammars those of limited depth;
errors name what cannot be translated."""

from __future__ import annotations

import re

import pytest

from serve_llm.server.structured_output.errors import LarkError, UnsupportedLark
from serve_llm.server.structured_output.lark_regex import nests_without_end, translate_lark

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line  // of the new file
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""

SUM = """
start: sum
?sum: product | sum "+" product
?product: value | product "*" value
?value: /[0-9]+/ | "(" sum ")"
"""

QUERY = """
start: "select" field ("," field)* "from" NAME
field: NAME
NAME: LETTER (LETTER | DIGIT)*
COMMENT: /--[^\\n]*/
%import common (LETTER, DIGIT, WS)
%ignore WS
%ignore COMMENT
"""

CASES: list[tuple[str, list[str], list[str]]] = [
    (
        PATCH,
        [
            "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** End Patch",
            "*** Begin Patch\n*** Delete File: a\n*** Update File: b\n@@ f\n-x\n+y\n z\n*** End Patch\n",
        ],
        ["", "*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a\nx\n*** End Patch\n"],
    ),
    ('start: "a" | "b"\n     | "c"', ["a", "b", "c"], ["", "ab", "d"]),
    ('?start.2: (A "-")~2..3 ["!"]\nA: "x".."z"', ["x-y-", "z-z-z-!"], ["x-", "a-a-", "x-y-z-x-"]),
    ('start: "a+b"i /c[\\/]?/i "\\n"\n# the end', ["A+bC/\n", "a+bc\n"], ["aab", "a+bc"]),
    ('start: NUMBER ("," NUMBER)*\nNUMBER: /[0-9]/ ~ 2\n', ["12", "12,34"], ["1", "12,", "123"]),
    ('start: INT _sep WORD\n!_sep: ":"?\n%import common (INT, WORD)', ["1:a", "12ab"], [":a", "1:"]),
    ("start: NUMBER\n%import common.NUMBER", ["1", "1.", ".5", "1.5e-3", "2E7"], ["", ".", "e5", "1e", "-1"]),
    ("start: FLOAT\n%import common.FLOAT", ["1.", ".5", "1e5"], ["1", "."]),
    ("start: C\n%import common.C_COMMENT -> C", ["/**/", "/* a * b\n/ **/"], ["/*/", "/**/ */", "/* a"]),
    ("start: SH_COMMENT\n%import common.SH_COMMENT", ["#", "# a"], ["", "#\n"]),
    ("start: SIGNED_NUMBER\n%import common.SIGNED_NUMBER", ["-1", "+.5", "7"], ["--1", "- 1"]),
    ("start: SIGNED_FLOAT DECIMAL\n%import common (SIGNED_FLOAT, DECIMAL)", ["-1.5.5", "1e5.5"], ["-1.", "1"]),
    ("start: x\n%import common.HEXDIGIT -> H\nx: H+", ["0aF"], ["", "g"]),
    (SUM, ["1", "(1+2)*3", "((((7))))", "1+1+1+1+1+1+1+1+1+1+1+1"], ["", "1+", "(1", "1)", "()"]),
    ('start: start ";" "a" | "a"', ["a", "a;a;a;a;a;a;a;a;a;a;a;a"], ["", "a;", ";a"]),
    ('start: "a" start | "b"', ["b", "aaaaaaaaaaaaaaaab"], ["", "a", "bb"]),
    ('start: "a" start?', ["a", "a" * 30], ["", "b"]),
    ('start: "a" (("-" | "+") start)?', ["a", "a-a" + "+a" * 30], ["", "a-", "aa", "-a"]),
    ('start: "a" (("-" start)? | "!") | "b"', ["b", "a!", "a", "a-a!", "a-" * 30 + "b"], ["", "a-", "b!", "a!-a"]),
    ('start: "a" ("b" | "c" (start "d"))', ["ab", "acabd", "acacabdd"], ["aca", "acab"]),
    ('start: "[" [start ("," start)*] "]"', ["[]", "[[],[[],[]]]", "[[[[]]]]"], ["[", "[[]", "[,]"]),
    ('start: a\na: "(" b ")" | "x"\nb: a "!" | a', ["x", "(x)", "((x!))"], ["()", "(x", "x!"]),
    (
        QUERY,
        ["select a,b1 from t", "\n select\ta , b  from -- a\nt \n"],
        ["selecta", "se lect a from t", "select a b from t"],
    ),
    (
        'start: A "c"? (B | "e")~2\nA: "a" B\nB: "b"\n%ignore (" " | "\\n")',
        ["ab c b e", " abee\n"],
        ["a b c b e", "ab cb"],
    ),
    (SUM + '%ignore " "\n%ignore "_"', ["1", " ( 1 + 2_) *3 "], ["", "1 2", "1 +"]),
]


@pytest.mark.parametrize(("grammar", "valid", "invalid"), CASES, ids=range(len(CASES)))
def test_texts(grammar: str, valid: list[str], invalid: list[str]) -> None:
    expression = re.compile(translate_lark(grammar))
    assert [text for text in valid if not expression.fullmatch(text)] == []
    assert [text for text in invalid if expression.fullmatch(text)] == []


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('start: "a" start', "recursive"),
        ("start: a\na: b\nb: a", "recursive"),
        ("start: a", "not defined"),
        ("", "not defined"),
        ("start: /a/\nstart: /b/", "twice"),
        ("start: /a/\n%ignore WS", "WS is not defined"),
        ("start: /a/\n%ignore", "not a directive"),
        ("start: %json {}", "cannot be enforced"),
        ("start: A\nA: /a/ & /b/", "cannot be enforced"),
        ("start: A\nA: ~/a/", "cannot be enforced"),
        ("start: /a/x", "cannot be enforced"),
        ("start: /a/z", "are not Lark flags"),
        ("start: /a/ ~", "number"),
        ('start: "ab".."z"', "range"),
        ("start: (/a/", "lacks"),
        ("start: /a/)", "cannot be read"),
        ("start: é", "not Lark"),
        ("%import common.XML", "not known"),
        ("start{x}: x", "cannot be enforced"),
        ("start", "not a definition"),
        ("%foo a", "not a directive"),
        ("start: /a/l", "cannot be enforced"),
        ('start: "a" ->', "needs a name"),
        ("start: /a)|(b/", "does not open"),
        ("start: a\n%import .other.b", "cannot be enforced"),
        ("start: " + "(" * 5000 + "/a/" + ")" * 5000, "too deep"),
        ("start: a0\n" + "\n".join(f"a{n}: a{n + 1} a{n + 1}" for n in range(60)) + '\na60: "x"', "more than"),
        ("start: " + "a " * 20_000 + "\na: " + '"xyz" ' * 1000, "more than"),
    ],
    ids=range(28),
)
def test_what_cannot_be_translated(grammar: str, problem: str) -> None:
    with pytest.raises(LarkError, match=problem) as raised:
        translate_lark(grammar)
    is_well_formed = problem in ("cannot be enforced", "too deep", "more than")
    assert isinstance(raised.value, UnsupportedLark) == is_well_formed


@pytest.mark.parametrize(
    ("grammar", "is_cut"),
    [(PATCH, False), ('start: "a" (("-" | "+") start)?', False), (SUM, True), ('start: "(" start? ")"', True)],
    ids=range(4),
)
def test_only_texts_that_nest_are_cut(grammar: str, is_cut: bool) -> None:
    translate_lark(grammar)
    assert nests_without_end(grammar) == is_cut


def test_what_is_malformed_is_said_before_what_is_not_supported() -> None:
    with pytest.raises(LarkError, match="start is recursive without end"):
        translate_lark('start: "a" start\n%declare B')
