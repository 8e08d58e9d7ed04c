"""Structural tags: which texts each format accepts, and which tags are refused."""

from __future__ import annotations

import json

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from serve_llm.common.grammar import build_matcher, build_tokenizer
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.structured_output.compiler import GrammarCompiler
from serve_llm.server.structured_output.params import StructuredOutputs
from support.grammars import VOCAB_SIZE, accepts, compile_grammar, compiler, demo

Format = dict[str, object]

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
VALUE: Format = {"type": "json_schema", "json_schema": OBJECT}
ANY: Format = {"type": "any_text"}
CALL = '<f=a>{"a": 1}</f>'


def tag(begin: str, content: Format, end: str | list[str]) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def triggered(*tags: Format, **fields: object) -> Format:
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": list(tags), **fields}


def untyped(format_: Format) -> Format:
    """Return a tag without its type, as xgrammar's and SGLang's documentation write the tags of triggered_tags."""
    return {name: value for name, value in format_.items() if name != "type"}


FUNCTION = tag("<f=a>", VALUE, "</f>")
RAW = tag("<f=b>", ANY, "</f>")
ONCE = {"at_least_one": True, "stop_after_first": True}

ACCEPTED: list[tuple[str, Format, list[str], list[str]]] = [  # name, format, matching texts, other texts
    ("const", const('"\\\n/é'), ['"\\\n/é'], ["", '"\\\n/éé']),
    ("json", VALUE, ['{"a":1}', '{ "a": -2 }'], ["{}", '{"a":1} ', ' {"a":1}']),
    ("any", ANY, ["", "a\n<b>"], []),
    ("any but", {"type": "any_text", "excludes": ["no", "/"]}, ["", "nay"], ["no", "know", "a/b"]),
    ("regex", {"type": "regex", "pattern": "[0-9]+/x"}, ["12/x"], ["/x", "12/xx"]),
    ("gbnf", {"type": "grammar", "grammar": 'root ::= "x" | "(" root ")"'}, ["((x))"], ["((x)", ""]),
    ("lark", {"type": "grammar", "grammar": 'start: "(" start ")" | "x"'}, ["((x))"], ["((x)", ""]),
    ("tag of json", FUNCTION, [CALL], ['<f=a>{"a":1}', "<f=a>{}</f>", CALL + " ", '<f=a>{"a":1} </f>']),
    ("tag of text", RAW, ["<f=b></f>", "<f=b>x<f=a></f>"], ["<f=b>", "<f=b></f></f>", "x<f=b></f>"]),
    ("tag of regex", tag("<", {"type": "regex", "pattern": ".*"}, ">"), ["<>", "<a>b>"], ["<a", "a>"]),
    ("tag without end", tag("say: ", ANY, ""), ["say: ", "say: x"], ["x"]),
    ("tag with ends", tag("<r>", ANY, ["</r>", "</s>"]), ["<r>x</r>", "<r></s>"], ["<r></s></r>", "<r>"]),
    ("tag of json with ends", tag("<r>", VALUE, ["!", "?"]), ['<r>{"a":1}!', '<r>{"a":1}?'], ['<r>{"a":1}']),
    ("thought and value", sequence(tag("<t>", ANY, "</t>"), VALUE), ['<t>hm\n</t>{"a":1}'], ['{"a":1}', "<t>hm"]),
    ("text up to a text", sequence(ANY, const("END")), ["END", "xENEND"], ["x", "ENDEND"]),
    ("text up to a tag", sequence(ANY, FUNCTION), [CALL, "x" + CALL], ["x", CALL + CALL]),
    ("or of texts", either(const("a"), const("ab")), ["a", "ab"], ["", "b"]),
    ("or of json", either(VALUE, const("none")), ['{"a":1}', "none"], ["", "nonenone"]),
    ("optional", sequence(const("x"), {"type": "optional", "content": VALUE}), ["x", 'x{"a":1}'], ['{"a":1}']),
    ("star", {"type": "star", "content": FUNCTION}, ["", CALL, CALL + CALL], ["x"]),
    ("plus", {"type": "plus", "content": FUNCTION}, [CALL, CALL + CALL], [""]),
    ("repeat", {"type": "repeat", "min": 1, "max": 2, "content": const("ab")}, ["ab", "abab"], ["", "ababab"]),
    ("repeat at least", {"type": "repeat", "min": 2, "max": -1, "content": VALUE}, ['{"a":1}' * 3], ['{"a":1}']),
    ("triggered", triggered(FUNCTION, RAW), ["", "<f", f"x{CALL}y<f=b>z</f>", CALL * 2], ["<f=", "<f=c>", "<f=a>{}"]),
    ("at least one", triggered(FUNCTION, RAW, at_least_one=True), [CALL, f"{CALL}x{CALL}y"], ["", "x" + CALL]),
    ("stop after first", triggered(FUNCTION, stop_after_first=True), ["", "x", "x" + CALL], [CALL + "x", CALL * 2]),
    ("exactly one", triggered(FUNCTION, RAW, **ONCE), [CALL, "<f=b></f>"], ["", "x" + CALL, CALL + "x"]),
    ("triggered but", triggered(FUNCTION, excludes=["no"]), ["yes" + CALL], ["no", "no" + CALL, CALL + "no"]),
    ("triggered, without types", triggered(untyped(FUNCTION), untyped(RAW)), [CALL, "x<f=b></f>"], ["<f=c>"]),
    ("triggered in a tag", tag("<r>", triggered(FUNCTION), "</r>"), ["<r></r>", f"<r>x{CALL}y</r>"], ["<r></r></r>"]),
    ("then one", sequence(const("x"), triggered(FUNCTION, **ONCE), const("!")), [f"x{CALL}!"], [f"x{CALL}", "x!"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("format_", "accepted", "rejected"), [case[1:] for case in ACCEPTED], ids=[case[0] for case in ACCEPTED]
)
def test_a_format_is_enforced(format_: Format, accepted: list[str], rejected: list[str]) -> None:
    grammar = compile_grammar(structural_tag={"type": "structural_tag", "format": format_})
    assert grammar == compile_grammar(structural_tag=json.dumps({"type": "structural_tag", "format": format_}))
    for text in accepted:
        assert accepts(grammar, text), text
    for text in rejected:
        assert not accepts(grammar, text), text


def test_the_older_form() -> None:
    structures = [{"begin": "<f=a>", "schema": OBJECT, "end": "</f>"}]
    wanted = {"type": "structural_tag", "structures": structures, "triggers": ["<f="]}
    grammar = compile_grammar(structural_tag=wanted)
    assert accepts(grammar, f"x{CALL}y") and accepts(grammar, "") and not accepts(grammar, "<f=a>{}</f>")
    structures[0]["schema"] = json.dumps(OBJECT)
    assert accepts(compile_grammar(structural_tag=wanted), f"x{CALL}y")


def test_many_tags_stay_cheap() -> None:
    tags = [tag(f"<f={number}>", VALUE, "</f>") for number in range(200)]
    grammar = compile_grammar(structural_tag={"format": triggered(*tags)})
    assert accepts(grammar, 'x<f=7>{"a":1}</f>y<f=199>{"a":2}</f>') and not accepts(grammar, "<f=200>")


def test_whitespace_options_hold_in_tags() -> None:
    grammar = compile_grammar(structural_tag={"format": FUNCTION}, disable_any_whitespace=True)
    assert accepts(grammar, '<f=a>{"a":1}</f>') and not accepts(grammar, CALL)


def test_special_tokens_are_written_as_such() -> None:
    source = Tokenizer.from_file(str(demo() / "tokenizer.json"))
    source.add_tokens([AddedToken("<call>", special=False), AddedToken("</call>", special=False)])
    text = source.to_str()
    size = source.get_vocab_size()
    begin, end = source.token_to_id("<call>"), source.token_to_id("</call>")
    compiler = GrammarCompiler(lambda: text, size, 2**20)
    format_ = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag("<call>\n", VALUE, "\n</call>")]}
    grammar = compiler.compile(StructuredOutputs(structural_tag={"format": format_}))
    tokenizer: LLTokenizer = build_tokenizer(text, size)

    def follows(ids: list[int]) -> bool:
        matcher = build_matcher(tokenizer, grammar)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    inside = tokenizer.tokenize_str('\n{"a":1}\n')
    assert follows([*tokenizer.tokenize_str("So: "), begin, *inside, end, *tokenizer.tokenize_str("!")])
    assert not follows([begin, *tokenizer.tokenize_str("\n{}\n"), end]) and not follows([end])
    assert not follows(tokenizer.tokenize_str("<call>")), "the tag, spelled out"


