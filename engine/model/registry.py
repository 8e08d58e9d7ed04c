"""From config.json to a model spec and a weight map, by the architecture that the file names; then what was chosen for
it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from serve_llm.engine.config import Config as Settings
from serve_llm.engine.errors import ModelError, UnsupportedModel
from serve_llm.engine.model import quantization
from serve_llm.engine.model.config import Config
from serve_llm.engine.model.families import (
    cohere,
    deepseek,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_moe,
    llama,
    mistral,
    mixtral,
    nemotron,
    olmo2,
    opt,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
    stablelm,
    starcoder2,
)
from serve_llm.engine.model.quantization import Blocks, Stored
from serve_llm.engine.model.spec import Int8, ModelSpec, product_of
from serve_llm.engine.model.weight_map import WeightMap

FAMILIES: dict[str, Callable[[Config], tuple[ModelSpec, WeightMap]]] = {
    "LlamaForCausalLM": llama.read,
    "MistralForCausalLM": mistral.read,
    "MixtralForCausalLM": mixtral.read,
    "Qwen2ForCausalLM": qwen2.read,
    "Qwen2MoeForCausalLM": qwen2_moe.read,
    "Qwen3ForCausalLM": qwen3.read,
    "Qwen3MoeForCausalLM": qwen3_moe.read,
    "FalconForCausalLM": falcon.read,
    "GraniteForCausalLM": granite.read,
    "GraniteMoeForCausalLM": granite_moe.read,
    "GraniteMoeSharedForCausalLM": granite_moe.read_shared,
    "CohereForCausalLM": cohere.read,
    "Cohere2ForCausalLM": cohere.read_cohere2,
    "Gemma2ForCausalLM": gemma.read_gemma2,
    "Gemma3ForCausalLM": gemma.read_gemma3,
    "GlmForCausalLM": glm.read,
    "Glm4ForCausalLM": glm.read_glm4,
    "DeepseekV2ForCausalLM": deepseek.read_v2,
    "DeepseekV3ForCausalLM": deepseek.read_v3,
    "GPT2LMHeadModel": gpt2.read,
    "GPTJForCausalLM": gptj.read,
    "GPTNeoXForCausalLM": gpt_neox.read,
    "GptOssForCausalLM": gpt_oss.read,
    "NemotronForCausalLM": nemotron.read,
    "Olmo2ForCausalLM": olmo2.read,
    "OPTForCausalLM": opt.read,
    "Phi3ForCausalLM": phi3.read,
    "SmolLM3ForCausalLM": smollm3.read,
    "StableLmForCausalLM": stablelm.read,
    "Starcoder2ForCausalLM": starcoder2.read,
}

OTHERS = {  # not served, but a relative is
    "Gemma3ForConditionalGeneration": "it reads images; of Gemma 3 the text models (Gemma3ForCausalLM) are served",
}


def read_model(config: Mapping[str, object], allowed: Iterable[str] = ()) -> tuple[ModelSpec, WeightMap]:
    """What config.json describes. allowed: unknown keys that are passed over, as --allow-unknown-config names them.

    Raises UnsupportedModel for an architecture that is not in FAMILIES, ModelError for anything else in the file that
    cannot be served faithfully, OptionError for an allowed key that is not there; all are one line with the cause.
    """
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    if architecture not in FAMILIES:
        what = f"architecture {architecture}" if architecture else "a model whose config.json names no architecture"
        why = f": {OTHERS[architecture]}" if architecture in OTHERS else ""
        raise UnsupportedModel(
            f"{what} is not supported{why}; supported: {', '.join(sorted(FAMILIES))}; "
            "--model-impl transformers serves many others, slowly"
        )
    whole = Config(config, allowed=allowed)
    quantized = whole.inner("quantization_config")
    spec, weights = FAMILIES[architecture](whole)
    if quantized is None or any(row.scales for row in weights.rows):  # which the family has read
        return spec, weights
    stored = quantization.read(quantized)
    if isinstance(stored, Blocks):
        return spec, replace(weights, block=(stored.rows, stored.columns))
    return replace(spec, int8=_int8(stored, spec, weights)), weights


def served(spec: ModelSpec, settings: Settings) -> ModelSpec:
    """The model as the engine's settings have it: build the decoder and count from this one, on every rank."""
    if len(spec.long_lengths) > 1:
        raise ModelError("config.json: longrope in some layers only, or of several original lengths, is not served")
    spec = spec.with_max_length(settings.max_model_len)
    if settings.enable_expert_parallel:
        spec = spec.with_whole_experts()
    if settings.quantization == "fp8":
        return spec.with_fp8()
    return spec.with_int8() if settings.quantization == "int8" else spec


def _int8(stored: Stored, spec: ModelSpec, weights: WeightMap) -> Int8:
    """Modules' names turned into those of the model's products."""
    kept = set()
    for row in weights.expanded(len(spec.layers)).values():
        products = [product for product in map(product_of, row.parameters) if product is not None]
        if stored.ignores(row.source.removesuffix(".weight")):
            kept.update(products)
        elif row.parameters[0].endswith((".router.weight", ".shared_gate.weight")):
            raise ModelError(
                f'config.json: quantization_config: "ignore" must name {row.source.removesuffix(".weight")}: routers '
                "are served in floating point only"
            )
        elif products and (row.transform != "none" or row.members):
            raise ModelError(
                f"config.json: quantization_config: int8 checkpoints of a {spec.architecture} are not served"
            )
    head = weights.head.removesuffix(".weight")
    if not spec.tied_head and not stored.ignores(head):
        raise ModelError(
            f'config.json: quantization_config: "ignore" must name {head}: the head is served in floating point only'
        )
    return Int8(stored=True, kept=frozenset(kept))
