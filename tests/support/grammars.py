"""Structured output for tests: grammars of the demo model's tokenizer, and requests that carry them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from serve_llm.common.grammar import build_matcher
from serve_llm.common.hub import resolve_model
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.server.structured_output.compiler import GrammarCompiler
from serve_llm.server.structured_output.params import StructuredOutputs

VOCAB_SIZE = 4096
EOS = 0
SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "size": {"anyOf": [{"type": "null"}, {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9}]},
    },
    "required": ["name", "count", "tags", "size"],
    "additionalProperties": False,
}
CALL = r'start: "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"" /[A-Z][a-z]{2,8}/ "\"}}"'


@lru_cache
def demo() -> Path:
    return resolve_model("demo")


@lru_cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo() / "tokenizer.json"))


@lru_cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler((demo() / "tokenizer.json").read_text, VOCAB_SIZE, 2**20)


def compile_grammar(**wanted: object) -> str:
    return compiler().compile(StructuredOutputs(**wanted))


def accepts(grammar: str, text: str) -> bool:
    """Return whether a grammar accepts the whole text."""
    ids = compiler().load_tokenizer().tokenize_str(text)
    matcher = build_matcher(compiler().load_tokenizer(), grammar)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def ids_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def text_of(ids: list[int]) -> str:
    return str(tokenizer().decode(ids))


def constrained(number: int, grammar: str, prompt: str = "def main():\n", **sampling: object) -> EngineCoreRequest:
    """Build a request for the demo model whose text must satisfy a grammar."""
    chosen = {"max_tokens": 200, "seed": number, "temperature": 1.5, "stop_token_ids": (EOS,)} | sampling
    return EngineCoreRequest(id=number, prompt_ids=ids_of(prompt), sampling=Sampling(grammar=grammar, **chosen))
