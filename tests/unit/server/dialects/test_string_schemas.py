"""Formats and patterns of unquoted strings allow the same texts as those of JSON strings."""

from __future__ import annotations

import pytest

from serve_llm.server.dialects.table import BUILT_IN
from serve_llm.server.dialects.tool import Tool, ToolChoice
from serve_llm.server.structured_output.errors import GrammarError
from support.dialects import write_turn as write_text
from support.turn_grammars import accepts, get_tokenizer, write_turn

FORMATS = {
    "date": ["2026-12-31", "2026-02-29", "2026-04-30", "2026-04-31", "2026-13-01", "2026-1-1"],
    "time": ["23:59:60Z", "10:20:30.123456789+01:00", "24:00:00Z", "10:20:30"],
    "date-time": ["2026-12-31T10:20:30z", "2026-01-29t10:20:30-05:00", "2026-12-31 10:20:30Z"],
    "duration": ["P3W", "P1Y2M3DT4H5M6S", "PT36H", "P1M", "P", "PT", "P1YT", "P1S"],
    "email": ["a.b+c@x-y.org", "o'neil@example.co.uk", "a@[127.0.0.1]", "a@b", "a@", "@b", "a b@c.d", ".a@b.c"],
    "hostname": ["example.com", "a-b.c", "localhost", "-a.b", "a..b", "a_b"],
    "ipv4": ["127.0.0.1", "255.255.255.255", "256.1.1.1", "1.2.3", "01.2.3.4"],
    "ipv6": ["::", "::1", "2001:db8::ff00:42:8329", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "1:2:3", "1::2::3", "g::"],
    "uuid": ["123E4567-E89B-12D3-A456-426614174000", "123e4567-e89b-12d3-a456-426614174000", "123e4567"],
    "uri": ["https://a.org/x?y=1#z", "mailto:a@b.c", "http://[::1]:80/", "urn:x:%20", "//a.org", "http://a b", "x:%2"],
    "password": ["any text", ""],
    "host-name": ["example.com", "a_b"],
}
PATTERNS = {
    "^a$|^b$": ["a", "b", "ab", "c"],
    "^(?:x|y)+$|z": ["xy", "xyz", "wzw", "xw", ""],
    "^a|b$": ["ac", "cb", "ca"],
    r"\\$": ["a\\", "a"],
    r"^[|^$]{2}$": ["|^", "$$", "a"],
    r"a\|b": ["xa|bx", "a"],
}


@pytest.mark.parametrize("dialect", ["qwen3_coder", "glm4_7", "deepseek_v3_2", "gemma4"])
@pytest.mark.parametrize(
    ("keyword", "value", "texts"),
    [("format", name, texts) for name, texts in FORMATS.items()]
    + [("pattern", pattern, texts) for pattern, texts in PATTERNS.items()],
)
def test_strings_are_those_of_json_tools(dialect: str, keyword: str, value: str, texts: list[str]) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "string", keyword: value}},
        "required": ["a"],
        "additionalProperties": False,
    }
    results = []
    for name in ("hermes", dialect):
        tokenizer = get_tokenizer(BUILT_IN[name], True)
        grammar = write_turn(tokenizer, BUILT_IN[name], [Tool("f", "", parameters)], ToolChoice("required"))
        turns = [write_text(BUILT_IN[name], calls=[("f", {"a": text})]) for text in texts]
        results.append([text for text, turn in zip(texts, turns, strict=True) if accepts(tokenizer, grammar, turn)])
    assert results[0] == results[1]
    assert texts[0] in results[0]


@pytest.mark.parametrize(
    ("keyword", "value"), [("format", "iri"), ("format", "regex"), ("pattern", "(^a|b)c"), ("pattern", "a|(?i)b")]
)
def test_what_no_expression_is_known_for_is_refused(keyword: str, value: str) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", keyword: value}}}
    with pytest.raises(GrammarError) as caught:
        get_tokenizer(BUILT_IN["qwen3_coder"], True).write(
            BUILT_IN["qwen3_coder"], [Tool("f", "", parameters)], ToolChoice("required")
        )
    assert (caught.value.pointer, caught.value.keyword) == ("/properties/a", keyword)
