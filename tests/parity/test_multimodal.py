"""The text part of multimodal models: the same logprobs as the whole model in transformers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from serve_llm.cli.plan.hardware import HardwareOptions
from serve_llm.cli.plan.planner import make_plan
from serve_llm.common.errors import ModelError
from serve_llm.common.hub import read_config
from serve_llm.common.options.sources import make_options
from serve_llm.engine import startup
from serve_llm.engine.model.families.multimodal import DEFAULT_SIZES, SIZE_KEYS
from serve_llm.engine.model.registry import read_model
from support.engine import generate, greedy, make_engine
from support.forward import Harness, load
from support.matrix import mostly_slow
from support.multimodal import TEXT, make_multimodal_checkpoint, multimodal_config_of
from support.packed import Packing
from support.packed import quantization_config as packed_config
from support.quantised import quantization_config
from support.tiny import config_of

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5]

FAST = (
    "Gemma3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)


def as_published(directory: Path, architecture: str) -> None:
    """Name the tensors as publishers do, or else as transformers 5 holds them in memory."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    parts = ("vision_tower", "multi_modal_projector", "visual", "vision_model", "connector", "image_newline")
    held = [(f"model.{part}", part) for part in parts]
    if architecture.startswith("Qwen"):
        held.append(("model.language_model.", "model."))
    else:
        held += [("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")]
    is_held = any(name.startswith(("model.language_model.", "model.text_model.")) for name in tensors)
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in held if is_held else [(second, first) for first, second in held]:
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        renamed[name] = tensor
    assert renamed.keys() != tensors.keys()
    save_file(renamed, path)


@pytest.mark.parametrize("architecture", mostly_slow(TEXT, FAST))
def test_the_text_part(architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_multimodal_checkpoint(tmp_path, architecture)
    experts = {"experts_implementation": "eager"} if "Moe" in architecture else {}
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, **experts).eval()
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    for rename in (False, True):
        if rename:
            as_published(tmp_path, architecture)
        spec, decoder = load(tmp_path)
        (ours,) = Harness(spec, decoder, torch.float32).logprobs([PROMPT])
        assert (ours - theirs).abs().max() < 3e-4
    caplog.set_level(logging.INFO)
    requests = [greedy(1, PROMPT, 5)]
    one = generate(make_engine(tmp_path, dtype="float32"), requests)[1].token_ids
    assert one[0] == int(theirs[-1].argmax())
    assert f"Serving the text part of {architecture}: the weights of vis" in caplog.text
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


def test_stacks_as_qwen_publishes_them(tmp_path: Path) -> None:
    """Qwen stores stacks as (experts, inputs, outputs); transformers puts outputs first."""
    make_multimodal_checkpoint(tmp_path, "Qwen3VLMoeForConditionalGeneration")
    expected = Harness(*load(tmp_path), torch.float32).logprobs([PROMPT])[0]
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    stacks = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".mlp.experts." in name}
    assert stacks and all(tensor.dim() == 3 for tensor in stacks.values())
    save_file(tensors | stacks, path)
    assert torch.equal(Harness(*load(tmp_path), torch.float32).logprobs([PROMPT])[0], expected)
    numbers, scales = {}, {}
    for name, tensor in stacks.items():
        scale = torch.rand(len(tensor), -(-tensor.shape[1] // 24), -(-tensor.shape[2] // 40)) * 0.001 + 0.01
        whole = scale.repeat_interleave(24, 1).repeat_interleave(40, 2)[:, : tensor.shape[1], : tensor.shape[2]]
        numbers[name], scales[f"{name}_scale_inv"] = (tensor / whole).to(torch.float8_e4m3fn), scale
        stacks[name] = numbers[name].float() * whole
    save_file(tensors | stacks, path)
    expected = Harness(*load(tmp_path), torch.float32).logprobs([PROMPT])[0]
    save_file(tensors | numbers | scales, path)
    stored = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]}
    (tmp_path / "config.json").write_text(json.dumps(read_config(tmp_path) | {"quantization_config": stored}))
    assert (Harness(*load(tmp_path), torch.float32).logprobs([PROMPT])[0] - expected).abs().max() < 1e-4


def test_quantised_experts_of_qwen3_vl_are_modules() -> None:
    raw = multimodal_config_of("Qwen3VLMoeForConditionalGeneration")
    for stored, name in (
        (packed_config(Packing("awq")), "model.layers.0.mlp.experts.4.gate_proj.weight"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "model.layers.0.mlp.experts.gate_up_proj"),
    ):
        spec, weights = read_model(raw | {"quantization_config": stored})
        assert name in weights.expand(len(spec.layers))
        assert spec.grouped is not None and spec.grouped.find_form("layers.0.ffn.experts.4.gate") is not None


