"""Grammars in GBNF, and how they are distinguished from Lark."""

from __future__ import annotations

import pytest

from serve_llm.server.http.errors import InvalidRequest
from support.grammars import accepts, compile_grammar


@pytest.mark.parametrize(
    "grammar",
    ['?start: "a" | b\nb: "c"', '!start: "a" | "c"', '!?start: "a" | "c"', 'start[capture]: "a" | "c"',
     '%llguidance {}\n?start : "a" | "c"', 'root ::= "a" | b\nb ::= "c"',
     'b ::= "c"\nroot ::= start-b | b\nstart-b ::= "a"'],
)  # fmt: skip
def test_both_languages_are_known_by_their_rules(grammar: str) -> None:
    compiled = compile_grammar(grammar=grammar)
    assert [text for text in ("a", "b", "c") if accepts(compiled, text)] == ["a", "c"]


@pytest.mark.parametrize(
    ("grammar", "valid", "invalid"),
    [
        (r'root ::= "\u00e9\x41\U0001f600"', ["éA\U0001f600"], ["é"]),
        (r'root ::= "a\u0001\u007f\u0022\u005c\u000a"', ['a\x01\x7f"\\\n'], ["a"]),
        ('root ::= "a\nb"', ["a\nb"], ["ab", "a b"]),
        (r"root ::= [\u00e9-\u00eb\u005d\u0041]", ["é", "ê", "]", "A"], ["e", "B", "-"]),
        (r"root ::= [^\u0041-\u0043\U0001F600]", ["D", "é", "-"], ["A", "B", "\U0001f600"]),
        (r"root ::= [a&&b~~c]", ["a", "&", "b", "~", "c"], ["d"]),
        ('root ::= ("[\\u0061" # a "comment" [\n [x])', ["[ax"], ["[a"]),
    ],
)
def test_escapes(grammar: str, valid: list[str], invalid: list[str]) -> None:
    compiled = compile_grammar(grammar=grammar)
    assert [text for text in [*valid, *invalid] if accepts(compiled, text)] == valid


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (r'root ::= "\ud83d"', r"\ud83d is no character"),
        ("root ::= [z-a]", 'invalid regex "[z-a]"'),
        ('root ::= "a"{5,2}\nb ::= root', "range end must be >= start"),
        ('root ::= "a" b', "neither Lark with a rule `start:` nor GBNF: Rule 'b' not found"),
    ],
)
def test_errors_name_no_line_of_the_converted_text(grammar: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_grammar(grammar=grammar)
    assert caught.value.message.startswith(f"structured_outputs.grammar: {message}")
