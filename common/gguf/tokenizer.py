"""Translate the vocabulary in a GGUF file to tokenizer.json and tokenizer_config.json. No torch.

Four models are supported: "gpt2", byte-level BPE whose pre-tokenization tokenizer.ggml.pre names; "llama",
sentencepiece's BPE with a score for each token instead of merges; "bert", WordPiece; and "t5", sentencepiece's
unigrams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from serve_llm.common.errors import ModelError
from serve_llm.common.gguf.file import GGUFFile
from serve_llm.common.gguf.unigram import build_unigram
from serve_llm.common.gguf.word_pieces import FIRST, LAST, UNKNOWN, build_word_pieces, restore_pieces
from serve_llm.common.gguf.words import WHOLE_WORDS, WORDS

SPACE = "\u2581"  # sentencepiece's mark for a space
# Tokens that end a text or a turn, and that begin one: control tokens even if the file says that they are text.
ENDS = tuple(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <end_of_utterance>".split()
)
STARTS = ("<|im_start|>", "<start_of_turn>", "<|start_header_id|>", "<|end_header_id|>")
CONTROL_TOKENS = frozenset((*ENDS, *STARTS))
END_OF_TURN = (*ENDS, "<eos>", "[EOS]", "[EOT]")  # the last three only if they are control tokens
END_OF_CALL = ("<|return|>", "<|call|>", "<|endoftext|>")  # gpt-oss ends messages within a turn with <|end|>
TEMPLATE = "tokenizer.chat_template"
NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Vocabulary:
    """The tokenizer's metadata, checked."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.tokens = self._texts("tokenizer.ggml.tokens")
        if not self.tokens:
            raise self._wrong("tokenizer.ggml.tokens", "a list of texts")
        count = len(self.tokens)
        types = self._numbers("tokenizer.ggml.token_type", count) or [TokenType.NORMAL] * count
        self.types = [
            TokenType.CONTROL if token in CONTROL_TOKENS else kind
            for token, kind in zip(self.tokens, types, strict=True)
        ]
        self.scores = self._numbers("tokenizer.ggml.scores", count)
        self.merges = [self._pair(merge) for merge in self._texts("tokenizer.ggml.merges")]
        self.model = file.metadata.get("tokenizer.ggml.model")
        self.pre = file.metadata.get("tokenizer.ggml.pre", "default")
        self.is_gemma = str(file.metadata.get("general.architecture")).startswith("gemma")

    @property
    def templates(self) -> dict[str, str]:
        """Chat templates by name; the one under the plain key is "default"."""
        found = {
            key.removeprefix(TEMPLATE).removeprefix(".") or "default": value
            for key, value in self._file.metadata.items()
            if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")
        }
        for name, template in found.items():
            if not isinstance(template, str):
                raise self._wrong(TEMPLATE if name == "default" else f"{TEMPLATE}.{name}", "a text")
        return {name: str(template) for name, template in found.items()}

    def token_id(self, key: str) -> int | None:
        """The token id under a metadata key; None if the key is absent or means none."""
        found = self._file.metadata.get(key)
        return None if found is None or found in (-1, 2**32 - 1) else self._check_id(key, found)

    def token_ids(self, key: str) -> list[int]:
        """The token ids of a list, which Ollama writes; empty if there is none."""
        found = self._file.metadata.get(key, [])
        if not isinstance(found, list):
            raise self._wrong(key, "a list of ids")
        return [self._check_id(key, one) for one in found]

    def _check_id(self, key: str, found: object) -> int:
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < len(self.tokens):
            raise self._wrong(key, f"an id below {len(self.tokens)}")
        return found

    def flag(self, key: str, default: bool) -> bool:
        found = self._file.metadata.get(key, default)
        if not isinstance(found, bool):
            raise self._wrong(key, "true or false")
        return found

    def bytes(self, key: str) -> bytes:
        found = self._file.metadata.get(key, [])
        if not isinstance(found, list) or not all(isinstance(one, int) for one in found):
            raise self._wrong(key, "a list of bytes")
        return bytes(one & 0xFF for one in found)  # some writers use signed integers

    def refuse(self, key: str, why: str) -> ModelError:
        return ModelError(f"{self._file.path}: {key} {why}; choose another tokenizer with --tokenizer")

    def _pair(self, merge: str) -> tuple[str, str]:
        first, space, second = merge.partition(" ")
        if not (first and space and second) or " " in second:
            raise self._wrong("tokenizer.ggml.merges", f"pairs of texts, not {merge!r}")
        return first, second

    def _texts(self, key: str) -> list[str]:
        found = self._file.metadata.get(key, [])
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise self._wrong(key, "a list of texts")
        return found

    def _numbers(self, key: str, count: int) -> list[int]:
        found = self._file.metadata.get(key, [])
        if not isinstance(found, list) or not all(isinstance(one, int | float) for one in found):
            raise self._wrong(key, "a list of numbers")
        if found and len(found) != count:
            raise self._wrong(key, f"as long as the {count} tokens, not {len(found)}")
        return found

    def _wrong(self, key: str, expected: str) -> ModelError:
        return ModelError(f"{self._file.path}: metadata key {key} must be {expected}")


