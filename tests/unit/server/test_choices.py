"""`structured_outputs.choice`: one of a list of texts."""

from __future__ import annotations

import pytest

from serve_llm.common.grammar import build_matcher
from support.grammars import accepts, compile_grammar, compiler

ASCII = "".join(map(chr, range(128)))


def test_a_choice_is_the_text_and_no_expression() -> None:
    grammar = compile_grammar(choice=[ASCII, "", "a|b", ".*", "a.", "é \u2028"])
    texts = [ASCII, "", "a|b", ".*", "a.", "é \u2028", "a", "b", "x", "ab", "e"]
    assert [text for text in texts if accepts(grammar, text)] == texts[:6]


def test_thousands_of_choices() -> None:
    texts = [f"part {number} (of 4,000)" for number in range(4_000)]
    grammar = compile_grammar(choice=texts)
    assert accepts(grammar, texts[0]) and accepts(grammar, texts[-1]) and not accepts(grammar, "part 4000 (of 4,000)")


@pytest.mark.parametrize("texts", [["<|end|>"], ["<|end|>", "<|end|> x"], ["a", "<|user|>b"]])
def test_choices_that_name_special_tokens_are_spelt_out(texts: list[str]) -> None:
    """The special token itself would not appear in the text."""
    tokenizer = compiler().load_tokenizer()
    matcher = build_matcher(tokenizer, compile_grammar(choice=texts))
    assert matcher.compute_ff_tokens() == []
    for text in texts:
        copy = matcher.deep_copy()
        assert copy.consume_tokens([token_id for char in text for token_id in tokenizer.tokenize_str(char)])
        assert copy.is_accepting()
    assert not accepts(compile_grammar(choice=texts), texts[-1])  # which is tokenised as the special token
