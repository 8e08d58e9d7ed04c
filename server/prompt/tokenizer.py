"""Text to ids and back, by the plain `tokenizers` library.

Knows no requests and no HTTP; imports neither torch nor transformers (`convert` does so, in a process of its own).
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from tokenizers import Tokenizer as RustTokenizer

from serve_llm.engine.errors import ModelError
from serve_llm.engine.hub import read_json
from serve_llm.server.prompt.convert import converted

_SPACE = "\u2581"  # sentencepiece's mark for a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character (GPT-2's table): printable Latin-1 stands for itself,
    the other bytes, in order, for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class _Step(msgspec.Struct):
    """One step of a tokenizer's decoder, as tokenizer.json writes it."""

    type: str
    decoders: list[_Step] = []
    content: str = ""
    start: int = 0
    pattern: dict[str, str] = {}
    replacement: str = ""
    prepend_scheme: str = "always"

    @property
    def marks_spaces(self) -> bool:
        """Turns sentencepiece's mark, and nothing else, into a space."""
        return (self.pattern == {"String": _SPACE} and self.content == " ") or self.replacement == _SPACE


class Decoding(msgspec.Struct, frozen=True):
    """How ids become text, where that is a concatenation of each token's bytes."""

    byte_level: bool  # GPT-2's byte characters; else sentencepiece's space mark
    byte_fallback: bool  # a token named <0x41> is that byte
    strip_first_space: bool  # of the whole text


class Tokenizer:
    """`special_ids`: ids that text leaves out unless asked for. `eos_id`: the tokenizer's own end of sequence, if any.
    `named_tokens`: bos_token, eos_token, ... as chat templates know them."""

    def __init__(self, rust: RustTokenizer, named_tokens: dict[str, str]) -> None:
        rust.no_truncation()  # some tokenizer.json files carry what their training used
        rust.no_padding()
        self.rust = rust
        self.named_tokens = named_tokens
        self.special_ids = frozenset(
            token_id for token_id, token in rust.get_added_tokens_decoder().items() if token.special
        )
        eos = named_tokens.get("eos_token")
        self.eos_id: int | None = None if eos is None else rust.token_to_id(eos)
        self.decoding = _read_decoding(rust)
        self.longest_token = max(map(len, rust.get_vocab(with_added_tokens=True)), default=1)  # characters

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text. Releases the GIL while it works (`encode` of the library does not)."""
        ids: list[int] = self.rust.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; unknown ids are left out. Releases the GIL as `encode` does."""
        text: str = self.rust.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; not necessarily whole characters."""
        token = self.rust.id_to_token(token_id)
        if token is None:
            return b""
        if self.decoding is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        if self.decoding.byte_level:
            found = [_BYTE_OF_CHARACTER.get(character) for character in token]
            # An added token may hold characters outside the table; the library then takes it as it stands.
            return token.encode() if None in found else bytes(byte for byte in found if byte is not None)
        if self.decoding.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.replace(_SPACE, " ").encode()

    def token_text(self, token_id: int) -> str:
        """A token as logprobs show it; bytes that are no whole characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _read_decoding(rust: RustTokenizer) -> Decoding | None:
    """None: the decoder is none of the known concatenations, text must come from the library."""
    if rust.decoder is None:
        return None
    decoder = msgspec.json.decode(rust.decoder.__getstate__(), type=_Step)
    steps = [step for step in decoder.decoders or [decoder] if step.type != "Fuse"]
    if not steps:
        return None
    first, last = steps[0], steps[-1]
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
    """The tokenizer of a checkpoint directory, converted first where it has no tokenizer.json. Raises ModelError."""
    if not (directory / "tokenizer.json").is_file():
        directory = converted(directory)
    try:
        rust = RustTokenizer.from_file(str(directory / "tokenizer.json"))
    except BaseException as error:  # the library raises plain Exception, and for bugs of its own what is not even that
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