def build_tokenizer(vocabulary: Vocabulary) -> str:
    """The content of tokenizer.json. Raises ModelError that names the key if the vocabulary is not supported."""
    if vocabulary.model == "gpt2":
        tokenizer = _build_byte_level(vocabulary)
    elif vocabulary.model == "llama":
        tokenizer = _build_sentencepiece(vocabulary)
    elif vocabulary.model == "bert":
        tokenizer = _build_bert(vocabulary)
    elif vocabulary.model == "t5":
        tokenizer = _build_unigram(vocabulary)
    else:
        raise vocabulary.refuse(
            "tokenizer.ggml.model", f"{vocabulary.model!r} is not supported (supported: bert, gpt2, llama, t5)"
        )
    _add_tokens(tokenizer, vocabulary)
    if vocabulary.model != "bert":
        _add_template(tokenizer, vocabulary)
    content: str = tokenizer.to_str()
    return content


def build_tokenizer_config(vocabulary: Vocabulary) -> dict[str, object]:
    """The content of tokenizer_config.json: the names of special tokens, and the chat templates."""
    ids = {name: vocabulary.token_id(key) for name, key in NAMED.items()}
    config: dict[str, object] = {
        name: vocabulary.tokens[token_id] for name, token_id in ids.items() if token_id is not None
    }
    templates = vocabulary.templates
    if templates.keys() == {"default"}:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def find_eos_ids(vocabulary: Vocabulary) -> list[int]:
    """The ids that end a text or a turn: those that the file names, and control tokens that are known to do so."""
    ends = END_OF_CALL if set(END_OF_CALL) <= set(vocabulary.tokens) else END_OF_TURN
    named = [vocabulary.token_id(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    named += vocabulary.token_ids("tokenizer.ggml.eos_token_ids")
    known = [
        index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == TokenType.CONTROL and token in ends
    ]
    return list(dict.fromkeys([token_id for token_id in named if token_id is not None] + known))


def _build_bpe(
    vocabulary: Vocabulary, ids: dict[str, int], merges: list[tuple[str, str]], **settings: Any
) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(ids, merges, **settings))
    except Exception as error:  # tokenizers raises no narrower class
        raise vocabulary.refuse("tokenizer.ggml.merges", f"cannot be read: {error}") from None


def _build_byte_level(vocabulary: Vocabulary) -> Tokenizer:
    pre = vocabulary.pre
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = _build_bpe(vocabulary, ids, vocabulary.merges, ignore_merges=pre in WHOLE_WORDS)
    if pre not in WORDS:
        raise vocabulary.refuse(
            "tokenizer.ggml.pre", f"{pre!r} is not supported (supported: {', '.join(sorted(WORDS))})"
        )
    splits = [pre_tokenizers.Split(Regex(words), behavior="isolated") for words in WORDS[str(pre)]]
    steps = [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_bert(vocabulary: Vocabulary) -> Tokenizer:
    is_special = [kind in (TokenType.CONTROL, TokenType.UNKNOWN) for kind in vocabulary.types]
    pieces = restore_pieces(vocabulary.tokens, is_special)
    if len(set(pieces)) < len(pieces):
        raise vocabulary.refuse("tokenizer.ggml.tokens", "names a token twice")

    def find(name: str, *keys: str) -> str:
        """The token that one of the keys names, otherwise the one with this name."""
        ids = [vocabulary.token_id(f"tokenizer.ggml.{key}_token_id") for key in keys]
        found = next((pieces[token_id] for token_id in ids if token_id is not None), name)
        if found not in pieces:
            raise vocabulary.refuse("tokenizer.ggml.tokens", f"has no {name}")
        return found

    first, last = find(FIRST, "cls", "bos"), find(LAST, "seperator", "separator", "eos")  # the first in GGUF's spelling
    return build_word_pieces(pieces, find(UNKNOWN, "unknown"), first, last)


def _build_unigram(vocabulary: Vocabulary) -> Tokenizer:
    if not vocabulary.scores:
        raise vocabulary.refuse("tokenizer.ggml.scores", "is missing")
    try:
        return build_unigram(
            vocabulary.tokens,
            [float(score) for score in vocabulary.scores],
            vocabulary.token_id("tokenizer.ggml.unknown_token_id"),
            vocabulary.bytes("tokenizer.ggml.precompiled_charsmap"),
            joins_spaces=vocabulary.flag("tokenizer.ggml.remove_extra_whitespaces", True),
        )
    except ValueError as error:
        raise vocabulary.refuse("tokenizer.ggml.precompiled_charsmap", f"cannot be read: {error}") from None


def _build_sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    tokens = vocabulary.tokens
    scores = [float(score) for score in vocabulary.scores]
    if not scores:
        raise vocabulary.refuse("tokenizer.ggml.scores", "is missing")
    if vocabulary.is_gemma:
        # Gemma's tokens of several spaces are stored literally, and its merges follow the order of tokens, not scores.
        tokens = [SPACE * len(token) if token.strip(" ") == "" else token for token in tokens]
        scores = [-float(index) for index in range(len(tokens))]
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        raise vocabulary.refuse("tokenizer.ggml.tokens", "names a token twice")
    pieces = [
        token
        for token, kind in zip(tokens, vocabulary.types, strict=True)
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED)
    ]
    merges = vocabulary.merges or _derive_merges(pieces, ids, scores)
    unknown = vocabulary.token_id("tokenizer.ggml.unknown_token_id")
    unknown_token = None if unknown is None else tokens[unknown]
    tokenizer = _build_bpe(vocabulary, ids, merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True)
    adds_space = vocabulary.flag("tokenizer.ggml.add_space_prefix", True)
    marks = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), marks]) if adds_space else marks
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return tokenizer


