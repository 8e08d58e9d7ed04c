"""Sentencepiece's unigram tokenizers in GGUF files, as used by multilingual embedding models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from serve_llm.common.errors import ModelError
from serve_llm.common.gguf.file import GGUFFile
from serve_llm.common.gguf.tokenizer import Vocabulary, build_tokenizer
from support.tiny import TEXT

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
IDENTITY = [0, 4, 0, 0, *[0] * 1024]  # a map that changes nothing: its trie's size in bytes, and an empty trie
TEXTS = ["the quick fox", " two  spaces ", "nothing known: \u6f22\u5b57!", "", "<s> and </s>", "line\nbreak"]


def train() -> tuple[Tokenizer, list[tuple[str, float]]]:
    """Train a tokenizer like that of XLM-RoBERTa. Returns it and its tokens with scores."""
    original = Tokenizer(models.Unigram())
    steps = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    original.normalizer = normalizers.Sequence(steps)
    original.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    original.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>", initial_alphabet=list(":!"), show_progress=False
    )
    original.train_from_iterator(TEXT.split("\n"), trainer)
    original.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    state = json.loads(original.to_str())
    return original, [(token, score) for token, score in state["model"]["vocab"]]


def build(scored: list[tuple[str, float]], **more: object) -> Tokenizer:
    metadata: dict[str, object] = {
        "tokens": [token for token, _ in scored],
        "scores": [score for _, score in scored],
        "token_type": [3, 3, 3, 2] + [1] * (len(scored) - 4),
        "model": "t5",
        "bos_token_id": 0,
        "eos_token_id": 2,
        "unknown_token_id": 3,
        "add_bos_token": True,
        "add_eos_token": True,
    } | more
    file = GGUFFile(Path("a.gguf"), {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, {})
    return Tokenizer.from_str(build_tokenizer(Vocabulary(file)))


@pytest.mark.parametrize("characters", [[], IDENTITY])
def test_unigrams(characters: list[int]) -> None:
    original, scored = train()
    ours = build(scored, precompiled_charsmap=characters)
    for sample in (*TEXTS, TEXT):
        assert ours.encode(sample).ids == original.encode(sample).ids
        assert ours.decode(ours.encode(sample).ids) == original.decode(original.encode(sample).ids)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"scores": []}, r"tokenizer\.ggml\.scores is missing; .* --tokenizer"),
        ({"precompiled_charsmap": [1, 2, 3]}, r"tokenizer\.ggml\.precompiled_charsmap cannot be read: .* --tokenizer"),
        ({"precompiled_charsmap": "x"}, r"tokenizer\.ggml\.precompiled_charsmap must be a list of bytes"),
        ({"unknown_token_id": 999}, r"tokenizer\.ggml\.unknown_token_id must be an id below"),
    ],
)
def test_a_bad_vocabulary_is_named(more: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build([("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("a", -1.0)], **more)
