"""WordPiece vocabularies of GGUF files (tokenizer.ggml.model "bert") as tokenizers.

The file marks the pieces that begin a word, whereas tokenizer.json marks those that continue one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORD_BEGIN = "\u2581"
LONGEST_WORD = 100  # in characters; longer words are unknown
UNKNOWN = "[UNK]"
FIRST = "[CLS]"
LAST = "[SEP]"


def restore_pieces(tokens: Sequence[str], is_special: Sequence[bool]) -> list[str]:
    """The tokens in tokenizer.json's form: with "##" before those that continue a word."""
    return [
        token if special else token.removeprefix(WORD_BEGIN) if token.startswith(WORD_BEGIN) else f"##{token}"
        for token, special in zip(tokens, is_special, strict=True)
    ]


def build_word_pieces(pieces: Sequence[str], unknown: str, first: str, last: str) -> Tokenizer:
    """pieces: from `restore_pieces`, each once. first, last: the tokens around a text.

    The file does not say whether texts are lowercased first: they are if no piece has a capital letter.
    """
    ids = {piece: index for index, piece in enumerate(pieces)}
    is_cased = any(piece != piece.lower() for piece in pieces if not piece.startswith(("[", "<")))
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=unknown, max_input_chars_per_word=LONGEST_WORD))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[f"{first}:0", "$A:0", f"{last}:0"],
        pair=[f"{first}:0", "$A:0", f"{last}:0", "$B:1", f"{last}:1"],
        special_tokens=[(first, ids[first]), (last, ids[last])],
    )
    return tokenizer
