"""llguidance as the server and the engine use it: the same tokenizer and the same limits on both sides.

A grammar crosses the wire as the string that llguidance itself writes: JSON with a Lark grammar or a JSON schema.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

STEP_LEXER_FUEL = 200_000  # about 15 ms for one mask; the default of llguidance


def build_tokenizer(tokenizer_json: str, vocab_size: int) -> LLTokenizer:
    """The tokenizer of masks, from the text of tokenizer.json. Takes up to a second for 150,000 tokens.

    vocab_size: number of logits. Ids beyond the tokenizer's are never allowed. If the tokenizer has more ids, the
    caller truncates the masks.
    """
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size)
    except ValueError:  # it has more ids, or cannot be read
        return LLTokenizer(tokenizer_json)


def build_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the start of the text. Never raises: ask `is_error()` and `get_error()`."""
    limits = LLParserLimits(step_lexer_fuel=STEP_LEXER_FUEL, verbose_errors=False)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def matcher_error(matcher: LLMatcher) -> str:
    """The first line of a failed matcher's error."""
    return matcher.get_error().partition("\n<")[0].strip()
