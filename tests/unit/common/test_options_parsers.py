"""Parsers of counts and sizes with units, and of words."""

from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_llm.common.errors import OptionError
from serve_llm.common.options.parsers import (
    parse_bytes,
    parse_count,
    parse_lora_modules,
    parse_positive_floats,
    parse_positive_ints,
    parse_quantization,
    parse_responses_store,
)
from serve_llm.common.options.schema import Options
from serve_llm.common.options.sources import make_options, parse_args


@pytest.mark.parametrize(
    ("text", "number"),
    [(7, 7), ("7", 7), (" 7 ", 7), ("32k", 32_000), ("32K", 32_768), ("1.5k", 1_500), ("2m", 2_000_000), ("1M", 2**20)],
)
def test_count(text: object, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1.5K", "1e3", "0x10", "32 kb", "1_000", True, None, [1]])
def test_bad_count(text: object) -> None:
    with pytest.raises(ValueError, match="expected a whole number"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (5, 5),
        ("5", 5),
        ("5B", 5),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("8g", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("512MiB", 2**29),
        ("1T", 2**40),
        ("0.1k", 102),
    ],
)
def test_bytes(text: object, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 Gi", "8XB", "1e9", False, None])
def test_bad_bytes(text: object) -> None:
    with pytest.raises(ValueError, match="expected bytes"):
        parse_bytes(text)


@pytest.mark.parametrize("value", ["", "3,,1", "0,1", "-1", "a,b", "nan", "inf", [], [True], None])
def test_bad_lists_of_numbers(value: object) -> None:
    with pytest.raises(ValueError, match="expected numbers above 0"):
        parse_positive_floats(value)
    with pytest.raises(ValueError, match="expected whole numbers"):
        parse_positive_ints(value)


@pytest.mark.parametrize("value", ["1.5", "2,1.0", [0.5]])
def test_counts_are_whole(value: object) -> None:
    assert parse_positive_floats(value)
    with pytest.raises(ValueError, match="expected whole numbers"):
        parse_positive_ints(value)


@given(st.integers(0, 10**12), st.integers(0, 999))
def test_decimals_are_exact(whole: int, thousandths: int) -> None:
    text = f"{whole}.{thousandths:03}"
    assert parse_count(f"{text}k") == whole * 1000 + thousandths
    assert parse_bytes(f"{text}GiB") == int(Decimal(text) * 2**30)


def test_quantization() -> None:
    assert [parse_quantization(name) for name in ("INT8", "awq_marlin", "torchao")] == ["int8", "awq", "torchao"]
    for name in ("exl3", "nvfp4", "awq-4"):
        with pytest.raises(ValueError, match=r"expected one of auto, int8, .*; a checkpoint .* needs no option"):
            parse_quantization(name)


@pytest.mark.parametrize(
    "value",
    [
        "a=/x,b=org/b",
        ["a=/x", "b=org/b"],
        ["a=/x", '{"name": "b", "path": "org/b"}'],
        [{"name": "a", "path": "/x"}, {"name": "b", "path": "org/b"}],
    ],
)
def test_lora_modules(value: object) -> None:
    assert parse_lora_modules(value) == ("a=/x", "b=org/b")
    assert parse_lora_modules('{"name": "a", "path": "/x, y"}') == ("a=/x, y",)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ('{"name": "a", "path": "/x", "base_model_name": "m"}', "'base_model_name' is not supported"),
        ('{"name": "a"}', "expected {"),
        ('{"name": "a=b", "path": "/x"}', "expected {"),
        ('{"name"', "Expecting"),
        ([["a", "b"]], "expected"),
        ("a", "expected NAME=DIRECTORY"),
        (["a=/x", "a=/y"], "expected each name once"),
    ],
)
def test_bad_lora_modules(value: object, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_lora_modules(value)


@pytest.mark.parametrize(
    ("value", "store"),
    [
        ("off", "off"),
        ("OFF", "off"),
        ("none", "off"),
        ("None", "off"),
        (False, "off"),
        ("memory", "memory"),
        ("Memory", "memory"),
        ("./none", "./none"),
        ("Store.sqlite", "Store.sqlite"),
    ],
)
def test_responses_store(value: object, store: str) -> None:
    assert parse_responses_store(value) == store


@pytest.mark.parametrize("value", [True, "on", "", None, 7])
def test_bad_responses_store(value: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_responses_store(value)


def test_adapters_in_host_memory_are_no_fewer_than_those_in_slots() -> None:
    with pytest.raises(OptionError, match=r"^--max-cpu-loras: 3 is less than --max-loras 4$"):
        make_options("demo", enable_lora=True, max_cpu_loras=3)
    for name, flag in (
        ("max_loras", "max-loras"),
        ("max_cpu_loras", "max-cpu-loras"),
        ("max_lora_rank", "max-lora-rank"),
    ):
        with pytest.raises(OptionError, match=f"^--{flag} needs --enable-lora$"):
            make_options("demo", **{name: 8})


def test_words_of_other_engines_for_values() -> None:
    def parse(*argv: str) -> Options:
        return parse_args(["demo", *argv], {})

    for flag, words, meant in (
        ("--load-format", ("safetensors", "hf", "GGUF", "bitsandbytes"), parse()),
        ("--model-impl", ("vllm", "sglang"), parse()),
        ("--generation-config", ("vllm",), parse("--generation-config", "none")),
        ("--distributed-executor-backend", ("uni",), parse("--distributed-executor-backend", "inprocess")),
        ("--allowed-origins", ('["*"]',), parse("--allowed-origins", "*")),
    ):
        for word in words:
            assert parse(flag, word) == meant, (flag, word)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("default_chat_template_kwargs", "thinking", "expected a JSON object, such as"),
        ("default_chat_template_kwargs", {"messages": []}, "'messages' is set by requests"),
        ("default_chat_template_kwargs", '{"tools": []}', "'tools' is set by requests"),
        ("default_chat_template_kwargs", {"a": [date(2026, 1, 1)]}, "expected values that JSON has, such as dates in"),
        ("override_generation_config", '{"max_new_tokens": 8}', "'max_new_tokens' is not supported, only temperature"),
        ("override_generation_config", {"temperature": "hot"}, "'temperature' must be a number"),
        ("override_generation_config", {"top_k": True}, "'top_k' must be a number"),
    ],
)
def test_defaults_of_requests(name: str, value: object, words: str) -> None:
    with pytest.raises(OptionError, match=f"^{name}: {words}"):
        make_options("demo", **{name: value})