REFUSED: list[tuple[object, str]] = [  # tag, the part of the message after the parameter
    ("{", ": it is malformed JSON"),
    ("3", ": it must be a JSON object"),
    ({}, " must not be empty"),
    ({"type": "json", "format": ANY}, ": type: must be structural_tag"),
    ({"format": ANY, "triggers": ["x"]}, ": it needs format, or structures and triggers"),
    ({"format": 3}, " at #/format: must be an object"),
    ({"format": {"type": "token", "token": 3}}, ' at #/format: type: must be one of const_string, json_schema'),
    ({"format": {}}, " at #/format: type: must be one of"),
    ({"format": const("")}, " at #/format: value: must be a string that is not empty"),
    ({"format": const("\ud800")}, " at #/format: value: holds a lone surrogate"),
    ({"format": {"type": "const_string"}}, " at #/format: value: const_string needs it"),
    ({"format": {"type": "any_text", "excludes": "x"}}, " at #/format: excludes: must be a list of strings"),
    ({"format": {"type": "any_text", "max_tokens": 5}}, " at #/format: max_tokens: 5 is not supported"),
    ({"format": {"type": "any_text", "colour": 5}}, " at #/format: colour: any_text has no such field"),
    ({"format": VALUE | {"style": "qwen_xml"}}, ' at #/format: style: "qwen_xml" is not supported'),
    ({"format": {"type": "json_schema", "json_schema": {"items": {"not": {"format": "date"}}}}},
     " at #/format/json_schema/items: not: Unimplemented"),
    ({"format": {"type": "regex", "pattern": "("}}, " at #/format: pattern: "),
    ({"format": {"type": "grammar", "grammar": "x"}}, " at #/format: grammar: neither Lark"),
    ({"format": sequence()}, " at #/format: elements: must be a list that is not empty"),
    ({"format": sequence(ANY, VALUE)}, " at #/format/elements/0: free text must be the last part"),
    ({"format": {"type": "star", "content": ANY}}, " at #/format/content: free text must be the last part"),
    ({"format": {"type": "repeat", "min": 3, "max": 2, "content": VALUE}}, " at #/format: max: must be -1 or a"),
    ({"format": {"type": "repeat", "min": -1, "max": 2, "content": VALUE}}, " at #/format: min: must be a whole"),
    ({"format": tag("<", VALUE, [])}, " at #/format: end: must be a string or a list of strings"),
    ({"format": tag("", VALUE, ">")}, " at #/format: begin: must be a string that is not empty"),
    ({"format": triggered(const("x"))}, " at #/format/tags/0: type: must be a tag"),
    (
        {"format": triggered(tag("<g>", ANY, ">"))},
        " at #/format/tags/0: begin: does not begin with any of the triggers",
    ),
    ({"format": triggered(FUNCTION) | {"triggers": ["<f", "<f="]}}, " at #/format: triggers: '<f=' holds"),
    ({"format": triggered(FUNCTION) | {"triggers": []}}, " at #/format: triggers: must not be empty"),
    ({"format": triggered(FUNCTION, at_least_one=1)}, " at #/format: at_least_one: must be true or false"),
    ({"structures": [{"begin": "<", "schema": {"not": {"format": "date"}}, "end": ""}], "triggers": ["<"]},
     " at #/structures/0/schema: not: Unimplemented"),
    ({"structures": [{"begin": "x", "schema": {}, "end": ""}], "triggers": ["<"]}, " at #/structures/0: begin: "),
    ({"structures": [{"begin": "x"}], "triggers": ["<"]}, " at #/structures/0: must be an object with begin"),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_tag_that_cannot_be_enforced_is_refused_with_its_place(wanted: object, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler().compile(StructuredOutputs(structural_tag=wanted))
    assert caught.value.param == "structured_outputs.structural_tag"
    assert message in caught.value.message, caught.value.message


def test_nesting_is_limited() -> None:
    format_ = VALUE
    for _ in range(60):
        format_ = sequence(format_)
    with pytest.raises(InvalidRequest, match="inside each other"):
        compile_grammar(structural_tag={"format": format_})
    assert compiler().load_tokenizer().vocab_size == VOCAB_SIZE
