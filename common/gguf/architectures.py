"""What GGUF files call the served architectures and their settings, as data.

An architecture's settings are metadata keys that begin with its name, such as "llama.block_count". Each is translated
to a key of config.json, handled in `common.gguf.config`, listed as ignored, or refused there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

COMMON = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.freq_base": "rope_theta",
}
RMS_NORM = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
WINDOW = {"attention.sliding_window": "sliding_window"}
SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
QWEN_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
ROUTED_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}
EXPERT_GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
LINEAR_ATTENTION = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}
SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_epsilon"}
NO_KV_HEADS = {"num_key_value_heads": "", "head_dim": ""}
NO_ROPE = {**NO_KV_HEADS, "rope_theta": ""}


@dataclass(frozen=True)
class GGUFArchitecture:
    """One value of general.architecture."""

    name: str  # the architecture in config.json
    keys: Mapping[str, str] = field(default_factory=lambda: RMS_NORM)  # in addition to those in COMMON
    constants: Mapping[str, object] = field(
        default_factory=dict
    )  # keys of config.json that have the same value in all files
    # Key of config.json -> a layer's tensor, which is there if the key is true.
    flags: Mapping[str, str] = field(default_factory=dict)
    has_partial_rotary: bool = False  # rope may rotate only part of each head
    truncates_yarn: bool = True  # yarn scaling rounds the dimensions between which it interpolates
    has_own_heads: bool = False  # the sizes of heads are adapted, see `common.gguf.adaptations`
    names: Mapping[str, str] = field(default_factory=dict)  # usual key of config.json -> this family's key; "" for none
    scales_by_width: int | None = None  # number of layers of the model that scales scores by hidden size / heads


ARCHITECTURES = {
    "llama": GGUFArchitecture("LlamaForCausalLM", flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM"),
    "qwen2moe": GGUFArchitecture(
        "Qwen2MoeForCausalLM",
        RMS_NORM | QWEN_EXPERTS | SHARED_EXPERT,
        {"norm_topk_prob": False, "decoder_sparse_step": 1},
    ),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", flags={"attention_bias": "attn_q.bias"}),
    "qwen3moe": GGUFArchitecture(
        "Qwen3MoeForCausalLM",
        RMS_NORM | QWEN_EXPERTS,
        {"norm_topk_prob": True, "decoder_sparse_step": 1},
        {"attention_bias": "attn_q.bias"},
    ),
    "qwen3next": GGUFArchitecture(
        "Qwen3NextForCausalLM",
        RMS_NORM | QWEN_EXPERTS | SHARED_EXPERT | LINEAR_ATTENTION | {"expert_weights_norm": "norm_topk_prob"},
        {"norm_topk_prob": True, "decoder_sparse_step": 1},
        has_partial_rotary=True,
    ),
    "qwen35": GGUFArchitecture("Qwen3_5ForCausalLM", RMS_NORM | LINEAR_ATTENTION, has_partial_rotary=True),
    "qwen35moe": GGUFArchitecture(
        "Qwen3_5MoeForCausalLM",
        RMS_NORM | QWEN_EXPERTS | SHARED_EXPERT | LINEAR_ATTENTION,
        has_partial_rotary=True,
    ),
    "gemma2": GGUFArchitecture("Gemma2ForCausalLM", RMS_NORM | WINDOW | SOFTCAPS, scales_by_width=46),
    "gemma3": GGUFArchitecture(
        "Gemma3ForCausalLM",
        RMS_NORM
        | WINDOW
        | SOFTCAPS
        | {"rope.freq_base_swa": "rope_local_base_freq", "attention.sliding_window_pattern": "sliding_window_pattern"}
        | {"rope.local.freq_base": "rope_local_base_freq", "rope.global.freq_base": "rope_theta"},  # Ollama's names
        scales_by_width=62,
    ),
    "phi3": GGUFArchitecture("Phi3ForCausalLM", RMS_NORM | WINDOW, has_partial_rotary=True),
    "granite": GGUFArchitecture(
        "GraniteForCausalLM", RMS_NORM | MULTIPLIERS, flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
    ),
    "mistral3": GGUFArchitecture("Ministral3ForCausalLM"),
    "smollm3": GGUFArchitecture("SmolLM3ForCausalLM", constants={"no_rope_layer_interval": 4}),
    "olmo2": GGUFArchitecture("Olmo2ForCausalLM"),
    "glm4": GGUFArchitecture("Glm4ForCausalLM", flags={"attention_bias": "attn_q.bias"}, has_partial_rotary=True),
    "starcoder2": GGUFArchitecture(
        "Starcoder2ForCausalLM", {"attention.layer_norm_epsilon": "norm_epsilon"}, {"use_bias": True}
    ),
    "stablelm": GGUFArchitecture(
        "StableLmForCausalLM",
        {
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
        },
        flags={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        has_partial_rotary=True,
    ),
    "command-r": GGUFArchitecture(
        "CohereForCausalLM",
        {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
        flags={"use_qk_norm": "attn_q_norm.weight"},
    ),
    "cohere2": GGUFArchitecture(
        "Cohere2ForCausalLM",
        {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"} | WINDOW,
        {"sliding_window_pattern": 4},
    ),
    "gpt-oss": GGUFArchitecture(
        "GptOssForCausalLM",
        RMS_NORM
        | WINDOW
        | {
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        flags={"attention_bias": "attn_q.bias"},
        truncates_yarn=False,
    ),
    "nemotron": GGUFArchitecture(
        "NemotronForCausalLM",
        {"attention.layer_norm_epsilon": "norm_eps"},
        flags={"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"},
        has_partial_rotary=True,
    ),
    "deepseek2": GGUFArchitecture(  # also DeepSeek-V3
        "DeepseekV2ForCausalLM",
        RMS_NORM | ROUTED_EXPERTS | {"attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank"},
        has_own_heads=True,
        names={"num_key_value_heads": ""},
    ),
    "glm4moe": GGUFArchitecture(
        "Glm4MoeForCausalLM",
        RMS_NORM | ROUTED_EXPERTS | EXPERT_GROUPS,
        flags={"attention_bias": "attn_q.bias", "use_qk_norm": "attn_q_norm.weight"},
        has_partial_rotary=True,
    ),
    "llama4": GGUFArchitecture(
        "Llama4ForCausalLM",
        RMS_NORM
        | {
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        {
            "attention_chunk_size": 8192,
            "no_rope_layer_interval": 4,
            "attn_temperature_tuning": True,
            "attn_scale": 0.1,
            "floor_scale": 8192,
        },
    ),
    "granitemoe": GGUFArchitecture(
        "GraniteMoeForCausalLM",
        RMS_NORM
        | MULTIPLIERS
        | {
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        flags={"attention_bias": "attn_q.bias"},
    ),
    "chatglm": GGUFArchitecture("GlmForCausalLM", flags={"attention_bias": "attn_q.bias"}, has_partial_rotary=True),
    "falcon": GGUFArchitecture(
        "FalconForCausalLM",
        LAYER_NORM,
        flags={"bias": "attn_qkv.bias"},
        names={"intermediate_size": "ffn_hidden_size", "head_dim": ""},
    ),
    "gptneox": GGUFArchitecture(
        "GPTNeoXForCausalLM",
        {"attention.layer_norm_epsilon": "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        flags={"attention_bias": "attn_qkv.bias"},
        has_partial_rotary=True,
        names={**NO_KV_HEADS, "partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
    ),
    "gpt2": GGUFArchitecture(
        "GPT2LMHeadModel",
        LAYER_NORM,
        names=NO_ROPE
        | {
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
        },
    ),
    "bloom": GGUFArchitecture(
        "BloomForCausalLM",
        LAYER_NORM,
        names=NO_ROPE
        | {
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "seq_length",
        },
    ),
    "mpt": GGUFArchitecture(
        "MptForCausalLM",
        LAYER_NORM,
        names=NO_ROPE
        | {
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
    ),
    "qwen": GGUFArchitecture(
        "QWenLMHeadModel",
        {"attention.layer_norm_rms_epsilon": "layer_norm_epsilon"},
        names={"num_key_value_heads": "", "head_dim": "kv_channels", "rope_theta": "rotary_emb_base"},
    ),
    "bert": GGUFArchitecture(
        "BertModel", {"attention.layer_norm_epsilon": "layer_norm_eps"}, {"hidden_act": "gelu"}, names=NO_ROPE
    ),
    "nomic-bert": GGUFArchitecture(
        "NomicBertModel",
        {"attention.layer_norm_epsilon": "layer_norm_eps"},
        {"hidden_act": "silu", "rope_theta": 1000.0},
        names=NO_KV_HEADS,
    ),
    "jina-bert-v2": GGUFArchitecture(
        "JinaBertModel",
        {"attention.layer_norm_epsilon": "layer_norm_eps"},
        {"position_embedding_type": "alibi", "feed_forward_type": "geglu"},
        names=NO_ROPE,
    ),
    "modern-bert": GGUFArchitecture(
        "ModernBertModel",
        {
            "attention.layer_norm_epsilon": "norm_eps",
            "attention.sliding_window": "local_attention",
            "attention.sliding_window_pattern": "global_attn_every_n_layers",
            "rope.freq_base_swa": "local_rope_theta",
            "hidden_activation": "hidden_activation",
        },
        {"rope_theta": 160_000.0},
        {"norm_bias": "ffn_norm.bias"},
        names={**NO_KV_HEADS, "rope_theta": "global_rope_theta"},
    ),
    "eurobert": GGUFArchitecture("EuroBertModel"),
}
# Models that read images -> their text part, which is served.
TEXT_PARTS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
ARCHITECTURES |= {name: ARCHITECTURES[text] for name, text in TEXT_PARTS.items()}
MIXTRAL = GGUFArchitecture(  # "llama" with experts
    "MixtralForCausalLM", RMS_NORM | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
)
IGNORED = (
    "vocab_size",  # the embedding's shape gives it
    "rope.scaling.finetuned",  # about training
    "rope.dimension_sections",  # which dimensions use which coordinate: for text, all coordinates are equal
    "n_deepstack_layers",  # layers to which image features are added
)
IGNORED_PREFIXES = ("vision.", "mm.")  # the image part, which is not served
