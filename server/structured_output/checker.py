"""Grammars that have been tried with the model's tokenizer, or an error that says what cannot be enforced."""

from __future__ import annotations

import json
import random
import re
import time

from llguidance import LLMatcher, LLTokenizer

from serve_llm.common.grammar import build_matcher, matcher_error
from serve_llm.server.structured_output import json_schema
from serve_llm.server.structured_output.errors import GrammarError, WhitespaceError
from serve_llm.server.structured_output.gbnf import is_lark, write_as_lark
from serve_llm.server.structured_output.params import StructuredOutputs
from serve_llm.server.structured_output.pattern import narrow_whitespace, quote_pattern
from serve_llm.server.structured_output.size_errors import blame_largest
from serve_llm.server.structured_output.special_tokens import split_special_tokens

PROBE_STEPS = 16  # tokens with which a new grammar is tried, because llguidance compiles much of it only when needed
TOO_COMPLEX = "it is too complex"
MAX_CPU_SECONDS = 0.5  # for compiling a grammar and trying it
_LARK_PLACE = re.compile(
    r"^(?:at )?\d+\(\d+\): "
)  # line and column in a converted text that a GBNF client does not know
# What regular expressions in x-guidance may match.
_SPACE = r"[ \t\n\r]*"
_SEPARATORS = {
    "whitespace_pattern": (_SPACE, "spaces, tabs and line breaks"),
    "item_separator": (f"{_SPACE},{_SPACE}", "a comma and whitespace"),
    "key_separator": (f"{_SPACE}:{_SPACE}", "a colon and whitespace"),
}

# Texts, comments, regular expressions and special tokens are skipped. A limit on tokens cannot be enforced when tokens
# are rolled back, and the sampler sets temperatures.
_LARK_PART = re.compile(
    r"""(?P<other>"(?:\\.|[^"\\])*"|(?://|\#)[^\n]*|/(?:\\.|[^/\\])+/|<[^<>\s]+>)
    |%json\b\s*(?P<schema>)
    |\b(?P<attribute>max_tokens|temperature)\s*=""",
    re.VERBOSE,
)
_DECODER = json.JSONDecoder(parse_constant=json_schema.refuse_constant)


