"""From config.json to a `ModelSpec` and a `WeightMap`, by architecture. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from serve_llm.common.errors import ModelError, OptionError, UnsupportedModel
from serve_llm.engine.config import INT4_GROUP_SIZES
from serve_llm.engine.config import Config as Settings
from serve_llm.engine.model import quantization_config
from serve_llm.engine.model.activation_scales import add_activation_scales
from serve_llm.engine.model.cache_scales import add_cache_scales, is_calibrated
from serve_llm.engine.model.compressed_tensors_config import Int8Checkpoint
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families import (
    bert,
    bidirectional,
    bloom,
    cohere,
    deepseek,
    falcon,
    gemma,
    gemma1,
    glm,
    glm_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_moe,
    gte,
    jina,
    jina_reranker,
    llama,
    llama4,
    mistral,
    mixtral,
    modernbert,
    mpt,
    multimodal,
    nemotron,
    nomic_bert,
    olmo2,
    opt,
    phi3,
    pooled,
    qwen,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    qwen_vl,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from serve_llm.engine.model.gguf_config import GGUFTensors, apply_gguf
from serve_llm.engine.model.pooling import build_pooler_spec
from serve_llm.engine.model.quantization_spec import (
    MXFP4,
    GroupQuantForm,
    GroupQuantSpec,
    Int8Spec,
    find_linear_layer,
    find_merged_layer,
)
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import ModelSpec, MoESpec
from serve_llm.engine.model.weight_format import ATTENTION_SCALES, DynamicModules, QuantizedModules
from serve_llm.engine.model.weight_map import WeightMap, WeightRule
from serve_llm.engine.parallel.layout import ParallelLayout

Read = Callable[[ConfigReader], tuple[ModelSpec, WeightMap]]

# Linear modules in checkpoints that are not linear layers, or are never computed in int8.
UNQUANTISED = (".router.weight", ".shared_gate.weight", ".beta.weight", ".alpha.weight", ".kv_up.weight")

FAMILIES: dict[str, Read] = {
    "LlamaForCausalLM": llama.read,
    "Llama4ForCausalLM": llama4.read,
    "MistralForCausalLM": mistral.read,
    "Ministral3ForCausalLM": mistral.read_ministral3,
    "MixtralForCausalLM": mixtral.read,
    "QWenLMHeadModel": qwen.read,
    "Qwen2ForCausalLM": qwen2.read,
    "Qwen2MoeForCausalLM": qwen2_moe.read,
    "Qwen3ForCausalLM": qwen3.read,
    "Qwen3MoeForCausalLM": qwen3_moe.read,
    "Qwen3NextForCausalLM": qwen3_next.read,
    "Qwen3_5ForCausalLM": qwen3_5.read,
    "Qwen3_5MoeForCausalLM": qwen3_5.read_moe,
    "BloomForCausalLM": bloom.read,
    "FalconForCausalLM": falcon.read,
    "MptForCausalLM": mpt.read,
    "MPTForCausalLM": mpt.read,  # MosaicML's spelling
    "GraniteForCausalLM": granite.read,
    "GraniteMoeForCausalLM": granite_moe.read,
    "GraniteMoeSharedForCausalLM": granite_moe.read_shared,
    "CohereForCausalLM": cohere.read,
    "Cohere2ForCausalLM": cohere.read_cohere2,
    "GemmaForCausalLM": gemma1.read,
    "Gemma2ForCausalLM": gemma.read_gemma2,
    "Gemma3ForCausalLM": gemma.read_gemma3,
    "GlmForCausalLM": glm.read,
    "Glm4ForCausalLM": glm.read_glm4,
    "Glm4MoeForCausalLM": glm_moe.read,
    "DeepseekV2ForCausalLM": deepseek.read_v2,
    "DeepseekV3ForCausalLM": deepseek.read_v3,
    "GPT2LMHeadModel": gpt2.read,
    "GPTJForCausalLM": gptj.read,
    "GPTNeoXForCausalLM": gpt_neox.read,
    "GptOssForCausalLM": gpt_oss.read,
    "NemotronForCausalLM": nemotron.read,
    "Gemma3ForConditionalGeneration": multimodal.read_text_part(
        "Gemma3ForConditionalGeneration", {"gemma3_text": gemma.read_gemma3}
    ),
    "Llama4ForConditionalGeneration": multimodal.read_text_part(
        "Llama4ForConditionalGeneration", {"llama4_text": llama4.read}
    ),
    **{
        name: multimodal.read_text_part(
            name, {"llama": llama.read, "mistral": mistral.read, "qwen2": qwen2.read, "qwen3": qwen3.read}
        )
        for name in (
            "InternVLForConditionalGeneration",
            "LlavaForConditionalGeneration",
            "LlavaNextForConditionalGeneration",
            "LlavaOnevisionForConditionalGeneration",
        )
    },
    "Mistral3ForConditionalGeneration": multimodal.read_text_part(
        "Mistral3ForConditionalGeneration", {"mistral": mistral.read, "ministral3": mistral.read_ministral3}
    ),
    **{
        name: multimodal.read_text_part(name, {"llama": llama.read}, multimodal.CONNECTED, *multimodal.CONNECTOR_KEYS)
        for name in ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
    },
    "Qwen2VLForConditionalGeneration": multimodal.read_flat_text_part(
        "Qwen2VLForConditionalGeneration", "qwen2_vl", qwen_vl.read_qwen2_vl
    ),
    "Qwen2_5_VLForConditionalGeneration": multimodal.read_flat_text_part(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", qwen_vl.read_qwen2_vl
    ),
    "Qwen3VLForConditionalGeneration": multimodal.read_text_part(
        "Qwen3VLForConditionalGeneration", {"qwen3_vl_text": qwen_vl.read_qwen3_vl}, multimodal.VISUAL
    ),
    "Qwen3VLMoeForConditionalGeneration": multimodal.read_text_part(
        "Qwen3VLMoeForConditionalGeneration", {"qwen3_vl_moe_text": qwen_vl.read_qwen3_vl_moe}, multimodal.VISUAL
    ),
    "Qwen3_5ForConditionalGeneration": multimodal.read_text_part(
        "Qwen3_5ForConditionalGeneration", {"qwen3_5_text": qwen3_5.read}, multimodal.VISUAL
    ),
    "Qwen3_5MoeForConditionalGeneration": multimodal.read_text_part(
        "Qwen3_5MoeForConditionalGeneration", {"qwen3_5_moe_text": qwen3_5.read_moe}, multimodal.VISUAL
    ),
    "Olmo2ForCausalLM": olmo2.read,
    "Olmo3ForCausalLM": olmo2.read_olmo3,
    "OPTForCausalLM": opt.read,
    "Phi3ForCausalLM": phi3.read,
    "SeedOssForCausalLM": seed_oss.read,
    "SmolLM3ForCausalLM": smollm3.read,
    "StableLmForCausalLM": stablelm.read,
    "Starcoder2ForCausalLM": starcoder2.read,
    "BertModel": bert.read_bert("BertModel"),
    "BertForMaskedLM": bert.read_bert("BertForMaskedLM"),
    "BertForSequenceClassification": bert.read_bert("BertForSequenceClassification"),
    "BertForTokenClassification": bert.read_bert("BertForTokenClassification"),
    "RobertaModel": bert.read_roberta("RobertaModel"),
    "RobertaForMaskedLM": bert.read_roberta("RobertaForMaskedLM"),
    "RobertaForSequenceClassification": bert.read_roberta("RobertaForSequenceClassification"),
    "RobertaForTokenClassification": bert.read_roberta("RobertaForTokenClassification"),
    "XLMRobertaModel": bert.read_roberta("XLMRobertaModel"),
    "XLMRobertaForMaskedLM": bert.read_roberta("XLMRobertaForMaskedLM"),
    "XLMRobertaForSequenceClassification": jina_reranker.read_xlm_roberta_classifier(
        "XLMRobertaForSequenceClassification"
    ),
    "XLMRobertaForTokenClassification": bert.read_roberta("XLMRobertaForTokenClassification"),
    "ModernBertModel": modernbert.read_modernbert("ModernBertModel"),
    "ModernBertForMaskedLM": modernbert.read_modernbert("ModernBertForMaskedLM"),
    "ModernBertForSequenceClassification": modernbert.read_modernbert("ModernBertForSequenceClassification"),
    "ModernBertForTokenClassification": modernbert.read_modernbert("ModernBertForTokenClassification"),
    "NomicBertModel": nomic_bert.read_nomic_bert("NomicBertModel"),
    "NomicBertForMaskedLM": nomic_bert.read_nomic_bert("NomicBertForMaskedLM"),
    "NomicBertForSequenceClassification": nomic_bert.read_nomic_bert("NomicBertForSequenceClassification"),
    "GteModel": gte.read_gte("GteModel", "gte"),
    "GteForSequenceClassification": gte.read_gte("GteForSequenceClassification", "gte"),
    "NewModel": gte.read_gte("NewModel", "new"),
    "NewForSequenceClassification": gte.read_gte("NewForSequenceClassification", "new"),
    "JinaBertModel": jina.read_jina_bert("JinaBertModel"),
    "JinaBertForMaskedLM": jina.read_jina_bert("JinaBertForMaskedLM"),
    "JinaBertForSequenceClassification": jina.read_jina_bert("JinaBertForSequenceClassification"),
    "JinaEmbeddingsV3Model": jina.read_jina_v3("JinaEmbeddingsV3Model"),
    "JinaEmbeddingsV3ForMaskedLM": jina.read_jina_v3("JinaEmbeddingsV3ForMaskedLM"),
    "JinaEmbeddingsV3ForSequenceClassification": jina.read_jina_v3("JinaEmbeddingsV3ForSequenceClassification"),
    "EuroBertModel": bidirectional.read_eurobert("EuroBertModel"),
    "EuroBertForMaskedLM": bidirectional.read_eurobert("EuroBertForMaskedLM"),
    "EuroBertForSequenceClassification": bidirectional.read_eurobert("EuroBertForSequenceClassification"),
    "Gemma3TextModel": bidirectional.read_embedding_gemma,
    "LlamaModel": pooled.without_lm_head(llama.read, "LlamaModel"),
    "MistralModel": pooled.without_lm_head(mistral.read, "MistralModel"),
    "Qwen2Model": pooled.without_lm_head(qwen2.read, "Qwen2Model"),
    "Qwen3Model": pooled.without_lm_head(qwen3.read, "Qwen3Model"),
    "LlamaForSequenceClassification": pooled.as_classifier(llama.read, "LlamaForSequenceClassification"),
    "MistralForSequenceClassification": pooled.as_classifier(mistral.read, "MistralForSequenceClassification"),
    "Qwen2ForSequenceClassification": pooled.as_classifier(qwen2.read, "Qwen2ForSequenceClassification"),
    "Qwen3ForSequenceClassification": pooled.as_classifier(qwen3.read, "Qwen3ForSequenceClassification"),
}


def read_model(
    config: Mapping[str, object], allowed: Iterable[str] = (), adapt: Callable[[WeightMap], WeightMap] = lambda map: map
) -> tuple[ModelSpec, WeightMap]:
    """Read config.json. allowed: unknown keys to ignore, as --allow-unknown-config names them. adapt: changes the names
    of tensors before it is decided which of them are quantised.

    Raises UnsupportedModel for an architecture that is not in FAMILIES, ModelError for anything else in the file that
    is not supported, OptionError for an allowed key that is not in the file.
    """
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    if architecture not in FAMILIES:
        what = f"architecture {architecture}" if architecture else "a model whose config.json names no architecture"
        raise UnsupportedModel(
            f"{what} is not supported; supported: {', '.join(sorted(FAMILIES))}; "
            "--model-impl transformers serves many others, slowly"
        )
    mlx = config.get("quantization")  # the key's counterpart of other writers is quantization_config
    if isinstance(mlx, Mapping) and "bits" in mlx:
        raise ModelError(
            "config.json: quantization says that MLX quantised the checkpoint, which is not supported; serve the "
            "original, or the same model in another format, such as AWQ or GGUF"
        )
    whole = ConfigReader(config, allowed=allowed)
    quantized = whole.inner("quantization_config")
    spec, weights = FAMILIES[architecture](whole)
    weights = adapt(weights)
    if quantized is None:
        return spec, weights
    weights = replace(weights, ignored=(*weights.ignored, *ATTENTION_SCALES))
    spec = replace(spec, calibrated_cache=is_calibrated(whole.mapping("quantization_config")))
    if any(rule.scales for rule in weights.rules):  # already read by the family
        return replace(spec, grouped=_grouped(lambda rule: MXFP4 if rule.scales else None, spec, weights)), weights
    stored = quantization_config.read_quantization_config(quantized)
    if isinstance(stored, GGUFTensors):
        return _read_gguf(stored, spec, weights)
    if isinstance(stored, Int8Checkpoint):
        int8 = _find_int8(stored, spec, weights)
        if int8 is not None:
            return replace(spec, int8=int8), weights
        stored = stored.without_activations()
    return _read_modules(stored, spec, weights)


def _read_gguf(stored: GGUFTensors, spec: ModelSpec, weights: WeightMap) -> tuple[ModelSpec, WeightMap]:
    spec, weights = apply_gguf(stored, spec, weights)
    grouped = _grouped(lambda rule: stored.find_form(rule.source), spec, weights)
    embedding = stored.find_form(weights.embedding)
    head = stored.find_form(weights.head)
    if grouped is not None or embedding is not None or head is not None:
        grouped = grouped or GroupQuantSpec(in_checkpoint=True, default=None)
        grouped = replace(grouped, embedding=embedding, head=head)
    return replace(spec, grouped=grouped), weights


def _read_modules(stored: QuantizedModules, spec: ModelSpec, weights: WeightMap) -> tuple[ModelSpec, WeightMap]:
    if isinstance(stored, DynamicModules) and stored.format.layout in ("awq", "awq_gemv"):
        spec, weights = add_activation_scales(spec, weights)

    def find_form(rule: WeightRule) -> GroupQuantForm | None:
        form = stored.find_form(*weights.list_spellings(rule.source.removesuffix(".weight")))
        if rule.members and form is not None and not form.is_float8:
            return None  # no linear modules: only the tensors tell whether integers are stored, see `weights.load`
        return form

    grouped = _grouped(find_form, spec, weights)
    if grouped is not None:
        spellings = weights.list_spellings(weights.head.removesuffix(".weight"))
        grouped = replace(grouped, head=stored.find_head_form(*spellings))
    return replace(spec, grouped=grouped), replace(weights, quantized=stored)


def apply_engine_config(spec: ModelSpec, settings: Settings) -> ModelSpec:
    """Apply the engine's options to the spec. Every rank builds its decoder and plans memory from the result.

    Raises ModelError and OptionError."""
    if len(spec.longrope_lengths) > 1:
        raise ModelError("config.json: longrope in some layers only or with several original lengths is not supported")
    spec = spec.with_max_length(settings.max_model_len)
    if settings.pooling is not None:
        spec = replace(spec, pooler=build_pooler_spec(settings.pooling), lm_head=settings.generates)
    if settings.enable_expert_parallel:
        spec = spec.with_expert_parallel()
        _check_redundant_experts(spec, settings)
    spec = _apply_quantization(spec, settings)
    if settings.kv_cache_dtype == "fp8" and spec.calibrated_cache:
        spec = add_cache_scales(spec)
    if settings.device == "cpu":
        return spec.with_packed_tables(rounds=settings.dtype == "bfloat16")
    if spec.grouped is not None:  # GPUs hold embedding and LM head in the model's dtype
        spec = replace(spec, grouped=replace(spec.grouped, embedding=None, head=None))
    return spec


def _check_redundant_experts(spec: ModelSpec, settings: Settings) -> None:
    """Refuse more slots than are needed to hold all experts on each rank."""
    parallel = ParallelLayout(settings.tensor_parallel_size)
    for rank in range(parallel.size):
        shard = Shard(
            parallel,
            rank,
            layers=range(0),
            weights=settings.tensor_parallel_split,
            engines=settings.expert_engines,
            redundant_experts=settings.redundant_experts,
        )
        for ffn in {layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoESpec)}:
            num_experts = sum(map(len, shard.expert_spans(ffn)))
            if any(len(slots) > num_experts for slots in shard.place_experts(ffn)):
                raise OptionError(
                    f"--eplb-config: num_redundant_experts {settings.redundant_experts} is too many: the engines' "
                    f"tensor-parallel ranks {rank} share {num_experts} experts, and one would hold some of them twice"
                )


def _apply_quantization(spec: ModelSpec, settings: Settings) -> ModelSpec:
    """Apply --quantization."""
    if settings.quantization == "fp8":
        return spec.with_fp8() if settings.rounds_to_fp8 else spec.with_fp8_weights()
    if settings.quantization in INT4_GROUP_SIZES:
        return spec.with_int4(INT4_GROUP_SIZES[settings.quantization])
    return spec.with_int8() if settings.quantization == "int8" else spec


def _grouped(
    find_form: Callable[[WeightRule], GroupQuantForm | None], spec: ModelSpec, weights: WeightMap
) -> GroupQuantSpec | None:
    """The forms of linear layers, read from the checkpoint's tensors. find_form: the form of one tensor."""
    forms: dict[str, GroupQuantForm | None] = {}
    for rule in weights.expand(len(spec.layers)).values():
        form = find_form(rule)
        forms |= {layer: form for layer in map(find_linear_layer, rule.parameters) if layer is not None}
    if not any(forms.values()):
        return None
    default = Counter(forms.values()).most_common(1)[0][0]
    others = {layer: form for layer, form in forms.items() if form != default}
    return GroupQuantSpec(in_checkpoint=True, default=default, others=others)


