"""Grammars of turns for tests: tokenizers with a dialect's tokens, and texts that a grammar allows."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from serve_llm.common.grammar import build_matcher, build_tokenizer, matcher_error
from serve_llm.server.dialects.dialect import Dialect
from serve_llm.server.dialects.grammar import write_turn_grammar
from serve_llm.server.dialects.lark import GrammarTokens
from serve_llm.server.dialects.tool import Tool, ToolChoice
from serve_llm.server.structured_output.checker import GrammarChecker
from serve_llm.server.structured_output.params import StructuredOutputs
from support.grammars import compiler, demo

# Character sequences that look like a separate token in the delimiters of the built-in dialects.
_TOKEN = re.compile(r"<[^<>\s=]*>|\[/?[A-Z_]+\]")


class TurnTokenizer:
    """The demo model's tokenizer, with the delimiters of a dialect as special tokens or without."""

    def __init__(self, dialect: Dialect, *, has_tokens: bool) -> None:
        self.rust = Tokenizer.from_file(str(demo() / "tokenizer.json"))
        if has_tokens:
            names = {name for text in dialect.list_delimiters() for name in _TOKEN.findall(text)}
            self.rust.add_special_tokens(sorted(names))
        self.guide: LLTokenizer = build_tokenizer(self.rust.to_str(), self.rust.get_vocab_size())
        self.tokens = GrammarTokens(self.guide)
        texts = [self.guide.decode_bytes([token_id]) for token_id in range(self.guide.vocab_size)]
        self.closing_ids = {
            number for number, text in enumerate(texts) if text[:1] in b"\"'}])</|\n," and len(text) < 4
        }

    def write(self, dialect: Dialect, tools: Sequence[Tool], choice: ToolChoice, **options: object) -> str | None:
        return write_turn_grammar(
            dialect,
            tools,
            choice,
            tokens=self.tokens,
            write_schema=lambda schema: _check_schema(json.dumps(schema)),
            **options,  # type: ignore[arg-type]
        )

    def encode(self, text: str) -> list[int]:
        return list(self.rust.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.rust.decode(list(ids), skip_special_tokens=False))


@lru_cache
def _check_schema(text: str) -> object:
    checker = GrammarChecker(compiler().load_tokenizer(), 2**20, StructuredOutputs(json_object=True))
    return checker.write_json(json.loads(text))


@lru_cache
def get_tokenizer(dialect: Dialect, has_tokens: bool) -> TurnTokenizer:
    return TurnTokenizer(dialect, has_tokens=has_tokens)


def write_turn(
    tokenizer: TurnTokenizer, dialect: Dialect, tools: Sequence[Tool], choice: ToolChoice, **options: object
) -> str:
    grammar = tokenizer.write(dialect, tools, choice, **options)
    assert grammar is not None
    return grammar


def list_allowed(tokenizer: TurnTokenizer, grammar: str, text: str) -> set[int]:
    """Return the ids that a grammar allows after a text."""
    matcher = build_matcher(tokenizer.guide, grammar)
    assert matcher.consume_tokens(tokenizer.encode(text)), matcher_error(matcher)
    return _unpack(matcher)


def accepts(tokenizer: TurnTokenizer, grammar: str, text: str | Sequence[int]) -> bool:
    """Return whether a grammar allows a turn."""
    matcher = build_matcher(tokenizer.guide, grammar)
    assert not matcher.is_error(), matcher_error(matcher) + grammar
    ids = tokenizer.encode(text) if isinstance(text, str) else list(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def walk(
    tokenizer: TurnTokenizer, grammar: str, chooser: random.Random, prefix: str = "", max_tokens: int = 400
) -> str | None:
    """Return a random text that a grammar allows; None if it has become too long."""
    matcher = build_matcher(tokenizer.guide, grammar)
    assert not matcher.is_error(), matcher_error(matcher) + grammar
    ids = tokenizer.encode(prefix)
    assert matcher.consume_tokens(ids), (prefix, grammar)
    for _ in range(max_tokens):
        if matcher.is_accepting() and (matcher.is_stopped() or chooser.random() < 0.3):
            return tokenizer.decode(ids)
        allowed = sorted(_unpack(matcher).difference(tokenizer.guide.eos_tokens))
        closing = [number for number in allowed if number in tokenizer.closing_ids]
        token_id = chooser.choice(closing if closing and chooser.random() < 0.5 else allowed)
        assert matcher.consume_token(token_id)
        ids.append(token_id)
    return None


def _unpack(matcher: LLMatcher) -> set[int]:
    """Return the ids that may come next."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    assert not matcher.is_error(), matcher_error(matcher)
    return {int(number) for number in np.unpackbits(mask, bitorder="little").nonzero()[0]}