def _derive_merges(pieces: Sequence[str], ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Each way to split one of the pieces into two tokens, best pieces first. scores: of all tokens."""
    found = [
        (-scores[ids[token]], ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
        for token in pieces
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(first, second) for _, _, _, first, second in sorted(found)]


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Tokens that are matched whole in a text. Control tokens are special: they produce no text."""
    special = [
        AddedToken(token, normalized=False, special=True)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN)
    ]
    plain = [
        AddedToken(token, normalized=False, special=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind == TokenType.USER_DEFINED and token.strip(" ")
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_template(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Add BOS before and EOS after a text if the file asks for them."""
    is_default = vocabulary.model == "llama" or vocabulary.pre in WHOLE_WORDS
    ends = {
        "bos": vocabulary.flag("tokenizer.ggml.add_bos_token", is_default),
        "eos": vocabulary.flag("tokenizer.ggml.add_eos_token", False),
    }
    ids = {name: vocabulary.token_id(f"tokenizer.ggml.{name}_token_id") for name, adds in ends.items() if adds}
    named = {name: token_id for name, token_id in ids.items() if token_id is not None}
    if not named:
        return
    tokens = {name: vocabulary.tokens[token_id] for name, token_id in named.items()}

    def frame(text: str, kind: int) -> list[str]:
        parts = [f"{tokens['bos']}:{kind}"] if "bos" in tokens else []
        parts.append(f"{text}:{kind}")
        return [*parts, f"{tokens['eos']}:{kind}"] if "eos" in tokens else parts

    template = processors.TemplateProcessing(
        single=frame("$A", 0),
        pair=[*frame("$A", 0), *frame("$B", 1)],
        special_tokens=[(tokens[name], token_id) for name, token_id in named.items()],
    )
    if vocabulary.model == "gpt2":
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    else:
        tokenizer.post_processor = template