@pytest.mark.parametrize("depth", [65, 3000, 100_000])
@pytest.mark.parametrize(
    "name",
    [
        "default_chat_template_kwargs",
        "override_generation_config",
        "speculative_config",
        "eplb_config",
        "kv_events_config",
        "lora_modules",
    ],
)
def test_deep_objects_are_refused(name: str, depth: int) -> None:
    with pytest.raises(OptionError, match=f"^{name}: expected at most 64 levels of objects and lists, not ") as error:
        make_options("demo", **{name: '{"a":' * depth + "1" + "}" * depth})
    assert len(str(error.value)) < 1200


def test_deep_values_of_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"^allowed_origins: expected at most 64 levels"):
        make_options("demo", allowed_origins="[" * 3000 + "]" * 3000)
    endless: dict[str, object] = {}
    endless["a"] = endless
    with pytest.raises(OptionError, match=r"^default_chat_template_kwargs: expected at most 64 levels"):
        make_options("demo", default_chat_template_kwargs=endless)
    file = tmp_path / "deep.yaml"
    file.write_text("default-chat-template-kwargs: " + "{a: " * 3000 + "1" + "}" * 3000)
    with pytest.raises(OptionError, match=f"^--config {file}: expected at most 64 levels"):
        parse_args(["demo", "--config", str(file)], {})
