"""Models that support filling in the middle of a text."""

from __future__ import annotations

from dataclasses import replace

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from serve_llm.server.prompt.fill_in_middle import find_fill_in_middle
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.tokenizer import Tokenizer

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def add_tokens(model: ServedModel, *names: str) -> ServedModel:
    """Return the model with these special tokens added."""
    rust = RustTokenizer.from_str(model.tokenizer.rust.to_str())
    rust.add_special_tokens([AddedToken(name) for name in names])
    tokenizer = Tokenizer(rust, model.tokenizer.named_tokens)
    return replace(model, tokenizer=tokenizer, fill_in_middle=find_fill_in_middle(tokenizer))
