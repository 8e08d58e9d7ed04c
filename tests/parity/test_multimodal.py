"""The text part of models that read images: the same log-probabilities as the whole model in transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from serve_llm.cli.plan.hardware import HardwareOptions
from serve_llm.cli.plan.planner import make_plan
from serve_llm.common.errors import ModelError
from serve_llm.common.hub import read_config
from serve_llm.common.options.sources import make_options
from serve_llm.engine import startup
from serve_llm.engine.model.registry import read_model
from support.engine import generate, greedy, make_engine
from support.forward import Harness, load
from support.multimodal import TEXT, make_multimodal_checkpoint, multimodal_config_of
from support.packed import Packing
from support.packed import quantization_config as packed_config
from support.quantised import quantization_config
from support.tiny import config_of

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5]


def as_published(directory: Path) -> None:
    """Name the tensors as the publishers do, or else as transformers 5 holds them in memory."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    inside = any(name.startswith("model.language_model.") for name in tensors)
    pairs = [("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")]
    pairs += [(f"model.{part}.", f"{part}.") for part in ("vision_tower", "multi_modal_projector")]
    renamed = {}
    for name, tensor in tensors.items():
        for held, published in pairs if inside else [(second, first) for first, second in pairs]:
            if name.startswith(held):
                name = published + name.removeprefix(held)
                break
        renamed[name] = tensor
    assert renamed.keys() != tensors.keys()
    save_file(renamed, path)


@pytest.mark.parametrize("architecture", TEXT)
def test_the_text_part(architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_multimodal_checkpoint(tmp_path, architecture)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    for rename in (False, True):
        if rename:
            as_published(tmp_path)
        spec, decoder = load(tmp_path)
        (ours,) = Harness(spec, decoder, torch.float32).logprobs([PROMPT])
        assert (ours - theirs).abs().max() < 3e-4
    caplog.set_level(logging.INFO)
    requests = [greedy(1, PROMPT, 5)]
    one = generate(make_engine(tmp_path, dtype="float32"), requests)[1].token_ids
    assert one[0] == int(theirs[-1].argmax())
    assert f"Serving the text part of {architecture}: the weights of vision_tower" in caplog.text
    assert generate(make_engine(tmp_path, dtype="float32", tensor=2, pipeline=2), requests)[1].token_ids == one


def test_the_plan_counts_the_text_part_only() -> None:
    whole, text = multimodal_config_of("Mistral3ForConditionalGeneration"), config_of("mistral")
    plans = [
        make_plan(make_options("m", device="cpu", dtype="bfloat16"), HardwareOptions(memory=1 << 30), raw).chosen
        for raw in (whole, text)
    ]
    assert plans[0].ranks == plans[1].ranks


def test_the_dtype_may_be_that_of_the_text_part(tmp_path: Path) -> None:
    raw = multimodal_config_of("Gemma3ForConditionalGeneration")
    raw.pop("dtype", None)
    raw["text_config"]["dtype"] = "bfloat16"
    spec, _ = startup.read_spec(make_options("m"), str(tmp_path), raw)
    config, _ = startup.resolve_config(make_options("m", device="cpu"), str(tmp_path), raw, spec)
    assert config.dtype == "bfloat16"


def test_published_gemma3_leaves_out_defaults() -> None:
    """As google/gemma-3-4b-it does."""
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    spec, _ = read_model(raw)
    attention = spec.layers[0].attention
    assert (spec.vocab_size, attention.num_heads, attention.num_kv_heads, attention.head_dim) == (262208, 8, 4, 256)
    assert spec.tie_word_embeddings and spec.max_position == 131072 and len(spec.layers) == 34


def test_quantised_checkpoints_name_modules_as_they_are_published() -> None:
    ignore = ["re:.*vision_tower.*", "language_model.lm_head", "language_model.model.layers.1.mlp.down_proj"]
    raw = multimodal_config_of("Mistral3ForConditionalGeneration")
    raw["quantization_config"] = quantization_config(ignore)
    spec, _ = read_model(raw)
    assert spec.int8 is not None and spec.int8.excluded == {"layers.1.ffn.down"}


@pytest.mark.parametrize("prefix", ["language_model.model", "model.language_model"])
def test_rules_for_modules_hold_in_any_spelling(prefix: str) -> None:
    raw = multimodal_config_of("Mistral3ForConditionalGeneration")
    left_out = f"{prefix}.layers.1.mlp.down_proj"
    for packing, rules in (
        (Packing("compressed", is_symmetric=True), {"ignore": [left_out]}),
        (Packing("gptq"), {"dynamic": {f"-:{left_out}": {}}}),
        (Packing("awq"), {"modules_to_not_convert": [left_out]}),
    ):
        spec, weights = read_model(raw | {"quantization_config": packed_config(packing) | rules})
        assert spec.grouped is not None
        assert spec.grouped.others == {"layers.1.ffn.down": None}, packing
        spellings = weights.list_spellings("model.layers.1.mlp.down_proj")
        assert weights.quantized is not None and weights.quantized.find_form(*spellings) is None


def test_what_cannot_be_served_is_named(tmp_path: Path) -> None:
    raw = multimodal_config_of("Mistral3ForConditionalGeneration")
    text = raw["text_config"]
    for change, message in {
        "text_config": (None, "text_config is missing"),
        "audio_config": ({}, "unknown keys, which may mean another computation: audio_config"),
    }.items():
        with pytest.raises(ModelError, match=message[1]):
            read_model(raw | {change: message[0]})
    with pytest.raises(ModelError, match="text_config: model_type 'ministral3' is not supported"):
        read_model(raw | {"text_config": text | {"model_type": "ministral3"}})
    with pytest.raises(ModelError, match=r"text_config: unknown keys.*: leaf; .*-config text_config\.leaf"):
        read_model(raw | {"text_config": text | {"leaf": 1}})
    make_multimodal_checkpoint(tmp_path, "Mistral3ForConditionalGeneration")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"audio_tower.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(read_config(tmp_path)))
    with pytest.raises(ModelError, match=r"no parameter of a Mistral3ForConditionalGeneration uses audio_tower.weight"):
        load(tmp_path)
