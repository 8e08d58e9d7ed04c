"""Models that read images and text: only their text part, a decoder of another family, is served.

text_config holds the decoder's keys. The other parts (vision tower, projector) and their weights are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap

Read = Callable[[ConfigReader], tuple[ModelSpec, WeightMap]]

OTHER_PARTS = ("vision_tower", "vision_model", "multi_modal_projector")
# How names of the text part begin, in files as published and as transformers 5 holds them, and as its family has them.
PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head", "lm_head"),
)
# What describes images, and where they stand in a prompt.
IMAGE_KEYS = (
    *("vision_config", "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index"),
    *("mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
    *("vision_feature_layer", "vision_feature_select_strategy", "image_seq_length", "ignore_index"),
    "image_grid_pinpoints",
)


def read_text_part(architecture: str, read_by_type: Mapping[str, Read]) -> Read:
    """The reader of a model whose text_config is one of these, by its model_type."""

    def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        text = config.needed("text_config")
        text.inherit("quantization_config", config)
        read_text = read_by_type[
            text.choice("model_type", {name: name for name in read_by_type}, next(iter(read_by_type)))
        ]
        spec, weights = read_text(text)
        is_tied = config.flag("tie_word_embeddings", spec.tie_word_embeddings)
        config.ignore(*IMAGE_KEYS)
        config.done()
        ignored = tuple(rf"(model\.)?{part}\..*" for part in OTHER_PARTS)
        weights = replace(weights, prefixes=PREFIXES, ignored=(*weights.ignored, *ignored), other_parts=OTHER_PARTS)
        return replace(spec, architecture=architecture, tie_word_embeddings=is_tied), weights

    return read
