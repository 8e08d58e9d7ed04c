"""GGUF files become checkpoint directories; any fault in one is named in one error."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from serve_llm.common.errors import ModelError
from serve_llm.common.gguf.architectures import ARCHITECTURES
from serve_llm.common.gguf.config import build_config
from serve_llm.common.gguf.file import GGUFFile, StoredTensor, read_gguf
from serve_llm.common.gguf.tokenizer import Vocabulary, build_tokenizer, build_tokenizer_config, find_eos_ids
from serve_llm.common.hub import read_config, resolve_model
from serve_llm.server.prompt.tokenizer import load_tokenizer
from support.tiny import CHAT_TEMPLATE, TEXT, make_tokenizer

SETTINGS: dict[str, Any] = {
    "context_length": 256,
    "embedding_length": 64,
    "block_count": 1,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 5e5,
}
TEXTS = (
    "Hello, world! It's 12345 o'clock.",
    "  two  spaces\n\n\tand tabs ",
    "na\u00efve \u65e5\u672c\u8a9e \U0001f600",
    "",
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path: Path, architecture: str = "llama", **changes: Any) -> Path:
    """Write a file with only an embedding. changes: metadata of the architecture, with "__" for "."; None removes a
    key."""
    writer = gguf.GGUFWriter(path, architecture)
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in settings.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), dtype=np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 34 * 2), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_header_is_read(tmp_path: Path) -> None:
    file = read_gguf(write(tmp_path / "a.gguf"))
    assert file.metadata["general.architecture"] == "llama" and file.metadata["llama.embedding_length"] == 64
    tensor = file.tensors["blk.0.attn_q.weight"]
    assert (tensor.type.name, tensor.shape, tensor.num_bytes) == ("Q8_0", (64, 64), 64 * 68)
    assert tensor.start + tensor.num_bytes <= file.path.stat().st_size


def test_metadata_becomes_config_json(tmp_path: Path) -> None:
    config = build_config(read_gguf(write(tmp_path / "a.gguf")))
    assert config == {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "rope_theta": 500000.0,
        "max_position_embeddings": 256,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": 16,
        "quantization_config": {
            "quant_method": "gguf",
            "architecture": "llama",
            "tensors": {"blk.0.attn_q.weight": "Q8_0"},
        },
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "mamba"}, "general.architecture 'mamba' is not supported"),
        ({"clamp_kqv": 3.0}, r"unknown metadata keys, .*: llama\.clamp_kqv$"),
        ({"attention__head_count": None}, r"llama\.attention\.head_count must be a number above 0, but is None"),
        ({"attention__head_count": [4, 2]}, r"llama\.attention\.head_count must be a number .* \[4, 2\]"),
        ({"attention__value_length": 8}, r"llama\.attention\.value_length 8 differs from key_length 16"),
        ({"rope__dimension_count": 8}, r"llama\.rope\.dimension_count 8 differs from key_length 16"),
        ({"rope__scaling__type": "ntk"}, r"llama\.rope\.scaling\.type 'ntk' is not supported"),
    ],
)
def test_what_is_not_served_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(str(write(tmp_path / "a.gguf", **changes)))


def test_the_page_lists_what_is_served() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `general.architecture` |"))
    listed = re.sub(r"\([^)]*\)", "", row.split("|")[2])
    assert {name.strip() for name in listed.split(",")} == ARCHITECTURES.keys()


def test_settings_that_are_the_same_in_all_layers(tmp_path: Path) -> None:
    config = build_config(read_gguf(write(tmp_path / "a.gguf", attention__head_count_kv=[2, 2])))
    assert config["num_key_value_heads"] == 2


def header(*parts: bytes, version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(*dimensions: int, kind: int = 0, offset: int = 0, name: str = "t") -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


KEY = text("k") + struct.pack("<I", 4) + struct.pack("<I", 7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"GG", "ends amid the header"),
        (b"PK\3\4" + bytes(64), "does not begin with GGUF"),
        (header(version=1), "of version 1; versions 2 and 3"),
        (header(version=3 << 24), "of big-endian byte order"),
        (header(tensors=2**60), f"number of tensors: {2**60} do not fit"),
        (header(keys=2**60), f"number of metadata keys: {2**60} do not fit"),
        (header(KEY, KEY, keys=2), "metadata key k occurs twice"),
        (header(struct.pack("<Q", 2**62), bytes(12), keys=1), f"has a text of {2**62} bytes"),
        (header(text("k"), struct.pack("<IIQ", 9, 0, 2**60), keys=1), f"key k: number of entries: {2**60} do not fit"),
        (header(text("k"), struct.pack("<IIQ", 9, 9, 1), bytes(64), keys=1), "key k has values of type 9"),
        (header(text("k"), struct.pack("<I", 77), keys=1), "metadata key k has values of type 77"),
        (header(struct.pack("<Q", 1), b"\xff", bytes(12), keys=1), "is not UTF-8"),
        (header(KEY, keys=1)[:-1], "ends amid metadata key k"),
        (header(tensor(16), tensors=1), "tensor t ends at byte .* the file is cut short, or the offset 0 is wrong"),
        (header(tensor(16, offset=2**50), bytes(256), tensors=1), "tensor t ends at byte"),
        (header(tensor(16, offset=4), bytes(256), tensors=1), "tensor t has offset 4, which is not a multiple"),
        (header(tensor(16), tensor(16), bytes(256), tensors=2), "tensor t occurs twice"),
        (header(tensor(2**39, 2**39, 2**39), bytes(256), tensors=1), "tensor t ends at byte"),
        (header(tensor(2**63), bytes(256), tensors=1), r"tensor t has shape \[9223372036854775808\]"),
        (header(tensor(0), bytes(256), tensors=1), r"tensor t has shape \[0\]"),
        (header(tensor(1, 1, 1, 1, 1), bytes(256), tensors=1), "tensor t has 5 dimensions"),
        (header(tensor(16, kind=8), bytes(256), tensors=1), "tensor t has rows of 16 numbers, which are not whole"),
        (header(tensor(256, kind=35), bytes(256), tensors=1), "tensor t is of type TQ2_0, which is not supported"),
        (header(tensor(256, kind=99), bytes(256), tensors=1), "tensor t is of type number 99"),
        (
            header(text("general.alignment"), struct.pack("<II", 4, 3), keys=1),
            "general.alignment is 3, but must be a power of 2",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_gguf(path)


@settings(max_examples=200)
@given(place=st.integers(0, 2**20), change=st.integers(1, 255), length=st.integers(0, 2**20))
def test_any_damage_is_an_error_or_another_file(
    place: int, change: int, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A changed byte or a truncated file never causes anything but a ModelError."""
    folder = tmp_path_factory.getbasetemp() / "damaged"
    folder.mkdir(exist_ok=True)
    if not (folder / "whole.gguf").is_file():
        write(folder / "whole.gguf")
    content = bytearray((folder / "whole.gguf").read_bytes())
    header_end = 900
    content[place % header_end] ^= change
    damaged = folder / "damaged.gguf"
    for damage in (bytes(content), bytes(content[: length % len(content)])):
        damaged.write_bytes(damage)
        try:
            file = read_gguf(damaged)
            build_config(file)
        except ModelError as error:
            assert str(damaged) in str(error)
        else:
            assert all(one.start + one.num_bytes <= len(damage) for one in file.tensors.values())


