"""--speculative-config: vLLM's keys, and refusals by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_llm.common.errors import OptionError
from serve_llm.common.options.sources import make_options, parse_args
from serve_llm.common.options.speculative import SpeculativeConfig


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (8, 16, 3)),
        ({"num_speculative_tokens": 16}, (16, 16, 3)),
        ({"prompt_lookup_max": 2}, (8, 2, 2)),
        ({"prompt_lookup_min": 20}, (8, 20, 20)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (8, 4, 2)),
        ({"num_speculative_tokens": None, "prompt_lookup_min": None}, (8, 16, 3)),
    ],
)
def test_defaults(given: dict[str, object], expected: tuple[int, int, int]) -> None:
    count, most, least = expected
    assert make_options("demo", speculative_config={"method": "ngram"} | given).speculation == SpeculativeConfig(
        method="ngram", num_speculative_tokens=count, prompt_lookup_max=most, prompt_lookup_min=least
    )


def test_a_draft_model() -> None:
    config = SpeculativeConfig(method="draft_model", model="org/draft", num_speculative_tokens=5)
    for given in (
        {"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 5},
        {"model": "org/draft", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1},
    ):
        assert make_options("demo", speculative_config=given).speculation == config
    for name in ("--speculative-config", "--speculative-model", "--speculative-draft-model-path", "-md"):
        options = parse_args(["demo", name, "org/draft"], {})
        assert options.speculation == SpeculativeConfig(method="draft_model", model="org/draft")


def test_a_head() -> None:
    config = make_options("demo", speculative_config={"method": "eagle3", "model": "org/head"}).speculation
    assert config == SpeculativeConfig(method="eagle3", model="org/head") and config.reads_hidden_states
    with pytest.raises(OptionError, match="method eagle3 needs 'model', the directory or Hugging Face id of the head"):
        make_options("demo", speculative_config="eagle3")


def test_a_limit_for_batches() -> None:
    for given in ({"method": "ngram"}, {"model": "d"}, {"method": "eagle3", "model": "d"}, {"method": "mtp"}):
        config = make_options("demo", speculative_config=given | {"disable_by_batch_size": 4}).speculation
        assert config is not None and config.disable_by_batch_size == 4


def test_a_method_alone() -> None:
    assert make_options("demo", speculative_config="ngram").speculation == SpeculativeConfig(method="ngram")


@pytest.mark.parametrize(
    "value",
    [
        "[ngram]",
        "ngram",
        '{"model": "[ngram]"}',
        '{"model": "ngram"}',
        '{"method": "ngram", "model": "ngram"}',
        '{"method": "[ngram]"}',
    ],
)
def test_prompt_lookup_has_several_names(value: str) -> None:
    for name in ("--speculative-config", "--speculative-model"):
        options = parse_args(["demo", name, value], {})
        assert options.speculation == SpeculativeConfig(method="ngram")


def test_an_mtp_layer_is_that_of_the_served_model() -> None:
    names = ("deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
    for given in ({"method": "mtp"}, *({"method": name, "model": "org/m"} for name in ("mtp", *names))):
        options = make_options("org/m", speculative_config=given)
        assert options.speculation == SpeculativeConfig(method="mtp", num_speculative_tokens=1)
    with pytest.raises(OptionError, match="MTP layer is in the checkpoint of org/m, not in org/other; omit 'model'"):
        make_options("org/m", speculative_config={"method": "mtp", "model": "org/other"})


def test_the_revision_of_a_model_on_the_hub() -> None:
    for method in ("draft_model", "eagle3"):
        given = {"method": method, "model": "org/draft", "revision": "v2"}
        config = make_options("demo", speculative_config=given).speculation
        assert config == SpeculativeConfig(method=method, model="org/draft", revision="v2")
        config = make_options("demo", speculative_config=given | {"revision": None}).speculation
        assert config == SpeculativeConfig(method=method, model="org/draft")


def test_no_value_means_no_drafts() -> None:
    assert make_options("demo").speculation is None
    assert make_options("demo", speculative_config=None).speculation is None


def test_none_means_no_drafts_either(tmp_path: Path) -> None:
    path = tmp_path / "o.yaml"
    path.write_text("speculative-config: none\n", encoding="utf-8")
    for options in (
        make_options("demo", speculative_config="none"),
        parse_args(["demo", "--speculative-config", "none"], {}),
        parse_args(["demo", "--config", str(path)], {}),
    ):
        assert options.speculation is None and options.speculative_config == "none"


def test_in_a_file_it_is_an_object(tmp_path: Path) -> None:
    path = tmp_path / "o.yaml"
    path.write_text("speculative-config:\n  method: ngram\n  num_speculative_tokens: 2\n", encoding="utf-8")
    config = parse_args(["demo", "--config", str(path)], {}).speculation
    assert config is not None and config.num_speculative_tokens == 2
    environment = {"SERVE_LLM_SPECULATIVE_CONFIG": '{"method": "ngram"}'}
    assert parse_args(["demo"], environment).speculation == SpeculativeConfig(method="ngram")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", ["needs 'model'"]),
        ("{", ["'{' is not valid JSON"]),
        ("[ngram", ["'[ngram' is not valid JSON"]),
        ('{"method": "ngram", "disable_by_batch_size": 0}', ["disable_by_batch_size must be a whole number from 1"]),
        ('{"model": "d", "disable_logprobs": true}', ["'disable_logprobs'", "the same with and without", "omit it"]),
        ('{"model": "d", "quantization": "fp8"}', ["'quantization'", "--quantization"]),
        ('{"method": "medusa", "model": "org/heads"}', ["method 'medusa' is not supported", "'eagle3'"]),
        ('{"model": "d", "revision": ""}', ["revision must be a branch, tag or commit, not ''"]),
        ('{"method": "mtp", "revision": "v2"}', ["'revision' is not supported"]),
        ("mimo_mtp", ["method 'mimo_mtp' is not supported", "DeepSeek-V3, GLM-4.5, Qwen3-Next and Qwen3.5"]),
        ("suffix", ["method 'suffix' is not supported", "'ngram'"]),
        ('{"method": "ngram", "num_speculative_tokens": 20}', ["num_speculative_tokens", "from 1 to 16, not 20"]),
        ("[]", ["a JSON object"]),
        ('{"num_speculative_tokens": 4}', ["method None", "'ngram'"]),
        ('{"method": "eagle", "num_speculative_tokens": 4}', ["method 'eagle' is not supported", "'eagle3'"]),
        ('{"method": "mtp", "model": 4}', ["model", "omit it"]),
        ('{"method": "mtp", "draft_tensor_parallel_size": 8}', ["draft_tensor_parallel_size must be 1: the MTP layer"]),
        ('{"method": "ngram", "model": "org/draft"}', ["'model' is not supported"]),
        ('{"method": "ngram", "draft_tensor_parallel_size": 1}', ["'draft_tensor_parallel_size' is not supported"]),
        ('{"method": "draft_model"}', ["needs 'model'"]),
        ('{"model": ["org/draft"]}', ["needs 'model'"]),
        ('{"model": "d", "prompt_lookup_min": 2}', ["'prompt_lookup_min' is not supported", "draft_model"]),
        ('{"model": "d", "draft_tensor_parallel_size": true}', ["draft_tensor_parallel_size must be a whole number"]),
        ('{"model": "d", "draft_tensor_parallel_size": 0}', ["draft_tensor_parallel_size must be a whole number"]),
        ('{"method": "ngram", "num_speculative_tokens": 0}', ["num_speculative_tokens", "from 1 to 16"]),
        ('{"method": "ngram", "num_speculative_tokens": true}', ["num_speculative_tokens"]),
        ('{"method": "ngram", "num_speculative_tokens": "4"}', ["num_speculative_tokens"]),
        ('{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}', ["prompt_lookup_min", "5", "4"]),
        ('{"method": "ngram", "prompt_lookup_max": 65}', ["prompt_lookup_max", "64"]),
    ],
)
def test_what_is_refused(value: str, words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        parse_args(["demo", "--speculative-config", value], {})
    message = str(caught.value)
    assert message.startswith("--speculative-config: ") and all(word in message for word in words), message
