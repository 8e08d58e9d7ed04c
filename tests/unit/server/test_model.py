"""What the server reads from a checkpoint: tokenizer, named tokens, end ids, defaults; and the conversion of old
ones."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, processors

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.hub import resolve_model
from serve_llm.common.options.sources import make_options
from serve_llm.server.dialects.table import BUILT_IN
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.tokenizer import load_tokenizer
from serve_llm.server.prompt.validate import prepare
from serve_llm.server.sampling_params import SamplingParams
from support.chat_templates import TEMPLATES
from support.fakes import make_model_info

DEMO = resolve_model("demo")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(DEMO / name, tmp_path)
    return tmp_path


def change(path: Path, **values: object) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | values))


def load(directory: Path, **options: object) -> ServedModel:
    return ServedModel.load(directory, make_options(str(directory), **options))


def test_end_ids_come_from_the_best_source(checkpoint: Path) -> None:
    change(checkpoint / "config.json", eos_token_id=7)
    assert load(checkpoint).eos_ids == (7,)
    change(checkpoint / "generation_config.json", eos_token_id=[3, 4])
    assert load(checkpoint).eos_ids == (3, 4)
    change(checkpoint / "generation_config.json", eos_token_id=None)
    change(checkpoint / "config.json", eos_token_id=None)
    assert load(checkpoint).eos_ids == (load(checkpoint).tokenizer.eos_id,)
    change(checkpoint / "config.json", text_config={"eos_token_id": [8, 9]})
    assert load(checkpoint).eos_ids == (8, 9)
    change(checkpoint / "config.json", eos_token_id=-1, text_config=None)
    assert load(checkpoint).eos_ids == (load(checkpoint).tokenizer.eos_id,)
    change(checkpoint / "generation_config.json", eos_token_id=[-1, 5])
    assert load(checkpoint).eos_ids == (5,)
    change(checkpoint / "generation_config.json", eos_token_id=[])
    change(checkpoint / "tokenizer_config.json", eos_token=None)
    assert load(checkpoint).eos_ids == ()


def test_suppressed_ids_are_banned_in_every_request(checkpoint: Path) -> None:
    change(checkpoint / "generation_config.json", suppress_tokens=[3, 4, 99999])
    model = load(checkpoint)
    (sampling,) = prepare([[5]], SamplingParams(), model, make_model_info(vocab_size=4096)).samplings
    assert sampling.bad_words_ids == ((3,), (4,))
    assert load(checkpoint, generation_config="none").suppressed_ids == ()
    change(checkpoint / "generation_config.json", suppress_tokens=[-1, 5])
    assert load(checkpoint).suppressed_ids == (5,)
    change(checkpoint / "generation_config.json", suppress_tokens="all")
    with pytest.raises(ModelError, match="suppress_tokens must be a list of token ids, not 'all'"):
        load(checkpoint)


def test_sampling_defaults_are_the_models_unless_turned_off(checkpoint: Path) -> None:
    change(checkpoint / "generation_config.json", temperature=0.6, top_k=20.0, top_p=None, max_length=99)
    found = load(checkpoint).defaults
    assert found == {"temperature": 0.6, "top_k": 20} and isinstance(found["top_k"], int)
    assert load(checkpoint, generation_config="none").defaults == {}
    change(checkpoint / "generation_config.json", temperature="hot")
    assert load(checkpoint, generation_config="none").defaults == {}
    with pytest.raises(ModelError, match="temperature"):
        load(checkpoint)


def test_the_operator_overrides_sampling_defaults(checkpoint: Path) -> None:
    change(checkpoint / "generation_config.json", temperature=0.6, top_k=20)
    overrides = {"override_generation_config": {"temperature": 0, "min_p": 0.1}}
    assert load(checkpoint, **overrides).defaults == {"temperature": 0, "top_k": 20, "min_p": 0.1}
    assert load(checkpoint, generation_config="none", **overrides).defaults == {"temperature": 0, "min_p": 0.1}
    with pytest.raises(OptionError, match=r"^--override-generation-config: temperature must be .* not 9$"):
        load(checkpoint, override_generation_config={"temperature": 9})


def test_defaults_that_no_request_may_have_are_ignored_with_a_warning(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(checkpoint / "generation_config.json", temperature=3.0, top_k=20.5, top_p=0, min_p=0.1)
    model = load(checkpoint)
    assert model.defaults == {"top_p": 0, "min_p": 0.1}
    assert not caplog.records  # workers load the model too
    model.log_findings()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    path = checkpoint / "generation_config.json"
    assert warnings == [
        f"{path}: temperature must be at least 0 and at most 2, not 3.0; it is ignored",
        f"{path}: top_k must be an integer, not 20.5; it is ignored",
    ]


def test_the_dialect_is_found_by_the_chat_template_and_opens_reasoning(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(checkpoint).dialect is None
    (checkpoint / "chat_template.jinja").write_text(TEMPLATES["qwen3"].write())
    model = load(checkpoint)
    assert model.dialect is not None and model.dialect.name == "qwen3"
    with caplog.at_level("INFO"):
        model.log_findings()
    assert "check passed" in caplog.text
    prompt = "[user] <think>\n<|im_start|>assistant\n"
    assert not model.opens_reasoning(prompt)
    assert model.opens_reasoning(prompt + "<think>\n")
    assert load(checkpoint, dialect="none").dialect is None
    assert load(checkpoint, dialect="llama3").dialect == BUILT_IN["llama3"]


def test_names(checkpoint: Path) -> None:
    assert load(checkpoint).names == (str(checkpoint),)
    assert load(checkpoint, served_model_name=("a", "b")).names == ("a", "b")


def test_a_tokenizer_may_come_from_elsewhere(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    bare = tmp_path_factory.mktemp("bare")
    (bare / "config.json").write_text("{}")
    model = load(bare, tokenizer=str(checkpoint))
    assert model.template is not None and model.tokenizer.encode("x", add_special_tokens=False)


def test_named_tokens_may_be_objects(checkpoint: Path) -> None:
    change(checkpoint / "tokenizer_config.json", bos_token={"content": "<b>", "lstrip": False}, pad_token=None)
    named = load(checkpoint).tokenizer.named_tokens
    assert named["bos_token"] == "<b>" and "pad_token" not in named


def test_truncation_and_padding_of_the_file_are_ignored_and_its_post_processor_is_not(checkpoint: Path) -> None:
    rust = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    rust.enable_truncation(3)
    rust.enable_padding(length=8)
    rust.post_processor = processors.TemplateProcessing("<|end|> $A", None, [("<|end|>", 1)])
    rust.save(str(checkpoint / "tokenizer.json"))
    tokenizer = load_tokenizer(checkpoint)
    plain = tokenizer.encode("one two three four five", add_special_tokens=False)
    assert len(plain) > 3 and tokenizer.decode(plain) == "one two three four five"
    assert tokenizer.encode("one two three four five", add_special_tokens=True) == [1, *plain]


def test_a_broken_or_missing_tokenizer_is_one_clear_line(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(checkpoint)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(empty)


@pytest.mark.slow
def test_vocabulary_and_merges_are_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like GPT-2's files: no tokenizer.json, only vocab.json and merges.txt."""
    source, cache = tmp_path / "model", tmp_path / "cache"
    source.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    letters = ["a", "b", "c", "\u0120", "ab", "\u0120ab", "<|endoftext|>"]
    (source / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(letters)}))
    (source / "merges.txt").write_text("#version: 0.2\na b\n\u0120 ab\n")
    (source / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = load_tokenizer(source)
    assert tokenizer.encode("ab abc", add_special_tokens=False) == [4, 5, 2]
    assert tokenizer.decode([4, 5, 2]) == "ab abc"
    (target,) = (cache / "serve-llm" / "tokenizers").iterdir()
    made = (target / "tokenizer.json").stat().st_mtime_ns
    load_tokenizer(source)
    assert (target / "tokenizer.json").stat().st_mtime_ns == made


def test_a_tekken_file_is_converted_and_begins_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Mistral Small 3.2 and Devstral."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "model"
    source.mkdir()
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    tokens = [*(bytes([byte]) for byte in range(256)), b"he", b"ll", b"hell", b"hello"]
    sizes = {"num_vocab_tokens": len(tokens), "default_vocab_size": len(specials) + len(tokens)}
    stored = {
        "config": {"pattern": r"\p{L}+| ?[^\s\p{L}]+|\s+", "default_num_special_tokens": 5, "version": "v3"} | sizes,
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(specials)
        ],
    }
    (source / "tekken.json").write_text(json.dumps(stored))
    (source / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    tokenizer = load_tokenizer(source)
    hello = len(specials) + tokens.index(b"hello")
    assert tokenizer.encode("hello", add_special_tokens=True) == [1, hello]
    assert tokenizer.encode("[INST]hello", add_special_tokens=False) == [3, hello]
    assert tokenizer.named_tokens["eos_token"] == "</s>"
    assert tokenizer.decode([1, hello, 5 + 0xC3, 5 + 0xA9]) == "hello\u00e9"


@pytest.mark.slow
def test_a_failed_conversion_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "vocab.json").write_text("{")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ModelError, match="cannot be converted"):
        load_tokenizer(tmp_path)
    assert list((tmp_path / "cache" / "serve-llm" / "tokenizers").iterdir()) == []