def vocabulary(
    tokens: list[str], template: str | None = None, tool_template: str | None = None, **more: Any
) -> Vocabulary:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in more.items()} | {"tokenizer.ggml.tokens": tokens}
    templates = {"tokenizer.chat_template": template, "tokenizer.chat_template.tool_use": tool_template}
    templates = {key: value for key, value in templates.items() if value is not None}
    return Vocabulary(
        GGUFFile(Path("a.gguf"), {"general.architecture": "llama", **metadata, **templates}, dict[str, StoredTensor]())
    )


def byte_level(directory: Path, pre: str) -> tuple[Tokenizer, Tokenizer]:
    """Return a tokenizer, and the same one as read from a GGUF file."""
    make_tokenizer(directory, 400)
    content = json.loads((directory / "tokenizer.json").read_text())
    ids = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    types = [3 if token.startswith("<|") else 1 for token in tokens]
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    file = vocabulary(tokens, model="gpt2", pre=pre, merges=merges, token_type=types, eos_token_id=0)
    return Tokenizer.from_file(str(directory / "tokenizer.json")), Tokenizer.from_str(build_tokenizer(file))


def test_byte_level_vocabulary(tmp_path: Path) -> None:
    original, ours = byte_level(tmp_path, "gpt-2")
    for sample in (*TEXTS, TEXT, "<|im_start|>user\nHi<|im_end|>"):
        assert ours.encode(sample).ids == original.encode(sample).ids
        assert ours.decode(original.encode(sample).ids) == original.decode(original.encode(sample).ids)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", "It 's _12345 !/ N__ _x _camelCase"),
        ("llama-bpe", "It 's _ 123 45 !/N __ _x _camelCase"),
        ("qwen2", "It 's _ 1 2 3 4 5 !/N __ _x _camelCase"),
        ("tekken", "It 's _ 1 2 3 4 5 !/N __ _x _camel Case"),
        ("gpt-4o", "It's _ 123 45 !/N __ _x _camel Case"),
        ("smollm", "It 's _ 1 2 3 4 5 !/ N__ _x _camelCase"),
        ("falcon3", "It 's _ 123 45 !/N __ _x _camelCase"),
        ("seed-coder", "It 's _ 1 2 3 4 5 !/ N __ _x _camelCase"),
        ("deepseek-llm", "It ' s _ 12345 !/ N __ _x _camelCase"),
        ("deepseek-coder", "It ' s _ 1 2 3 4 5 !/ N __ _x _camelCase"),
        ("deepseek-v3", "It 's _ 123 45 !/N __ _x _camelCase"),
        ("falcon", "It ' s _ 123 45 !/ N__ _x _camelCase"),
        ("kimi-k2", "It's _ 123 45 !/N __ _x _camel Case"),
        ("bloom", "It's _12345 ! / N__ _x _camelCase"),
        ("default", "It ' s _ 123 45 !/ N__ _x _camelCase"),
    ],
)
def test_words_of_known_vocabularies(pre: str, words: str, tmp_path: Path) -> None:
    """Texts are split as by the tokenizers of these models; N is a line break. No text is lost."""
    _, ours = byte_level(tmp_path, pre)
    pieces = [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str("It's 12345!/\n   x camelCase")]
    assert pieces == words.replace("_", "\u0120").replace("N", "\u010a").split(" ")
    for sample in TEXTS:
        assert ours.decode(ours.encode(sample, add_special_tokens=False).ids) == sample


