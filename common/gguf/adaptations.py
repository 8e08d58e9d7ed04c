"""Parts of config.json that are not a translation of a single metadata key, by general.architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from serve_llm.common.errors import ModelError

Config = dict[str, object]
JOINS_QKV, JOINS_GATE_UP, UNUSED_LAYERS = "joins_qkv", "joins_gate_up", "unused_layers"  # keys of quantization_config
SIGMOID = 2  # expert_gating_func; 1 is softmax
# For older files without expert_group_count and expert_group_used_count: values of DeepSeek-V2 and V3, by number of
# experts.
DEFAULT_GROUPS = {160: (8, 3), 256: (8, 4)}
MAVERICK_EXPERTS = 128  # this Llama 4 model has no norms on queries and keys
YARN_LOG_FACTOR = 0.1  # yarn_log_multiplier over mscale_all_dim


class Metadata(Protocol):
    """The remaining metadata of a file, and its tensors."""

    def take(self, key: str) -> object:
        """Remove and return the value of an architecture's key; None if it is absent."""

    def take_size(self, key: str) -> int:
        """Like `take`, for a number above 0. Raises ModelError otherwise."""

    def find_shape(self, tensor: str) -> tuple[int, ...] | None:
        """None if the file lacks the tensor."""

    def refuse(self, key: str, why: str) -> ModelError:
        """The error for the value of a key."""


def _adapt_deepseek(config: Config, file: Metadata) -> None:
    is_v3 = file.take("expert_gating_func") == SIGMOID
    config["architectures"] = [f"Deepseek{'V3' if is_v3 else 'V2'}ForCausalLM"]
    default = DEFAULT_GROUPS.get(_integer(config.get("n_routed_experts")), (1, 1))
    count = file.take("expert_group_count")
    used = file.take("expert_group_used_count")
    config["n_group"], config["topk_group"] = (count, used) if count else default
    is_grouped = config["n_group"] != 1
    config["topk_method"] = "noaux_tc" if is_v3 else "group_limited_greedy" if is_grouped else "greedy"
    rotated = file.take_size("rope.dimension_count")
    # With "mla", the size of a head; without it, that of the latent vector, in files that have both.
    latent_sizes = [file.take(f"attention.{kind}_length") for kind in ("key", "value")]
    own_sizes = [file.take(f"attention.{kind}_length_mla") for kind in ("key", "value")]
    key, value = (_integer(own or latent) for own, latent in zip(own_sizes, latent_sizes, strict=True))
    if key <= rotated or value < 1:
        raise file.refuse("attention.key_length", f"does not fit rope.dimension_count {rotated}")
    config |= {"qk_rope_head_dim": rotated, "qk_nope_head_dim": key - rotated, "v_head_dim": value}
    config.setdefault("q_lora_rank", None)
    _add_unused_layers(config, file)


def _adapt_yarn(config: Config, file: Metadata) -> None:
    multiplier = file.take("rope.scaling.yarn_log_multiplier")
    scaling = config.get("rope_scaling")
    if isinstance(multiplier, float) and isinstance(scaling, dict):
        scale = round(multiplier / YARN_LOG_FACTOR, 6)
        config["rope_scaling"] = scaling | {"mscale": scale, "mscale_all_dim": scale}


def _adapt_mistral3(config: Config, file: Metadata) -> None:
    """Ministral 3, and Mistral 3, whose queries are not scaled by their position."""
    beta = file.take("attention.temperature_scale")
    magnitude = file.take("rope.scaling.yarn_log_multiplier")
    scaling = config.setdefault("rope_scaling", {"rope_type": "default"})
    assert isinstance(scaling, dict)
    is_yarn = scaling["rope_type"] == "yarn"
    if beta and not is_yarn:
        raise file.refuse("attention.temperature_scale", "is not supported without yarn scaling")
    if is_yarn and magnitude:
        scaling |= {"mscale": 1.0, "mscale_all_dim": magnitude}
    if beta:
        scaling["llama_4_scaling_beta"] = beta


def _adapt_glm_moe(config: Config, file: Metadata) -> None:
    if file.take("expert_gating_func") not in (None, SIGMOID):
        raise file.refuse("expert_gating_func", f"is not supported (supported: {SIGMOID})")
    _add_unused_layers(config, file)


def _add_unused_layers(config: Config, file: Metadata) -> None:
    """The block count includes layers for multi-token prediction."""
    more = _integer(file.take("nextn_predict_layers"))
    config["num_hidden_layers"] = _integer(config.get("num_hidden_layers")) - more
    if more:
        config[UNUSED_LAYERS] = more


