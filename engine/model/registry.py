"""From config.json to a model spec and a weight map, by the architecture that the file names. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from serve_llm.engine.errors import UnsupportedModel
from serve_llm.engine.model.config import Config
from serve_llm.engine.model.families import gpt2, llama, mistral, opt, qwen2, qwen3
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap

FAMILIES: dict[str, Callable[[Config], tuple[ModelSpec, WeightMap]]] = {
    "LlamaForCausalLM": llama.read,
    "MistralForCausalLM": mistral.read,
    "Qwen2ForCausalLM": qwen2.read,
    "Qwen3ForCausalLM": qwen3.read,
    "GPT2LMHeadModel": gpt2.read,
    "OPTForCausalLM": opt.read,
}


def read_model(config: Mapping[str, object]) -> tuple[ModelSpec, WeightMap]:
    """What config.json describes.

    Raises UnsupportedModel for an architecture that is not in FAMILIES, ModelError for anything else in the file that
    cannot be served faithfully; both are one line that names the cause.
    """
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    if architecture not in FAMILIES:
        what = f"architecture {architecture}" if architecture else "a model whose config.json names no architecture"
        raise UnsupportedModel(f"{what} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[architecture](Config(config))
