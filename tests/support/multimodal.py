"""Random tiny checkpoints of models for images and text, written by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from support.tiny import config_of

TEXT = {  # architecture -> its model_type, and the family of its text part
    "Gemma3ForConditionalGeneration": ("gemma3", "gemma3_text"),
    "Idefics3ForConditionalGeneration": ("idefics3", "llama"),
    "InternVLForConditionalGeneration": ("internvl", "qwen2"),
    "Llama4ForConditionalGeneration": ("llama4", "llama4_text"),
    "LlavaForConditionalGeneration": ("llava", "llama"),
    "LlavaNextForConditionalGeneration": ("llava_next", "mistral"),
    "LlavaOnevisionForConditionalGeneration": ("llava_onevision", "qwen2"),
    "Mistral3ForConditionalGeneration": ("mistral3", "mistral"),
    "Qwen2VLForConditionalGeneration": ("qwen2_vl", "qwen2"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "qwen2"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "qwen3"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", "qwen3_moe"),
    "SmolVLMForConditionalGeneration": ("smolvlm", "llama"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "qwen3_5_moe_text"),
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 14,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}


def multimodal_config_of(architecture: str) -> dict[str, Any]:
    """Return config.json, without a model."""
    return dict(json.loads(_config(architecture).to_json_string()))


def make_multimodal_checkpoint(directory: Path, architecture: str) -> None:
    """Write config.json and safetensors of a random float32 model to `directory` (created)."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(_config(architecture))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            middle = 1.0 if "norm" in name and "gemma3" not in model.config.model_type else 0.0
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + middle)
    model.save_pretrained(directory)


def _config(architecture: str) -> PreTrainedConfig:
    model_type, text_type = TEXT[architecture]
    text = {key: value for key, value in config_of(text_type).items() if key != "architectures"}
    if "moe_intermediate_size" in text:
        text["moe_intermediate_size"] = 40  # torch's grouped product, which transformers uses, needs 16-byte rows
    kinds = {
        "gemma3": "siglip_vision_model",
        "idefics3": "idefics3_vision",
        "internvl": "internvl_vision",
        "llama4": "llama4_vision_model",
        "llava": "clip_vision_model",
        "llava_next": "clip_vision_model",
        "llava_onevision": "siglip_vision_model",
        "mistral3": "pixtral",
        "smolvlm": "smolvlm_vision",
    }
    if model_type.startswith("qwen3_5"):
        vision = QWEN_VISION | {"out_hidden_size": text["hidden_size"], "model_type": f"{model_type}_vision"}
    elif model_type.startswith("qwen"):
        text["model_type"] = f"{model_type}_text"
        if "qwen2" in model_type:
            del text["head_dim"]  # not read
        sections = [2, 2, 1] if "qwen2" in model_type else [3, 2, 2]
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_section": sections}
        vision = QWEN_VISION | {"out_hidden_size": text["hidden_size"], "model_type": f"{model_type}_vision"}
        if model_type == "qwen2_vl":
            vision = QWEN_VISION | {"hidden_size": text["hidden_size"], "embed_dim": 16, "mlp_ratio": 2}
    else:
        vision = VISION | {"model_type": kinds[model_type]}
    is_tied = model_type in ("gemma3", "qwen3_vl")
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision, tie_word_embeddings=is_tied)
    config.architectures = [architecture]
    return config