def _adapt_llama4(config: Config, file: Metadata) -> None:
    """Settings that files lack are the same in all published models, or follow from the number of experts."""
    config["intermediate_size_mlp"] = config.pop("intermediate_size", None)
    config["intermediate_size"] = config.pop("moe_intermediate_size", None)
    config["use_qk_norm"] = config.get("num_local_experts") != MAVERICK_EXPERTS
    if file.take("attention.sliding_window") == 0:
        raise file.refuse("attention.sliding_window", "is not supported: some layers must attend within chunks")


def _adapt_granite_moe(config: Config, file: Metadata) -> None:
    if config.get("shared_intermediate_size"):
        config["architectures"] = ["GraniteMoeSharedForCausalLM"]


def _adapt_glm(config: Config, file: Metadata) -> None:
    """Files from THUDM's own checkpoints have queries, keys and values in one tensor; transformers' are separate."""
    if file.find_shape("blk.0.attn_qkv.weight") is not None:
        config["attention_bias"] = file.find_shape("blk.0.attn_qkv.bias") is not None
        config[JOINS_QKV] = True


def _adapt_falcon(config: Config, file: Metadata) -> None:
    layout = file.take("tensor_data_layout")
    if layout not in (None, "jploski"):
        raise file.refuse("tensor_data_layout", "is not supported (supported: jploski)")
    kv_heads = config.pop("num_key_value_heads", None) or config["num_attention_heads"]
    if kv_heads == 1:
        config["multi_query"] = True
        return
    norms = 1 if file.find_shape("blk.0.attn_norm_2.weight") is None else 2
    config |= {"num_kv_heads": kv_heads, "new_decoder_architecture": True, "num_ln_in_parallel_attn": norms}


def _adapt_mpt(config: Config, file: Metadata) -> None:
    bias = file.take("attention.max_alibi_bias")
    if not bias:
        raise file.refuse("attention.max_alibi_bias", "is not supported: the positions must be those of ALiBi")
    clip = file.take("attention.clamp_kqv") or None
    config["attn_config"] = {"alibi": True, "alibi_bias_max": bias, "clip_qkv": clip}
    width = _integer(config["hidden_size"])
    inner = _integer(config.pop("intermediate_size", None))
    config["expansion_ratio"], rest = divmod(inner, width)
    if rest:
        raise file.refuse("feed_forward_length", f"is not a multiple of embedding_length {width}")


def _adapt_qwen(config: Config, file: Metadata) -> None:
    config["seq_length"] = config.get("max_position_embeddings")


def _adapt_linear_attention(config: Config, file: Metadata) -> None:
    """Qwen3-Next and Qwen3.5. Older files of the first have queries, keys, values and gates in one tensor."""
    size, rest = divmod(file.take_size("ssm.inner_size"), _integer(config.get("linear_num_value_heads")) or 1)
    if rest:
        raise file.refuse("ssm.inner_size", "is not a multiple of ssm.time_step_rank")
    config["linear_value_head_dim"] = size
    _add_unused_layers(config, file)
    if file.find_shape("blk.0.ssm_in.weight") is not None:
        config[JOINS_QKV] = True


def _check_encoder(config: Config, file: Metadata) -> None:
    if file.take("attention.causal") not in (None, False):
        raise file.refuse("attention.causal", "is not supported (supported: false)")


def _adapt_modernbert(config: Config, file: Metadata) -> None:
    _check_encoder(config, file)
    file.take("attention.layer_norm_rms_epsilon")  # that of its layer norms again


def _adapt_encoder(config: Config, file: Metadata) -> None:
    _check_encoder(config, file)
    types = file.find_shape("token_types.weight")
    config["type_vocab_size"] = 0 if types is None else types[0]
    positions = file.find_shape("position_embd.weight")
    if positions is not None:  # without the rows before the first position in RoBERTa's table
        config["max_position_embeddings"] = positions[0]


def _integer(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


ADAPTATIONS: Mapping[str, tuple[Callable[[Config, Metadata], None], ...]] = {
    "deepseek2": (_adapt_deepseek, _adapt_yarn),
    "mistral3": (_adapt_mistral3,),
    "glm4moe": (_adapt_glm_moe,),
    "llama4": (_adapt_llama4,),
    "granitemoe": (_adapt_granite_moe,),
    "chatglm": (_adapt_glm,),
    "falcon": (_adapt_falcon,),
    "mpt": (_adapt_mpt,),
    "qwen": (_adapt_qwen,),
    "qwen3next": (_adapt_linear_attention,),
    "qwen35": (_adapt_linear_attention,),
    "qwen35moe": (_adapt_linear_attention,),
    "bert": (_adapt_encoder,),
    "nomic-bert": (_adapt_encoder,),
    "jina-bert-v2": (_adapt_encoder,),
    "modern-bert": (_adapt_modernbert,),
    "eurobert": (_check_encoder,),
}
