"""Special tokens in the fixed texts of a grammar, where no terminal matches them."""

from __future__ import annotations

from llguidance import LLTokenizer


def split_special_tokens(tokenizer: LLTokenizer, text: str) -> list[str | int]:
    """Split a text at the special tokens in it, which become ids."""
    pieces: list[str | int] = []
    ordinary: list[int] = []
    for token_id in tokenizer.tokenize_str(text, parse_special=True):
        if not tokenizer.is_special_token(token_id):
            ordinary.append(token_id)
            continue
        if ordinary:
            pieces.append(tokenizer.decode_str(ordinary))
        pieces.append(token_id)
        ordinary = []
    if ordinary:
        pieces.append(tokenizer.decode_str(ordinary))
    return pieces