def _find_int8(stored: Int8Checkpoint, spec: ModelSpec, weights: WeightMap) -> Int8Spec | None:
    """Translate the module names of the checkpoint to linear layers of the model. None if int8 weights and activations
    are not enough: a weight is of another kind, or merged layers differ."""
    excluded: set[str] = set()
    kinds: dict[str, set[bool]] = {}  # merged layers -> whether they are in int8
    for rule in weights.expand(len(spec.layers)).values():
        is_ignored = any(map(stored.ignores, weights.list_spellings(rule.source.removesuffix(".weight"))))
        linear_layers = [layer for layer in map(find_linear_layer, rule.parameters) if layer is not None]
        if is_ignored:
            excluded.update(linear_layers)
        elif rule.parameters[0].endswith(UNQUANTISED) or (linear_layers and (rule.transform != "none" or rule.members)):
            return None
        for layer in linear_layers:
            kinds.setdefault(find_merged_layer(layer), set()).add(is_ignored)
    head = weights.head.removesuffix(".weight")
    is_head_int8 = not spec.tie_word_embeddings and not any(map(stored.ignores, weights.list_spellings(head)))
    if is_head_int8 or any(len(found) > 1 for found in kinds.values()):
        return None
    return Int8Spec(in_checkpoint=True, excluded=frozenset(excluded))