def test_a_conversion_runs_no_code_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, ran = tmp_path / "model", tmp_path / "ran"
    source.mkdir()
    (source / "vocab.json").write_text("{}")
    (source / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Evil: pass\n")
    auto = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    (source / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Evil", "auto_map": auto}))
    with pytest.raises(ModelError, match="cannot be converted"):
        load_tokenizer(source)
    assert not ran.exists()


HOSTILE = [
    None,
    True,
    -1,
    10**4000,
    float("nan"),
    "",
    "../../etc/passwd",
    [],
    [[]],
    [{}],
    {},
    {"type": "x"},
    {"content": 5},
]
RAW = [b"", b"\xff\xfe", b"null", b"{", b"[" * 100_000, b'{"eos_token_id":' + b"9" * 5000 + b"}"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("key", ["chat_template", "eos_token", "eos_token_id", "vocab_size", "temperature", "top_k"])
def test_any_value_loads_or_is_the_models_error(checkpoint: Path, name: str, key: str) -> None:
    small_tokenizer(checkpoint)
    for value in HOSTILE:
        change(checkpoint / name, **{key: value})
        with contextlib.suppress(ModelError):
            load(checkpoint)


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json"],
)
def test_any_bytes_load_or_are_the_models_error(checkpoint: Path, name: str) -> None:
    small_tokenizer(checkpoint)
    for content in RAW:
        (checkpoint / name).write_bytes(content)
        with contextlib.suppress(ModelError):
            load(checkpoint)


@pytest.mark.parametrize(
    "section", ["decoder", "model", "normalizer", "pre_tokenizer", "post_processor", "added_tokens"]
)
def test_any_tokenizer_loads_or_is_the_models_error(checkpoint: Path, section: str) -> None:
    small_tokenizer(checkpoint)
    kept = json.loads((checkpoint / "tokenizer.json").read_text())
    for value in [*HOSTILE, {"type": "Fuse"}, {"type": "Sequence", "decoders": []}]:
        (checkpoint / "tokenizer.json").write_text(json.dumps(kept | {section: value}))
        with contextlib.suppress(ModelError):
            load(checkpoint)


def small_tokenizer(directory: Path) -> None:
    """Return a tokenizer that loads quickly, for repeated loading."""
    Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).save(str(directory / "tokenizer.json"))


def test_a_panic_of_the_library_is_the_models_error(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):  # like pyo3's
        pass

    def panic(path: str) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr("serve_llm.server.prompt.tokenizer.RustTokenizer.from_file", panic)
    with pytest.raises(ModelError, match="index out of bounds"):
        load(checkpoint)
