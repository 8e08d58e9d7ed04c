"""Unigram vocabularies of sentencepiece in GGUF files (tokenizer.ggml.model "t5") as tokenizers."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers


def build_unigram(
    tokens: Sequence[str], scores: Sequence[float], unknown: int | None, characters: bytes, *, joins_spaces: bool
) -> Tokenizer:
    """scores: log-probabilities. unknown: the id of the unknown token. characters: sentencepiece's compiled character
    map, or nothing. joins_spaces: whether several spaces count as one.

    Raises ValueError if the map is damaged.
    """
    tokenizer = Tokenizer(models.Unigram(list(zip(tokens, scores, strict=True)), unknown, byte_fallback=False))
    steps: list[normalizers.Normalizer] = []
    if characters:
        try:
            steps.append(normalizers.Precompiled(characters))
        except Exception as error:  # Rust raises a plain Exception
            raise ValueError(str(error)) from None
    if joins_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer
