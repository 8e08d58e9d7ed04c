"""Models that read images and text: only their text part, a decoder of another family, is served.

text_config holds the decoder's keys. The other parts (vision tower, projector) and their weights are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap

Read = Callable[[ConfigReader], tuple[ModelSpec, WeightMap]]

VISION_TOWER = ("vision_tower", "vision_model", "multi_modal_projector", "image_newline")
VISUAL = ("visual",)  # Qwen's name
CONNECTED = ("vision_model", "connector")  # those of Idefics and SmolVLM
# How names of the text part begin: in published files, in transformers 5, and in the decoder's family.
PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.lm_head", "lm_head"),
)
# Keys that describe images and their positions in a prompt.
IMAGE_KEYS = (
    *("vision_config", "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index"),
    *("mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
    *("vision_feature_layer", "vision_feature_select_strategy", "image_seq_length", "ignore_index"),
    *("image_grid_pinpoints", "video_token_id", "video_token_index", "vision_start_token_id", "vision_end_token_id"),
    *("vision_token_id", "vision_aspect_ratio", "use_image_newline_parameter", "downsample_ratio"),
)
# Publishers omit from text_config what equals the default of its class in transformers.
SIZE_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
DEFAULT_SIZES = {
    "gemma3_text": (262208, 2304, 9216, 26, 8),
    "llama": (32000, 4096, 11008, 32, 32),
    "llama4_text": (202048, 5120, 8192, 48, 40),
    "ministral3": (131072, 4096, 14336, 34, 32),
    "mistral": (32000, 4096, 14336, 32, 32),
    "qwen2": (151936, 4096, 22016, 32, 32),
    "qwen2_5_vl_text": (152064, 8192, 29568, 80, 64),
    "qwen2_vl_text": (152064, 8192, 29568, 80, 64),
    "qwen3": (151936, 4096, 22016, 32, 32),
    "qwen3_5_moe_text": (248320, 2048, None, 40, 16),  # no layer is dense
    "qwen3_5_text": (248320, 4096, 12288, 32, 16),
    "qwen3_vl_moe_text": (151936, 2048, 5632, 24, 16),
    "qwen3_vl_text": (151936, 4096, 22016, 32, 32),
}
CONNECTOR_KEYS = ("scale_factor", "_pad_token_id")  # next to text_config in Idefics 3 and SmolVLM
OLD_CONNECTOR_KEYS = ("perceiver_config", "pixel_shuffle_factor")  # inside text_config; nothing reads them


def read_text_part(
    architecture: str, read_by_type: Mapping[str, Read], parts: tuple[str, ...] = VISION_TOWER, *more_keys: str
) -> Read:
    """Return the reader of a model whose text_config is one of these, by model_type. parts: modules that are not
    served. more_keys: further keys about images."""

    def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        text = config.require("text_config")
        text.inherit("quantization_config", config)
        config.ignore("vocab_size", *more_keys)  # text_config's counts
        return _read_parts(config, text, architecture, read_by_type, parts)

    return read


def read_flat_text_part(architecture: str, kind: str, read_text: Read) -> Read:
    """Like `read_text_part`, for Qwen, where the decoder's keys may be next to vision_config or in both places. kind:
    the model_type."""

    def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        text = config.inner("text_config")
        if text is None:
            return _read_parts(config, config, architecture, {kind: read_text}, VISUAL)
        text.inherit("quantization_config", config)
        config.ignore("rope_scaling", "rope_theta", *(key for key in text.keys if key != "tie_word_embeddings"))
        return _read_parts(config, text, architecture, {f"{kind}_text": read_text}, VISUAL)

    return read


def _read_parts(
    config: ConfigReader,
    text: ConfigReader,
    architecture: str,
    read_by_type: Mapping[str, Read],
    parts: tuple[str, ...],
) -> tuple[ModelSpec, WeightMap]:
    types = {name: name for name in read_by_type}
    kind = text.choice("model_type", types, next(iter(types)))
    if kind in DEFAULT_SIZES:  # otherwise, the decoder's keys are those of the whole file
        sizes = zip(SIZE_KEYS, DEFAULT_SIZES[kind], strict=True)
        text.set_defaults(**{key: size for key, size in sizes if size is not None})
    config.ignore(*IMAGE_KEYS)
    text.ignore(*IMAGE_KEYS, *OLD_CONNECTOR_KEYS, "is_composition")
    text.refuse("qk_layer_norms", "use_resampler")
    spec, weights = read_by_type[kind](text)
    is_tied = config.flag("tie_word_embeddings", False) or spec.tie_word_embeddings
    config.done()
    ignored = tuple(rf"(model\.)?{part}(\..*)?" for part in parts)
    weights = replace(weights, prefixes=PREFIXES, ignored=(*weights.ignored, *ignored), other_parts=parts)
    return replace(spec, architecture=architecture, tie_word_embeddings=is_tied), weights
