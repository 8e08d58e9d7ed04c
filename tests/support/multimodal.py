"""Random tiny checkpoints of models that read images and text, written by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from support.tiny import config_of

TEXT = {  # architecture -> its model_type, and that of its text part
    "Gemma3ForConditionalGeneration": ("gemma3", "gemma3_text"),
    "Llama4ForConditionalGeneration": ("llama4", "llama4_text"),
    "LlavaForConditionalGeneration": ("llava", "llama"),
    "Mistral3ForConditionalGeneration": ("mistral3", "mistral"),
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def multimodal_config_of(architecture: str) -> dict[str, Any]:
    """config.json, without a model."""
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
    kinds = {
        "gemma3": "siglip_vision_model",
        "llama4": "llama4_vision_model",
        "llava": "clip_vision_model",
        "mistral3": "pixtral",
    }
    vision = VISION | {"model_type": kinds[model_type]}
    config = AutoConfig.for_model(
        model_type, text_config=text, vision_config=vision, tie_word_embeddings=model_type == "gemma3"
    )
    config.architectures = [architecture]
    return config
