"""Settings in sentence-transformers' files, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve_llm.common.errors import ModelError
from serve_llm.common.sentence_transformers import SentenceModules, read_sentence_modules

Json = dict[str, Any]


def write(directory: Path, pooling: Json, **files: Json) -> SentenceModules:
    """Write the files. files: contents by name without extension."""
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **pooling}))
    (directory / "modules.json").write_text(json.dumps(modules))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    found = read_sentence_modules(directory)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("pooling", "types"),
    [
        ({"pooling_mode": "mean"}, ("mean",)),
        ({"pooling_mode": "lasttoken"}, ("last",)),
        ({"pooling_mode": ["weightedmean", "cls"]}, ("weighted_mean", "cls")),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ("max", "mean")),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, ("mean_sqrt_len",)),
        ({"pooling_mode_cls_token": False}, ("mean",)),
        ({"pooling_mode": "mean", "include_prompt": False}, ("mean",)),
    ],
)
def test_pooling(tmp_path: Path, pooling: Json, types: tuple[str, ...]) -> None:
    assert write(tmp_path, pooling).pooling_types == types


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_the_settings_of_the_transformer(tmp_path: Path, family: str) -> None:
    settings = {"max_seq_length": 77, "do_lower_case": True}
    found = write(tmp_path, {"pooling_mode": "cls"}, **{f"sentence_{family}_config": settings})
    assert found.max_seq_length == 77 and found.lowercase


def test_the_default_prompt(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "document": ""}
    for name, prompt in ((None, ""), ("query", "query: "), ("document", "")):
        directory = tmp_path / str(name)
        directory.mkdir()
        config = {"prompts": prompts, "default_prompt_name": name}
        assert write(directory, {"pooling_mode": "cls"}, config_sentence_transformers=config).prompt == prompt


@pytest.mark.parametrize(
    ("pooling", "config", "named"),
    [
        ({"pooling_mode": "median"}, {}, "pooling_mode 'median'"),
        ({"pooling_mode": ["cls", 3]}, {}, "pooling_mode 3"),
        ({"pooling_mode": "cls"}, {"default_prompt_name": "query"}, "default_prompt_name is 'query'"),
        ({"pooling_mode": "cls"}, {"default_prompt_name": 3, "prompts": {"3": "x"}}, "default_prompt_name is 3"),
        (
            {"pooling_mode": "mean", "include_prompt": False},
            {"default_prompt_name": "query", "prompts": {"query": "query: "}},
            "include_prompt",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, pooling: Json, config: Json, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        write(tmp_path, pooling, config_sentence_transformers=config)
