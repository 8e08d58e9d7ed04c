"""Encode text to token ids and decode them, with the `tokenizers` library alone: transformers would import torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from tokenizers import Encoding
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from serve_llm.common.errors import ModelError
from serve_llm.common.hub import read_json
from serve_llm.common.tokenizer_files import find_tokenizer
from serve_llm.server.http.errors import InvalidRequest

Side = Literal["left", "right"]
Encoded = tuple[list[int], int | None]  # ids, and the index at which the second text's token type begins, if it does

_SPACE = "\u2581"  # sentencepiece's mark for a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table, by which byte-level BPE writes each byte as one printable character: printable Latin-1 bytes are
    written as themselves, the other bytes, in order, as the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class _DecoderStep(msgspec.Struct):
    """One step of a tokenizer's decoder, as tokenizer.json writes it."""

    type: str
    decoders: list[_DecoderStep] = []
    content: str = ""
    start: int = 0
    pattern: dict[str, str] = {}
    replacement: str = ""
    prepend_scheme: str = "always"

    @property
    def marks_spaces(self) -> bool:
        """Whether the step replaces sentencepiece's mark, and nothing else, by a space."""
        return (self.pattern == {"String": _SPACE} and self.content == " ") or self.replacement == _SPACE


class Decoding(msgspec.Struct, frozen=True):
    """How ids become text, for tokenizers whose text is the concatenation of the tokens' bytes."""

    byte_level: bool  # GPT-2's byte characters; otherwise sentencepiece's space mark
    byte_fallback: bool  # a token named <0x41> is that byte
    strip_first_space: bool  # at the beginning of the whole text


class Tokenizer:
    """added_tokens: id by text, of tokens beside the vocabulary. special_ids: those that `decode` skips by default.
    begin_id: the id that `encode` puts before every text, if any. eos_id: the tokenizer's end-of-sequence id, if any.
    named_tokens: bos_token, eos_token, ... as chat templates name them. longest_token: the most characters that one
    token can represent; None if unlimited, as for unknown words or runs of spaces."""

    def __init__(self, rust: RustTokenizer, named_tokens: dict[str, str]) -> None:
        rust.no_truncation()  # some tokenizer.json files contain training settings
        rust.no_padding()
        self.rust = rust
        self.named_tokens = named_tokens
        added = rust.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        eos = named_tokens.get("eos_token")
        self.eos_id: int | None = None if eos is None else rust.token_to_id(eos)
        self.begin_id = self._find_begin_id()
        self.decoding = _read_decoding(rust)
        longest = max(map(len, rust.get_vocab(with_added_tokens=True)), default=1)
        self.longest_token = longest if isinstance(rust.model, BPE) else None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text. Releases the GIL, which the library's own `encode` does not. Raises InvalidRequest."""
        ids: list[int] = self._encode_batch([text], add_special_tokens)[0].ids
        return ids

    def _encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Encoding]:
        """Raises InvalidRequest."""
        try:
            return self.rust.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError:
            found = (re.search("[\ud800-\udfff]", text) for text in texts)
            if (lone := next(filter(None, found), None)) is None:
                raise
            raise InvalidRequest(
                f"a text holds a lone surrogate, {lone[0]!r} at index {lone.start()}: half of a character, which no "
                "text can have"
            ) from None

    def _find_begin_id(self) -> int | None:
        """The special token that is put before every text, if there is one."""
        return self.encode("x", add_special_tokens=True)[0] if 0 in self.find_added_positions("x") else None

    def find_added_positions(self, text: str) -> list[int]:
        """The positions of tokens in `encode(text, add_special_tokens=True)` that are not part of the text."""
        mask = self.rust.encode_batch([text], add_special_tokens=True)[0].special_tokens_mask
        return [position for position, is_added in enumerate(mask) if is_added]

    def encode_truncated(
        self, texts: Sequence[tuple[str, str | None]], max_tokens: int, side: Side, add_special_tokens: bool
    ) -> list[Encoded]:
        """Encode texts, or pairs of texts, in parallel. Truncates each on the given side to at most `max_tokens`,
        special tokens included. Raises InvalidRequest.

        In a pair, the longer text is truncated first.
        """
        flat = [text for pair in texts for text in pair if text is not None]
        encodings = iter(self._encode_batch(flat, add_special_tokens=False))
        encoded: list[Encoded] = []
        for _, second in texts:
            is_pair = second is not None
            own = [next(encodings), next(encodings)] if is_pair else [next(encodings)]
            num_special = self.rust.num_special_tokens_to_add(is_pair) if add_special_tokens else 0
            room = max(0, max_tokens - num_special)
            lengths = [len(encoding) for encoding in own]
            if sum(lengths) > room:
                kept = _share_room(lengths[0], lengths[1], room) if is_pair else [room]
                for encoding, count in zip(own, kept, strict=True):
                    encoding.truncate(count, direction=side)
            whole = self.rust.post_process(own[0], own[1] if is_pair else None, add_special_tokens)
            types = whole.type_ids
            encoded.append((whole.ids, types.index(1) if 1 in types else None))
        return encoded

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Decode ids; unknown ids are skipped. Releases the GIL."""
        text: str = self.rust.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, which may be parts of a character."""
        token = self.rust.id_to_token(token_id)
        if token is None:
            return b""
        if self.decoding is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        if self.decoding.byte_level:
            token_bytes = [_BYTE_OF_CHARACTER.get(character) for character in token]
            # An added token may contain characters outside the table; the library then takes it literally.
            if None in token_bytes:
                return token.encode()
            return bytes(byte for byte in token_bytes if byte is not None)
        if self.decoding.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.replace(_SPACE, " ").encode()

    def token_name(self, token_id: int) -> str:
        """A token as the vocabulary writes it."""
        return self.rust.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """A token as shown in logprobs; incomplete characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _share_room(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens to keep of two texts that together exceed `room`: the longer one is truncated first."""
    half = room // 2
    if first <= half:
        return first, room - first
    if second <= half:
        return room - second, second
    return (room - half, half) if first > second else (half, room - half)


