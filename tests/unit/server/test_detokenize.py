"""Incremental decoding equals decoding at once, for each kind of tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from serve_llm.server.dialects.dialect import Dialect, ReasoningFormat
from serve_llm.server.generate.detokenize import DetokenizerFactory, WindowDetokenizer
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PROMPT = 40  # any visible token, so that no leading space is stripped


def sentencepiece(strip: bool) -> Tokenizer:
    """Return a tokenizer like Llama 2's: characters, byte fallback, a mark for spaces."""
    tokens = ["<unk>", "<s>", *BYTES, *"\u2581abcdefgh\u00e9", "\u2581a", "\u2581ab"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [("\u2581", "a"), ("\u2581a", "b")]
    rust = RustTokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    rust.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(rust, {"bos_token": "<s>"})


def metaspace() -> Tokenizer:
    vocabulary = [("<unk>", 0.0), *((token, -1.0) for token in ["\u2581", "a", "b", "\u2581a", "\u2581b", "\u00e9"])]
    rust = RustTokenizer(models.Unigram(vocabulary, 0, False))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.decoder = decoders.Metaspace()
    return Tokenizer(rust, {})


def wordpiece() -> Tokenizer:
    tokens = ["[UNK]", "[SEP]", "un", "##able", "able", ",", "."]
    rust = RustTokenizer(models.WordPiece({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    rust.add_special_tokens([AddedToken("[SEP]", special=True)])
    return Tokenizer(rust, {})


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> str:
    detokenizer = DetokenizerFactory(tokenizer).create(prompt, skip)
    return "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.flush()


@given(text=st.text(max_size=40))
def test_byte_level_round_trip(model: ServedModel, text: str) -> None:
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    assert stream(model.tokenizer, [PROMPT], ids) == text == model.tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 4200), max_size=30), skip=st.booleans())
def test_any_ids_decode_as_the_library_decodes_them(model: ServedModel, ids: list[int], skip: bool) -> None:
    """Includes incomplete characters, special tokens and ids outside the vocabulary."""
    assert stream(model.tokenizer, [PROMPT], ids, skip) == model.tokenizer.decode(ids, skip)


def test_tokens_that_end_a_turn_are_no_text_for_a_parser(model: ServedModel) -> None:
    dialect = Dialect(name="ends", reasoning=ReasoningFormat(open="<|assistant|>", close="<b>"), ends=("<|end|>",))
    factory = DetokenizerFactory(model.tokenizer, dialect)
    ids = model.tokenizer.encode("a<|end|>b<|assistant|><|user|>c", add_special_tokens=False)
    for keeps, skips, expected in (
        (True, True, "ab<|assistant|>c"),
        (False, True, "abc"),
        (True, False, "a<|end|>b<|assistant|><|user|>c"),
    ):
        detokenizer = factory.create([PROMPT], skips, keeps)
        assert "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.flush() == expected


def test_a_window_leaves_out_tokens_that_end_a_turn() -> None:
    tokenizer = wordpiece()
    factory = DetokenizerFactory(tokenizer, Dialect(name="ends", ends=("[SEP]",)))
    detokenizer = factory.create([3], True, keep_delimiters=True)
    assert "".join([detokenizer.push(token_id) for token_id in (2, 1, 3)]) + detokenizer.flush() == " unable"


@given(text=st.text("abcdefgh \u00e9\u65e5\U0001f600", max_size=30), strip=st.booleans())
def test_sentencepiece_round_trip(text: str, strip: bool) -> None:
    tokenizer = sentencepiece(strip)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert stream(tokenizer, [], ids) == tokenizer.decode(ids)


def test_a_first_space_is_kept_after_a_prompt_and_stripped_without_one() -> None:
    tokenizer = sentencepiece(strip=True)
    ids = tokenizer.encode("ab ab", add_special_tokens=False)
    assert stream(tokenizer, ids, ids) == " ab ab"
    assert stream(tokenizer, [1], ids) == "ab ab"  # <s> is not part of the text
    assert stream(tokenizer, [1], ids, skip=False) == " ab ab"


def test_a_character_begun_in_the_prompt_is_completed(model: ServedModel) -> None:
    ids = model.tokenizer.encode("\U0001f600", add_special_tokens=False)
    assert len(ids) > 1, "the test needs a character of several tokens"
    assert stream(model.tokenizer, ids[:1], ids[1:]) == "\U0001f600"


def test_text_is_emitted_as_soon_as_a_character_is_complete(model: ServedModel) -> None:
    ids = model.tokenizer.encode("\U0001f600", add_special_tokens=False)
    detokenizer = DetokenizerFactory(model.tokenizer).create([PROMPT], True)
    assert [detokenizer.push(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["\U0001f600"]


@given(ids=st.lists(st.integers(0, 6), max_size=12))
def test_metaspace(ids: list[int]) -> None:
    tokenizer = metaspace()
    assert tokenizer.decoding is not None
    assert stream(tokenizer, [2], ids) == tokenizer.decode([2, *ids])[1:]


@given(ids=st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_other_tokenizers_decode_in_a_window(ids: list[int]) -> None:
    tokenizer = wordpiece()
    assert isinstance(DetokenizerFactory(tokenizer).create([], True), WindowDetokenizer)
    whole = tokenizer.decode([4, *ids], skip_special_tokens=False)
    assert "able" + stream(tokenizer, [4], ids, skip=False) == whole


@pytest.mark.parametrize("tokenizer", [sentencepiece(True), metaspace(), wordpiece()])
def test_unknown_ids_have_no_text(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, [], [9999]) == ""