class GrammarChecker:
    """Writes llguidance's grammars for the parts of one `StructuredOutputs`. All methods raise GrammarError."""

    def __init__(self, tokenizer: LLTokenizer, max_bytes: int, wanted: StructuredOutputs | None = None) -> None:
        """max_bytes: of the longest grammar. wanted: determines how JSON is written."""
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._closed = wanted is not None and wanted.disable_additional_properties
        self._whitespace: str | None = json_schema.WHITESPACE
        if wanted is not None:
            self._whitespace = None if wanted.disable_any_whitespace else wanted.whitespace_pattern or self._whitespace
        if self._whitespace is not None:
            self._whitespace = narrow_whitespace(self._whitespace)

    def check(self, grammar: str) -> str:
        """Check the grammar and return it."""
        self.check_size(grammar)
        if error := self._find_error(grammar):
            raise GrammarError(error)
        return grammar

    def check_size(self, text: str) -> None:
        if len(text) > self._max_bytes or len(text.encode()) > self._max_bytes:
            raise GrammarError(f"it is longer than {self._max_bytes} bytes")

    def check_whitespace(self) -> None:
        """Raises WhitespaceError if `whitespace_pattern` matches texts that are not JSON whitespace."""
        pattern = self._whitespace
        if pattern is not None and pattern != json_schema.WHITESPACE and self._allows_other(pattern, _SPACE):
            raise WhitespaceError("it may match nothing but spaces, tabs and line breaks")

    def _check_separators(self, schema: object) -> None:
        options = schema.get("x-guidance") if isinstance(schema, dict) else None
        for name, (allowed, what) in _SEPARATORS.items():
            pattern = options.get(name) if isinstance(options, dict) else None
            if isinstance(pattern, str) and self._allows_other(narrow_whitespace(pattern), allowed):
                raise GrammarError(f"{name} may match nothing but {what}", keyword="x-guidance")

    def _allows_other(self, pattern: str, allowed: str) -> bool:
        """Whether an expression matches texts that the other does not. False if it is malformed."""
        if not pattern:
            return allowed != _SPACE
        terminal = f"/{pattern.replace('/', chr(92) + '/')}/ & ~/{allowed}/"
        error = self._find_error(LLMatcher.grammar_from_lark(f"start: T\nT: {terminal}"))
        return not error or error.startswith(TOO_COMPLEX)

    def build_json(self, schema: object) -> str:
        """Build the grammar of a JSON schema, which may be JSON text."""
        if isinstance(schema, str):
            self.check_size(schema)
            schema = json_schema.parse_schema(schema)
        self._check_separators(schema)
        grammar = self._write_json(schema)
        try:
            self.check_size(grammar)
        except GrammarError as too_long:
            raise blame_largest(schema, too_long.message) from None
        error = self._find_error(grammar)
        if error.startswith(TOO_COMPLEX):
            raise blame_largest(schema, error)
        if error:
            raise json_schema.locate_error(schema, error, self._find_schema_error)
        return grammar

    def build_choice(self, texts: list[str]) -> str:
        """Build one terminal: a rule has room for at most 3,000 texts."""
        grammar = LLMatcher.grammar_from_regex("|".join(map(quote_pattern, texts)))
        names_tokens = any(isinstance(piece, int) for text in texts for piece in self.split_special_tokens(text))
        return self.check(_spell_out(grammar) if names_tokens else grammar)

    def build_regex(self, pattern: str) -> str:
        return self.check(LLMatcher.grammar_from_regex(pattern))

    def build_lark(self, grammar: str) -> str:
        """Build the grammar of a Lark or GBNF grammar."""
        if is_lark(grammar):
            return self._build_lark(grammar)
        try:
            return self._build_lark(write_as_lark(grammar))
        except GrammarError as error:
            raise GrammarError(_LARK_PLACE.sub("", error.message)) from None

    def _build_lark(self, lark: str) -> str:
        if re.search(r'"lenient"', lark):
            raise GrammarError("the option lenient is not supported")
        return self.check(LLMatcher.grammar_from_lark(_prepare_lark(lark)))

    # Parts of structural tags.

    def write_json(self, schema: object) -> object:
        return json.loads(self.build_json(schema))["grammars"][0]["json_schema"]

    def write_regex(self, pattern: str) -> str:
        lark: str = json.loads(self.build_regex(pattern))["grammars"][0]["lark_grammar"]
        return lark.removeprefix("start: ")

    def split_special_tokens(self, text: str) -> list[str | int]:
        return split_special_tokens(self._tokenizer, text)

    def _write_json(self, schema: object) -> str:
        return json_schema.write_grammar(schema, whitespace=self._whitespace, closed=self._closed)

    def _find_schema_error(self, schema: object) -> str:
        try:
            return self._find_error(self._write_json(schema))
        except GrammarError as error:
            return error.message

    def _find_error(self, grammar: str) -> str:
        """Return what is wrong with a grammar, in one line; empty if some text matches it."""
        tokenizer = self._tokenizer
        began = time.thread_time()
        matcher = build_matcher(tokenizer, grammar)
        if matcher.is_error():
            return _first_lines(matcher_error(matcher))
        for warning in matcher.get_grammar_warnings():
            if not warning.startswith("oneOf not fully supported"):  # only with coerce_one_of, which requests it
                return _first_lines(warning)
        chooser = random.Random(0)
        for _ in range(PROBE_STEPS):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            if matcher.is_error():
                error = matcher_error(matcher)
                if error.startswith("NoExtension"):
                    return "no text satisfies it"
                return f"{TOO_COMPLEX}: {_first_lines(error)}"
            if time.thread_time() - began > MAX_CPU_SECONDS:
                return f"{TOO_COMPLEX}: its first tokens take more than {MAX_CPU_SECONDS} s"
            for token_id in tokenizer.eos_tokens:
                mask &= ~(1 << token_id)
            if matcher.is_stopped() or not mask:
                break
            matcher.consume_token(_choose_bit(mask, chooser))
        return ""


def _spell_out(grammar: str) -> str:
    """Return the grammar, spelling out special tokens in its forced texts: no terminal matches such a token."""
    lark = json.loads(grammar)["grammars"][0]["lark_grammar"]
    return LLMatcher.grammar_from_lark(f'%llguidance {{"no_forcing": true}}\n{lark}')


def _choose_bit(bits: int, chooser: random.Random) -> int:
    """Return the index of one of the set bits."""
    start = chooser.randrange(bits.bit_length())
    rest = bits >> start
    return start + (rest & -rest).bit_length() - 1


def _first_lines(message: str) -> str:
    """Join the lines of an error, without the compiler's excerpt of the grammar."""
    lines = [line.strip() for line in message.splitlines() if not re.match(r"\s*\d* \|", line)]
    return "; ".join(line for line in lines if line.strip("^ "))


def _prepare_lark(lark: str) -> str:
    """Return a Lark grammar with JSON schemas that llguidance enforces exactly. Raises GrammarError."""
    pieces = []
    position = 0
    while found := _LARK_PART.search(lark, position):
        pieces.append(lark[position : found.end()])
        position = found.end()
        if found["attribute"]:
            raise GrammarError(f"the attribute {found['attribute']} is not supported")
        if found["schema"] is None:
            continue
        try:
            schema, position = _DECODER.raw_decode(lark, position)
            prepared = json_schema.prepare_schema(schema, closed=False)
            pieces.append(json.dumps(prepared, ensure_ascii=False, allow_nan=False))
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"%json is followed by malformed JSON: {error}") from None
    return "".join(pieces) + lark[position:]