def _read_decoding(rust: RustTokenizer) -> Decoding | None:
    """Return None if the decoder is not a known concatenation of bytes, so that only the library can decode."""
    if rust.decoder is None:
        return None
    decoder = msgspec.json.decode(rust.decoder.__getstate__(), type=_DecoderStep)
    steps = [step for step in decoder.decoders or [decoder] if step.type != "Fuse"]
    if not steps:
        return None
    first = steps[0]
    last = steps[-1]
    match [step.type for step in steps]:
        case ["ByteLevel"]:
            return Decoding(byte_level=True, byte_fallback=False, strip_first_space=False)
        case ["Metaspace"] if first.marks_spaces:
            return Decoding(byte_level=False, byte_fallback=False, strip_first_space=first.prepend_scheme != "never")
        case ["Replace", "ByteFallback"] if first.marks_spaces:
            return Decoding(byte_level=False, byte_fallback=True, strip_first_space=False)
        case ["Replace", "ByteFallback", "Strip"] if first.marks_spaces and (last.content, last.start) == (" ", 1):
            return Decoding(byte_level=False, byte_fallback=True, strip_first_space=True)
        case _:
            return None


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory, converted first if it has no tokenizer.json. Raises ModelError."""
    directory = find_tokenizer(directory)
    try:
        rust = RustTokenizer.from_file(str(directory / "tokenizer.json"))
    except BaseException as error:  # its panics are not subclasses of Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ModelError(f"{directory / 'tokenizer.json'} cannot be read: {error}; copy or download it again") from None
    return Tokenizer(rust, read_named_tokens(directory))


def read_named_tokens(directory: Path) -> dict[str, str]:
    """bos_token, eos_token, ... of tokenizer_config.json (or special_tokens_map.json), each a string or an object."""
    named: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not (directory / name).is_file():
            continue
        for key, value in read_json(directory / name).items():
            content = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(content, str):
                named[key] = content
    return named
