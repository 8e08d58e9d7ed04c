"""Ids to text as they come: what is handed out is final, and all of it together is what decoding at once gives.

Where a tokenizer's text is the concatenation of its tokens' bytes (byte-level BPE, sentencepiece), a token costs one
table look-up and, where a character is split over tokens, an incremental UTF-8 decoder. Other tokenizers decode a small
window of ids again for each token. Knows nothing of stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from serve_llm.server.prompt.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_LONGEST_CHARACTER = 4  # bytes, so at most as many tokens
_WINDOW = 8  # tokens that may stay undecided before they are given out as they are


class Detokenizer(Protocol):
    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""

    def flush(self) -> str:
        """What is left at the end; an incomplete character becomes U+FFFD."""


class Pieces(dict[int, "str | bytes"]):
    """What each token adds to a text, filled as ids are met: text, or bytes where they are not whole characters."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()

    def __missing__(self, token_id: int) -> str | bytes:
        content = b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)
        piece: str | bytes
        try:
            piece = content.decode()
        except UnicodeDecodeError:
            piece = content
        self[token_id] = piece
        return piece


class PieceDetokenizer:
    def __init__(self, pieces: Pieces, strip_first_space: bool) -> None:
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
        decoder, self._decoder = self._decoder, None
        return "" if decoder is None else decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes the last few ids again with each new one; what grew is new text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._num_given = 0  # leading ids of the window whose text has been given out; they are context for the rest

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._rest()
        if text.endswith("\ufffd") and len(self._ids) - self._num_given < _WINDOW:
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self._rest())

    def _rest(self) -> str:
        given = self._tokenizer.decode(self._ids[: self._num_given], self._skip)
        return self._tokenizer.decode(self._ids, self._skip)[len(given) :]

    def _give(self, text: str) -> str:
        del self._ids[: self._num_given]
        self._num_given = len(self._ids)
        return text


class DetokenizerFactory:
    """Makes the detokenizers of one tokenizer and keeps the tables that they share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = {skip: Pieces(tokenizer, skip) for skip in (False, True)}

    def make(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        """One for the text that follows `prompt_ids`: a character or a leading space that the prompt leaves open is
        carried over."""
        decoding = self._tokenizer.decoding
        detokenizer: Detokenizer
        if decoding is None:
            detokenizer = WindowDetokenizer(self._tokenizer, skip_special_tokens)
        else:
            hidden = self._tokenizer.special_ids if skip_special_tokens else frozenset()
            first = decoding.strip_first_space and all(token_id in hidden for token_id in prompt_ids)
            detokenizer = PieceDetokenizer(self._pieces[skip_special_tokens], first)
        for token_id in prompt_ids[-_LONGEST_CHARACTER:]:
            detokenizer.push(token_id)
        return detokenizer
