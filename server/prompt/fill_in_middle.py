"""Fill-in-the-middle prompts, in the form that the model was trained with, which its special tokens reveal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_llm.server.prompt.tokenizer import Tokenizer

_ANCHOR = "\u263a"  # put before a text, so that it is encoded as in the middle of one


@dataclass(frozen=True)
class _Markers:
    """Tokens before the prefix, before the suffix, and before the text to be written; "" is none."""

    prefix: str
    suffix: str
    middle: str
    suffix_comes_first: bool = False


_FORMS = (
    _Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite
    _Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2
    _Markers("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Markers("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    _Markers("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
    _Markers("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    _Markers("[PREFIX]", "[SUFFIX]", "", suffix_comes_first=True),  # Codestral
)
_FILES = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")
_ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<|repo_name|>",
    "<|cursor|>",
    "<fim_pad>",
    "<file_sep>",
    "<repo_name>",
    "\u2581<EOT>",
)
"""Tokens that end such a text, besides the end-of-sequence ids."""


@dataclass(frozen=True)
class FillInMiddle:
    """One model's marker ids, and the ids that end the text."""

    prefix_id: int
    suffix_id: int
    middle_id: int | None
    suffix_comes_first: bool
    end_ids: tuple[int, ...]
    file_id: int | None = None  # before each file of a prompt that has several

    def encode(
        self, prefix: str, suffix: str, tokenizer: Tokenizer, files: Sequence[tuple[str, str]] = ()
    ) -> list[int]:
        """The prompt's ids. files: names and texts of other files, to put first."""
        first = [self.prefix_id, *_encode_within(prefix, tokenizer)]
        second = [self.suffix_id, *_encode_within(suffix, tokenizer)]
        parts = [*second, *first] if self.suffix_comes_first else [*first, *second]
        begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
        for name, text in files:
            if self.file_id is None:
                begin += _encode_within(f"--- {name} ---\n{text}\n\n", tokenizer)
            else:
                begin += [self.file_id, *_encode_within(f"{name}\n{text}\n", tokenizer)]
        if files and self.file_id is not None:
            begin.append(self.file_id)
        end = [] if self.middle_id is None else [self.middle_id]
        return [*begin, *parts, *end]


def find_fill_in_middle(tokenizer: Tokenizer) -> FillInMiddle | None:
    """Return None if the tokenizer lacks the tokens."""
    vocabulary: Mapping[str, int] = tokenizer.rust.get_vocab(with_added_tokens=True)
    for form in _FORMS:
        if all(name in vocabulary for name in (form.prefix, form.suffix, form.middle) if name):
            return FillInMiddle(
                prefix_id=vocabulary[form.prefix],
                suffix_id=vocabulary[form.suffix],
                middle_id=vocabulary[form.middle] if form.middle else None,
                suffix_comes_first=form.suffix_comes_first,
                file_id=next((vocabulary[name] for name in _FILES if name in vocabulary), None),
                end_ids=tuple(vocabulary[name] for name in _ENDS if name in vocabulary),
            )
    return None


def _encode_within(text: str, tokenizer: Tokenizer) -> list[int]:
    """Encode a text without the space that sentencepiece adds at the beginning."""
    anchor = tokenizer.encode(_ANCHOR, add_special_tokens=False)
    ids = tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
    if ids[: len(anchor)] == anchor:
        return ids[len(anchor) :]
    return tokenizer.encode(text, add_special_tokens=False)