@pytest.mark.parametrize("keeps_text_config", [False, True])
def test_qwens_decoder_may_be_described_beside_the_images(keeps_text_config: bool) -> None:
    """Text settings may be at the top level of config.json, as Qwen published it and as transformers 4.52 to 4.56 wrote
    it."""
    raw = multimodal_config_of("Qwen2_5_VLForConditionalGeneration")
    expected, _ = read_model(raw)
    text = raw["text_config"]
    scaling = {"type": "mrope", "mrope_section": [2, 2, 1]}
    base = text["rope_parameters"]["rope_theta"]
    flat = {key: value for key, value in text.items() if key not in ("rope_parameters", "model_type")}
    flat |= {"rope_scaling": scaling, "rope_theta": base, "vision_token_id": 7} | raw
    if not keeps_text_config:
        del flat["text_config"]
    assert read_model(flat)[0] == expected
    with pytest.raises(ModelError, match="unknown keys, which may mean another computation: leaf"):
        read_model(flat | {"leaf": 1})


def test_published_smolvlm() -> None:
    """The config is that of HuggingFaceTB/SmolVLM-256M-Instruct."""
    raw = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "image_token_id": 49190,
        "model_type": "idefics3",
        "scale_factor": 4,
        "text_config": {
            "_flash_attn_2_enabled": True,
            "architectures": ["VLlama3ForCausalLM"],
            "head_dim": 64,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "model_type": "llama",
            "neftune_noise_alpha": 0.0,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "perceiver_config": {"model_type": "vllama3", "qk_layer_norms_perceiver": False},
            "pixel_shuffle_factor": 4,
            "qk_layer_norms": False,
            "rope_interleaved": False,
            "rope_theta": 100000,
            "tie_word_embeddings": False,
            "use_resampler": False,
            "vocab_size": 49280,
        },
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "idefics3"},
    }
    spec, _ = read_model(raw)
    assert len(spec.layers) == 30 and spec.max_position == 8192 and not spec.tie_word_embeddings
    raw["text_config"] = {**raw["text_config"], "qk_layer_norms": True}  # type: ignore[dict-item]
    with pytest.raises(ModelError, match="qk_layer_norms is not supported"):
        read_model(raw)


def test_published_gemma3_leaves_out_defaults() -> None:
    """The config is that of google/gemma-3-4b-it."""
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


def test_published_llava_leaves_out_sizes() -> None:
    """The config is that of llava-hf/llava-1.5-7b-hf; the second text_config, that of mistral-community/pixtral-12b."""
    text: dict[str, object] = {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    }
    raw = {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": 32000,
        "model_type": "llava",
        "pad_token_id": 32001,
        "projector_hidden_act": "gelu",
        "text_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vision_config": {"hidden_size": 1024, "model_type": "clip_vision_model"},
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 32064,
    }
    spec, _ = read_model(raw)
    assert (spec.vocab_size, spec.hidden_size, len(spec.layers), spec.max_position) == (32064, 4096, 32, 4096)
    attention = spec.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 32, 128)
    pixtral = {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "is_composition": True,
        "max_position_embeddings": 1024000,
        "model_type": "mistral",
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    }
    spec, _ = read_model(raw | {"text_config": pixtral, "image_seq_length": 1})
    assert (spec.hidden_size, spec.layers[0].attention.num_heads, len(spec.layers)) == (5120, 32, 40)


@pytest.mark.parametrize("kind", DEFAULT_SIZES)
def test_default_sizes_are_those_of_transformers(kind: str) -> None:
    config = AutoConfig.for_model(kind)
    assert tuple(getattr(config, key, None) for key in SIZE_KEYS) == DEFAULT_SIZES[kind]


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
    with pytest.raises(ModelError, match="text_config: model_type 'mistral9' is not supported"):
        read_model(raw | {"text_config": text | {"model_type": "mistral9"}})
    with pytest.raises(ModelError, match=r"text_config: unknown keys.*: leaf; .*-config text_config\.leaf"):
        read_model(raw | {"text_config": text | {"leaf": 1}})
    make_multimodal_checkpoint(tmp_path, "Mistral3ForConditionalGeneration")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"audio_tower.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(read_config(tmp_path)))
    with pytest.raises(ModelError, match=r"no parameter of a Mistral3ForConditionalGeneration uses audio_tower.weight"):
        load(tmp_path)