def sentencepiece() -> tuple[Tokenizer, list[str]]:
    """Train sentencepiece's BPE on a few lines. Returns it and its tokens in order."""
    original = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    original.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    original.pre_tokenizer = pre_tokenizers.Split("\u2581", behavior="merged_with_next")  # only while training
    original.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=special, show_progress=False)
    original.train_from_iterator([TEXT], trainer)
    content = json.loads(original.to_str())
    content["pre_tokenizer"] = None
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < 3]
    vocab = content["model"]["vocab"]
    return Tokenizer.from_str(json.dumps(content)), sorted(vocab, key=lambda token: vocab[token])


def test_sentencepiece_vocabulary() -> None:
    original, tokens = sentencepiece()
    scores = [0.0 if index < 259 else -float(index - 259) for index in range(len(tokens))]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    file = vocabulary(tokens, model="llama", scores=scores, token_type=types, **ids)
    ours = Tokenizer.from_str(build_tokenizer(file))
    for sample in (*TEXTS, TEXT, "the fox</s>"):
        expected = original.encode(sample).ids
        assert ours.encode(sample).ids == [1, *expected]  # with BOS unless add_bos_token is false
        assert ours.encode(sample, add_special_tokens=False).ids == expected
        assert ours.decode(expected) == original.decode(expected)


def word_pieces(*, is_cased: bool) -> tuple[Tokenizer, list[str]]:
    """Train BERT's WordPiece on a few lines. Returns it and its tokens in order."""
    original = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    original.normalizer = normalizers.BertNormalizer(lowercase=not is_cased)
    original.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    original.decoder = decoders.WordPiece()
    special = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    original.train_from_iterator([TEXT], trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
    vocab = original.get_vocab()
    frame = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}
    original.post_processor = processors.TemplateProcessing(
        **frame, special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")]
    )
    return original, sorted(vocab, key=lambda token: vocab[token])


