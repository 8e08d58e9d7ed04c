"""Ids of texts and pairs of texts are those of the library, which also computes what nobody reads."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.prompt.tokenizer import Tokenizer

TEXTS = ["", " a cab", "dab  cad\n", "<s>abc</s> ü日", "b" * 40]
SPECIAL = ["<s>", "</s>", "[UNK]"]


def build_bytes() -> RustTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*SPECIAL, *alphabet, "ab", "ca"])}
    rust = RustTokenizer(models.BPE(vocabulary, [("a", "b"), ("c", "a")]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # type: ignore[assignment]
    rust.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    rust.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), trim_offsets=True)  # type: ignore[assignment]
    return rust


def build_words() -> RustTokenizer:
    pieces = [*SPECIAL, "a", "##a", "##b", "##c", "ca", "da", "##d"]
    rust = RustTokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer()  # type: ignore[assignment]
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    rust.post_processor = processors.BertProcessing(("</s>", 1), ("<s>", 0))  # type: ignore[assignment]
    return rust


def build_unigrams() -> RustTokenizer:
    pieces = [*((piece, 0.0) for piece in SPECIAL), *((piece, -2.0) for piece in ("\u2581", "a", "b", "c", "d", "ca"))]
    rust = RustTokenizer(models.Unigram(pieces, 2, False))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    template = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B:1 </s>:1", [("<s>", 0), ("</s>", 1)])
    rust.post_processor = template  # type: ignore[assignment]
    return rust


@pytest.mark.parametrize("build", [build_bytes, build_words, build_unigrams])
@pytest.mark.parametrize("special", [False, True])
def test_ids_are_the_librarys(build: type[RustTokenizer], special: bool) -> None:
    rust = build()
    rust.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = Tokenizer(rust, {})
    for text in TEXTS:
        assert tokenizer.encode(text, special) == rust.encode(text, add_special_tokens=special).ids
    pairs = [(one, other) for one in TEXTS for other in (None, *TEXTS)]
    for (one, other), (ids, second_start) in zip(
        pairs, tokenizer.encode_truncated(pairs, 2**31 - 1, "right", special), strict=True
    ):
        expected = rust.encode(one, other, add_special_tokens=special)
        assert ids == expected.ids
        assert second_start == (expected.type_ids.index(1) if 1 in expected.type_ids else None)


def test_a_lone_surrogate_is_named() -> None:
    tokenizer = Tokenizer(build_bytes(), {})
    for call in (
        lambda: tokenizer.encode("a\ud800", False),
        lambda: tokenizer.encode_truncated([("a", "a\ud800")], 10, "right", False),
    ):
        with pytest.raises(InvalidRequest, match=r"lone surrogate, '\\ud800' at index 1"):
            call()
