"""Which checkpoints have an MTP layer that is served, and how others are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_llm.cli.plan.draft_model import count_draft_bytes, read_draft_model
from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.hub import read_config
from serve_llm.common.options.sources import make_options
from serve_llm.engine.draft_model.resolve import DraftModelConfig, count_cache_bytes, resolve_draft_model
from serve_llm.engine.model.mtp_spec import read_mtp
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.worker.memory import count_held_bytes
from support.drafts import find_draft_model
from support.engine import make_engine
from support.mtp import NUM_LAYERS, make_mtp_checkpoint
from support.resolved import resolve_all
from support.tiny import config_of, make_checkpoint

MTP: dict[str, object] = {"speculative_config": {"method": "mtp"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served")
    make_mtp_checkpoint(directory, "deepseek_v3")
    return directory


def resolve_mtp(directory: Path, **given: object) -> DraftModelConfig:
    options = make_options(str(directory), **(MTP | given))
    return resolve_draft_model(options, resolve_all(options, str(directory), read_config(directory))[0], directory)


def test_it_is_the_layer_behind_the_last_one(served: Path) -> None:
    draft = resolve_mtp(served)
    assert draft.mtp is not None and draft.mtp.layer == NUM_LAYERS and len(draft.spec.layers) == 1
    assert draft.spec.layers[0] == draft.mtp.model.layers[NUM_LAYERS - 1]
    assert (draft.config.directory, draft.config.max_model_len) == (str(served), 256)


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("llama", {}, "MTP layers of LlamaForCausalLM are not supported; those of DeepseekV3ForCausalLM, Glm4Moe"),
        ("deepseek_v3", {}, "num_nextn_predict_layers is 0: the checkpoint has no MTP layer"),
        ("glm4_moe", {"num_nextn_predict_layers": None}, "num_nextn_predict_layers is None: the checkpoint has no"),
    ],
)
def test_models_without_one(family: str, changed: dict[str, object], message: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"^--speculative-config: .*{message}"):
        resolve_mtp(tmp_path)


def test_that_of_a_model_with_linear_attention() -> None:
    raw = config_of("qwen3_next")
    mtp = read_mtp(raw)
    assert (mtp.layer, mtp.draft.has_states, mtp.model.has_states) == (3, False, True)
    assert mtp.model.layers[3] == mtp.model.layers[1] and mtp.model.layers[:3] == read_model(raw)[0].layers
    sources = mtp.weights.expand(4)
    assert sources["mtp.layers.0.self_attn.q_proj.weight"].parameters[0] == "layers.3.attention.q.weight"
    assert sources["mtp.fc.weight"].parameters == ("mtp.projection.weight",)
    assert not [name for name in sources if name.startswith("model.layers.3.")]


def test_that_of_a_multimodal_model() -> None:
    text = config_of("qwen3_5_moe_text")
    nested = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text}
    assert read_mtp(nested).draft.layers == read_mtp(text).draft.layers
    stack = next(rule for rule in read_mtp(nested).weights.stacks if rule.source.startswith("mtp."))
    assert stack.source == "mtp.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers is 0: the checkpoint has no MTP layer"),
        ({"mtp_use_dedicated_embeddings": True}, "an MTP layer with an embedding of its own is not supported"),
    ],
)
def test_models_with_linear_attention_without_one(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_mtp({**config_of("qwen3_5_text"), **changed})


@pytest.mark.parametrize(
    ("given", "message"),
    [({"model_impl": "transformers"}, "transformers' own code does not give out hidden states; omit --model-impl")],
)
def test_options_that_do_not_fit(given: dict[str, object], message: str, served: Path) -> None:
    with pytest.raises(OptionError, match=message):
        resolve_mtp(served, **given)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="weights are packed in another layout here"
)
@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_memory_is_what_plan_says(family: str, quantization: str, served: Path, tmp_path: Path) -> None:
    if family == "qwen3_next":
        served = tmp_path
        make_mtp_checkpoint(served, family)
    given: dict[str, object] = {**MTP, "quantization": quantization, "dtype": "bfloat16"}
    options = make_options(str(served), **given)
    raw = read_config(served)
    config = resolve_all(options, str(served), raw)[0]
    planned = count_draft_bytes(read_draft_model(options, config, raw), 0)
    planned -= count_cache_bytes(resolve_mtp(served, **given), 0)
    held = count_held_bytes(find_draft_model(make_engine(served, **given))._head)
    assert held == pytest.approx(planned, rel=0.01)


def test_the_first_of_several_layers() -> None:
    raw = config_of("glm4_moe", num_hidden_layers=3, num_nextn_predict_layers=2)
    mtp = read_mtp(raw)
    assert mtp.layer == 3
    assert r"model\.layers\.4\..*" in mtp.weights.ignored


def test_a_tensor_that_is_missing(served: Path, tmp_path: Path) -> None:
    stored = load_file(served / "model.safetensors")
    del stored[f"model.layers.{NUM_LAYERS}.eh_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((served / "config.json").read_text())
    make_engine(tmp_path)
    with pytest.raises(ModelError, match=rf"lacks model\.layers\.{NUM_LAYERS}\.eh_proj\.weight"):
        make_engine(tmp_path, **MTP)


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_copies_may_be_missing(name: str, served: Path, tmp_path: Path) -> None:
    stored = load_file(served / "model.safetensors")
    del stored[f"model.layers.{NUM_LAYERS}.{name}.weight"]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((served / "config.json").read_text())
    make_engine(tmp_path, **MTP)
