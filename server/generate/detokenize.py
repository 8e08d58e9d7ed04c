"""Incremental detokenization. Emitted text is final, and its concatenation equals decoding all ids at once.

For tokenizers whose text is the concatenation of the bytes of tokens (byte-level BPE, sentencepiece), a token costs one
table lookup, plus an incremental UTF-8 decoder where a character is split over tokens. For other tokenizers, each token
decodes a small window of ids again.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from serve_llm.server.dialects.dialect import Dialect
from serve_llm.server.prompt.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_LONGEST_CHARACTER = 4  # bytes of a UTF-8 character, which are at most as many tokens
_WINDOW = 8  # tokens that may end in an incomplete character before they are emitted unchanged


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""

    def flush(self) -> str:
        """Return the remaining text at the end; an incomplete character becomes U+FFFD."""


class TokenPieces(dict[int, "str | bytes"]):
    """Caches what each token id adds to a text: a string, or bytes that are not whole characters."""

    def __init__(self, tokenizer: Tokenizer, skipped_ids: frozenset[int]) -> None:
        self.skipped_ids = skipped_ids
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | bytes:
        content = b"" if token_id in self.skipped_ids else self._tokenizer.token_bytes(token_id)
        piece: str | bytes
        try:
            piece = content.decode()
        except UnicodeDecodeError:
            piece = content
        self[token_id] = piece
        return piece


class PieceDetokenizer:
    __slots__ = ("_decoder", "_pieces", "_strip")

    def __init__(self, pieces: TokenPieces, strip_first_space: bool) -> None:
        self._pieces = pieces
        self._strip = strip_first_space
        self._decoder: codecs.IncrementalDecoder | None = None  # set while a character is incomplete

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if self._decoder is None and type(piece) is str and not self._strip:
            return piece
        return self._push_slowly(piece)

    def _push_slowly(self, piece: str | bytes) -> str:
        text = piece
        if self._decoder is not None or not isinstance(piece, str):
            decoder = self._decoder or _Utf8Decoder("replace")
            text = decoder.decode(piece.encode() if isinstance(piece, str) else piece)
            self._decoder = decoder if decoder.getstate()[0] else None
        assert isinstance(text, str)
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        decoder = self._decoder
        self._decoder = None
        return "" if decoder is None else decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes the last few ids again with each new one; what the text has gained is new."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, skipped_ids: frozenset[int]) -> None:
        """skipped_ids: skipped even without `skip_special_tokens`."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._skipped_ids = skipped_ids
        self._ids: list[int] = []
        self._num_emitted = 0  # leading ids of the window whose text was emitted: context for the rest

    def push(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        self._ids.append(token_id)
        text = self._decode_rest()
        if text.endswith("\ufffd") and len(self._ids) - self._num_emitted < _WINDOW:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode_rest())

    def _decode_rest(self) -> str:
        emitted = self._tokenizer.decode(self._ids[: self._num_emitted], self._skip)
        return self._tokenizer.decode(self._ids, self._skip)[len(emitted) :]

    def _emit(self, text: str) -> str:
        del self._ids[: self._num_emitted]
        self._num_emitted = len(self._ids)
        return text


class DetokenizerFactory:
    """Creates the detokenizers of one tokenizer, which share its tables."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect | None = None) -> None:
        self._tokenizer = tokenizer
        named = frozenset() if dialect is None else dialect.find_tokens(tokenizer.added_tokens)
        delimiter_ids = {tokenizer.added_tokens[text] for text in named}
        self._has_delimiters = bool(tokenizer.special_ids & delimiter_ids)
        ends = () if dialect is None else dialect.list_pure_ends()
        self._end_ids = frozenset(tokenizer.added_tokens[end] for end in ends if end in tokenizer.added_tokens)
        self._all = TokenPieces(tokenizer, frozenset())
        self._without_special = TokenPieces(tokenizer, tokenizer.special_ids)
        self._with_delimiters = TokenPieces(tokenizer, (tokenizer.special_ids - delimiter_ids) | self._end_ids)

    def create(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool, keep_delimiters: bool = False
    ) -> Detokenizer:
        """Create a detokenizer for the text after `prompt_ids`, starting in the state after the prompt.

        keep_delimiters: keep the dialect's special tokens as text, except those that only end a turn.
        """
        keeps_delimiters = keep_delimiters and self._has_delimiters
        skips_ends = keep_delimiters and skip_special_tokens
        decoding = self._tokenizer.decoding
        detokenizer: Detokenizer
        if decoding is None:
            # The library skips all special tokens or none.
            detokenizer = WindowDetokenizer(
                self._tokenizer,
                skip_special_tokens and not keeps_delimiters,
                self._end_ids if skips_ends else frozenset(),
            )
        else:
            pieces = self._all
            if skip_special_tokens:
                pieces = self._with_delimiters if skips_ends else self._without_special
            is_text_start = all(token_id in pieces.skipped_ids for token_id in prompt_ids)
            detokenizer = PieceDetokenizer(pieces, decoding.strip_first_space and is_text_start)
        for token_id in prompt_ids[-_LONGEST_CHARACTER:]:
            detokenizer.push(token_id)
        return detokenizer