@pytest.mark.parametrize("is_cased", [False, True])
def test_word_pieces(is_cased: bool) -> None:
    """The file marks pieces that begin a word, as the converter does."""
    original, tokens = word_pieces(is_cased=is_cased)
    kinds = [3 if token.startswith("[") and token != "[unused0]" else 1 for token in tokens]
    marked = [
        token if kind == 3 else token[2:] if token.startswith("##") else f"\u2581{token}"
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    ids = {} if is_cased else {"unknown_token_id": 2, "cls_token_id": 3, "seperator_token_id": 4}
    ours = Tokenizer.from_str(build_tokenizer(vocabulary(marked, model="bert", token_type=kinds, **ids)))
    assert ours.get_vocab() == original.get_vocab()
    for sample in (*TEXTS, TEXT, "unbelievable thoughts", "na\u00efve [MASK]"):
        assert ours.encode(sample).ids == original.encode(sample).ids
        assert ours.decode(ours.encode(sample).ids) == original.decode(original.encode(sample).ids)
    pair, expected = ours.encode("the fox", "the dog"), original.encode("the fox", "the dog")
    assert (pair.ids, pair.type_ids) == (expected.ids, expected.type_ids)


def test_names_of_special_tokens() -> None:
    tokens = ["a", "<s>", "</s>", "<|im_end|>", "<|eot_id|>"]
    kinds = [1, 3, 3, 3, 1]
    file = vocabulary(tokens, CHAT_TEMPLATE, model="gpt2", token_type=kinds, bos_token_id=1, eos_token_id=2)
    expected = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    assert build_tokenizer_config(file) == expected
    several = vocabulary(["a"], CHAT_TEMPLATE, model="gpt2", tool_template="{{ tools }}")
    listed = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": "{{ tools }}"}]
    assert build_tokenizer_config(several) == {"chat_template": listed}
    assert find_eos_ids(file) == [2, 3, 4]


def test_a_turn_of_gpt_oss_goes_on_after_a_message() -> None:
    tokens = ["<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"]
    assert find_eos_ids(vocabulary(tokens, model="gpt2", token_type=[3] * 4, eos_token_id=0)) == [0, 2, 3]
    assert find_eos_ids(vocabulary(tokens[1:], model="gpt2", token_type=[3] * 3)) == [0, 2]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model": "bert"}, r"tokenizer.ggml.tokens has no \[CLS\]; .* --tokenizer"),
        ({"model": "rwkv"}, "tokenizer.ggml.model 'rwkv' is not supported .* --tokenizer"),
        ({"model": "gpt2", "pre": "viking"}, "tokenizer.ggml.pre 'viking' is not supported .* --tokenizer"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["ab"]}, "tokenizer.ggml.merges must be pairs of texts, not 'ab'"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": [1]}, "tokenizer.ggml.merges must be a list of texts"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a c"]}, "tokenizer.ggml.merges cannot be read: .*`c` out of"),
        ({"model": "gpt2", "pre": "gpt-2", "token_type": [1]}, "token_type must be as long as the 2 tokens, not 1"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
        (
            {"model": "gpt2", "pre": "gpt-2", "eos_token_id": 7, "add_eos_token": True},
            "eos_token_id must be an id below 2",
        ),
    ],
)
def test_a_bad_vocabulary_is_named(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_tokenizer(vocabulary(["a", "b"], **more))


def test_a_vocabulary_that_is_not_supported_matters_only_without_another(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    directory = resolve_model(str(path))
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens must be a list of texts"):
        load_tokenizer(directory)


def test_a_file_is_translated_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    first = resolve_model(str(path))
    assert resolve_model(str(tmp_path)) == first == resolve_model(str(path))  # a directory with no other file
    write(path, context_length=512)
    second = resolve_model(str(path))
    assert second != first and read_config(second)["max_position_embeddings"] == 512
    write(tmp_path / "b.gguf")
    with pytest.raises(ModelError, match=r"one file \*\.gguf is needed in .*, found: a\.gguf, b\.gguf; name one"):
        resolve_model(str(tmp_path))
