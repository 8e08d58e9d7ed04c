"""Which draft models are served, and how others are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.hub import read_config
from serve_llm.common.options.schema import Options
from serve_llm.common.options.sources import make_options
from serve_llm.engine.config import Config
from serve_llm.engine.draft_model.resolve import check_tokenizers, find_draft_directory, resolve_draft_model
from support.grammars import demo
from support.published import LLAMA_1B
from support.resolved import resolve_all


def make_config(**given: object) -> tuple[Options, Config]:
    options = make_options(str(demo()), **given)
    return options, resolve_all(options, str(demo()), read_config(demo()))[0]


def test_its_settings_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B | {"max_position_embeddings": 512}))
    options, served = make_config(speculative_config=str(tmp_path), tensor_parallel_size=2, kv_cache_memory="1MiB")
    config = resolve_draft_model(options, served, tmp_path).config
    assert (config.tensor_parallel_size, config.kv_cache_memory, config.speculation) == (1, None, None)
    assert config.max_model_len == 512 < served.max_model_len
    assert config.vocab_size == LLAMA_1B["vocab_size"]


def test_it_runs_on_one_rank_or_on_all_of_a_stage(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B))
    for size, is_on_ranks in ((1, False), (4, True)):
        given = {"model": str(tmp_path), "draft_tensor_parallel_size": size}
        options, served = make_config(speculative_config=given, tensor_parallel_size=4)
        draft = resolve_draft_model(options, served, tmp_path)
        assert (draft.config.tensor_parallel_size, draft.is_on_ranks) == (size, is_on_ranks)
    with pytest.raises(OptionError, match=r"size must be 1 or --tensor-parallel-size, which is 4, not 2"):
        make_config(speculative_config=given | {"draft_tensor_parallel_size": 2}, tensor_parallel_size=4)


def test_where_ray_assigns_gpus_the_ranks_hold_it(tmp_path: Path) -> None:
    """The engine's process has no GPU there."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B))
    for tensor, size in ((1, 1), (2, 2), (2, 1)):
        given = {"model": str(tmp_path), "draft_tensor_parallel_size": size}
        options, served = make_config(speculative_config=given, tensor_parallel_size=tensor)
        served = replace(served, executor_backend="ray", device="cuda")
        if tensor == size:
            assert resolve_draft_model(options, served, tmp_path).is_on_ranks
            continue
        with pytest.raises(OptionError, match="Ray assigns no GPU; set draft_tensor_parallel_size to 2, so that"):
            resolve_draft_model(options, served, tmp_path)
    head = {"method": "eagle3", "model": str(tmp_path)}
    options, served = make_config(speculative_config=head, tensor_parallel_size=2)
    with pytest.raises(OptionError, match="a head or MTP layer runs in the engine's process, to which Ray assigns no"):
        resolve_draft_model(options, replace(served, executor_backend="ray", device="cuda"), tmp_path)


def test_the_revision_is_what_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B))
    (tmp_path / "model.safetensors").touch()
    asked = []

    def download(name: str, **arguments: object) -> str:
        asked.append((name, arguments["revision"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for revision in (None, "v2"):
        given = {"model": "org/draft", "revision": revision}
        assert find_draft_directory(make_options("demo", speculative_config=given)) == tmp_path
    assert dict.fromkeys(asked) == {("org/draft", None): None, ("org/draft", "v2"): None}


def test_a_model_that_generates_no_text(tmp_path: Path) -> None:
    raw = {"architectures": ["BertModel"], "model_type": "bert"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    options, served = make_config(speculative_config="some/draft")
    with pytest.raises(ModelError, match=r"^--speculative-config: the draft model some/draft: "):
        resolve_draft_model(options, served, tmp_path)


def test_options_that_do_not_fit_it(tmp_path: Path) -> None:
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B | {"quantization_config": quantised}))
    options, served = make_config(speculative_config="d", quantization="int4")
    with pytest.raises(OptionError, match=r"^--speculative-config: the draft model d: --quantization: the checkpoint"):
        resolve_draft_model(options, served, tmp_path)


def test_the_tokenizers_must_agree(tmp_path: Path) -> None:
    options, _ = make_config(speculative_config="some/draft")
    text = (demo() / "tokenizer.json").read_text(encoding="utf-8")
    for name, changed in (("same", text), ("longer", text), ("other", text)):
        (tmp_path / name).mkdir()
        raw = json.loads(changed)
        vocabulary = raw["model"]["vocab"]
        if name == "longer":
            vocabulary["a token of its own"] = 1 + max(vocabulary.values())
        if name == "other":
            first, second = list(vocabulary)[300:302]
            vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    check_tokenizers(options, demo(), demo())
    check_tokenizers(options, demo(), tmp_path / "same")
    check_tokenizers(options, demo(), tmp_path / "longer")
    with pytest.raises(ModelError, match=r"some/draft has another tokenizer: 2 ids are different tokens; 30\d is '"):
        check_tokenizers(options, demo(), tmp_path / "other")
    (tmp_path / "none").mkdir()
    with pytest.raises(ModelError, match="has no tokenizer"):
        check_tokenizers(options, demo(), tmp_path / "none")
