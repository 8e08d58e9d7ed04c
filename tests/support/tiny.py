"""Random tiny checkpoints of every family, written by transformers, with awkward sizes; and a tiny tokenizer."""

from __future__ import annotations

import copy
import json
import shutil
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from support import qwen  # noqa: F401 -- registers the family

DEMO = Path(__file__).parents[2] / "serve_llm" / "demo"

ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}

_LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 60,
    "intermediate_size": 97,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 14,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def _without(sizes: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in sizes.items() if key not in keys}


_PLAIN_HEADS = _without(_LLAMA_LIKE, "head_dim")  # hidden_size / heads: 10
_GPT2 = {"vocab_size": 331, "n_embd": 57, "n_inner": 97, "n_layer": 3, "n_head": 3, "n_positions": 256}
_GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 1.5}
_EXPERTS = {**_LLAMA_LIKE, "intermediate_size": 37, "num_local_experts": 5, "num_experts_per_tok": 2}
_QWEN_EXPERTS = {**_PLAIN_HEADS, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 37}
_DELTA_NET = {
    "head_dim": 16,  # transformers rotates a quarter of them
    "rms_norm_eps": 1e-3,  # with less, norms of values near 0 magnify rounding errors, also in transformers
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 11,
}
_LATENT = {
    **_without(_LLAMA_LIKE, "head_dim", "num_key_value_heads"),
    "q_lora_rank": 21,
    "kv_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 37,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.7,
    "n_group": 3,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}
SIZES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "llama4_text": {
        **_LLAMA_LIKE,
        "intermediate_size": 37,
        "intermediate_size_mlp": 97,
        "num_local_experts": 5,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 32,
        "floor_scale": 16,
        "attn_scale": 0.5,
    },
    "mistral": {**_LLAMA_LIKE, "sliding_window": 37},
    "ministral3": {
        **_LLAMA_LIKE,
        "rope_parameters": {
            **ROPE_SCALINGS["yarn"],
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen": {
        **_without(_LLAMA_LIKE, "num_key_value_heads", "head_dim", "rope_parameters"),
        "intermediate_size": 194,  # gate and up together
        "kv_channels": 10,
        "max_position_embeddings": 512,
        "seq_length": 256,
    },
    "qwen2": {**_LLAMA_LIKE, "use_sliding_window": True, "sliding_window": 21, "max_window_layers": 2},
    "qwen3": {**_LLAMA_LIKE, "tie_word_embeddings": True},
    "granite": {**_LLAMA_LIKE, **_GRANITE},
    "olmo2": _PLAIN_HEADS,
    "olmo3": {
        **_PLAIN_HEADS,
        "sliding_window": 21,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
        },
    },
    "phi3": {**_PLAIN_HEADS, "sliding_window": 37, "intermediate_size": 107},
    "starcoder2": {**_PLAIN_HEADS, "sliding_window": 37, "tie_word_embeddings": False},
    "seed_oss": {**_LLAMA_LIKE, "attention_out_bias": True},
    "smollm3": {**_PLAIN_HEADS, "no_rope_layer_interval": 2},
    "nemotron": {**_LLAMA_LIKE, "head_dim": 12},
    "gemma": _LLAMA_LIKE,
    "gemma2": {
        **_LLAMA_LIKE,
        "sliding_window": 21,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 9.0,
    },
    "gemma3_text": {
        **_LLAMA_LIKE,
        "sliding_window": 21,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
        },
    },
    "glm": {**_LLAMA_LIKE, "head_dim": 12},  # transformers rotates half of them
    "glm4": {**_LLAMA_LIKE, "head_dim": 12},
    "cohere": {**_PLAIN_HEADS, "use_qk_norm": True, "logit_scale": 0.7},
    "cohere2": {**_PLAIN_HEADS, "sliding_window": 21, "sliding_window_pattern": 2, "logit_scale": 0.7},
    "stablelm": {**_PLAIN_HEADS, "use_qkv_bias": True},
    "gpt_neox": {
        **_without(_PLAIN_HEADS, "num_key_value_heads"),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6},
    },
    "falcon": {
        **_without(_PLAIN_HEADS, "num_key_value_heads", "intermediate_size"),
        "new_decoder_architecture": True,
        "num_kv_heads": 3,
        "ffn_hidden_size": 97,
    },
    "gpt2": _GPT2,
    "gptj": {**_GPT2, "n_embd": 60, "n_head": 6, "rotary_dim": 6},
    "mixtral": {**_EXPERTS, "sliding_window": 37},
    "qwen2_moe": {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 23},
    "qwen3_moe": {**_QWEN_EXPERTS, "head_dim": 14, "mlp_only_layers": [1], "norm_topk_prob": True},
    "qwen3_next": {
        **_LLAMA_LIKE,
        **_DELTA_NET,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 37,
        "shared_expert_intermediate_size": 23,
    },
    "qwen3_5_text": {**_LLAMA_LIKE, **_DELTA_NET},
    "qwen3_5_moe_text": {
        **_without(_LLAMA_LIKE, "intermediate_size"),
        **_DELTA_NET,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 37,
        "shared_expert_intermediate_size": 23,
    },
    "granitemoe": {**_EXPERTS, **_GRANITE},
    "granitemoeshared": {**_EXPERTS, **_GRANITE, "shared_intermediate_size": 23},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3": {**_LATENT, "num_key_value_heads": 6},
    "glm4_moe": {
        **_without(_LLAMA_LIKE, "head_dim"),
        "head_dim": 12,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 37,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.7,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {**_EXPERTS, "sliding_window": 21, "num_local_experts": 5, "intermediate_size": 37},
    "bloom": {"vocab_size": 331, "hidden_size": 60, "n_layer": 3, "n_head": 6},
    "mpt": {
        "vocab_size": 331,
        "d_model": 60,
        "n_layers": 3,
        "n_heads": 6,
        "max_seq_len": 256,
        "attn_config": {"clip_qkv": 2.5, "softmax_scale": 0.2},
    },
    "opt": {
        "vocab_size": 331,
        "hidden_size": 57,
        "ffn_dim": 97,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 57,
    },
}
FAMILIES = tuple(SIZES)
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # with linear attention in some layers
LESS_ONE = ("gemma", "gemma2", "gemma3_text", "nemotron", *HYBRIDS)  # models whose norm weights are stored minus 1
WITH_EXPERTS = tuple(family for family, sizes in SIZES.items() if "num_experts_per_tok" in sizes)
OTHERS: dict[str, dict[str, Any]] = {  # not described by a family file
    "olmo": {**_PLAIN_HEADS, "clip_qkv": 1.5},
    "phi": {**_PLAIN_HEADS, "partial_rotary_factor": 0.4, "qk_layernorm": True},
    "exaone4": {
        **_LLAMA_LIKE,
        "head_dim": 16,
        "sliding_window": 21,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "minicpm3": {  # values are smaller than keys
        **_PLAIN_HEADS,
        "num_key_value_heads": 6,
        "q_lora_rank": 17,
        "kv_lora_rank": 11,
        "qk_nope_head_dim": 7,
        "qk_rope_head_dim": 4,
        "v_head_dim": 9,
    },
    "longcat_flash": {  # the router reads the weight of a linear layer that is never called
        **_without(_LATENT, "num_hidden_layers"),
        "head_dim": 6,
        "num_key_value_heads": 6,
        "num_layers": 2,
        "ffn_hidden_size": 41,
        "expert_ffn_hidden_size": 37,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
}


def make_checkpoint(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    old_config: bool = False,
    max_shard_size: str = "5GB",
    std: float = 0.3,
    **overrides: Any,
) -> int:
    """Write config.json and safetensors of a random model to `directory` (created). Returns the vocabulary's size.

    overrides: keys of transformers' config class; `rope="yarn"` and the like select from ROPE_SCALINGS. dtype: of the
    file. old_config: write config.json like transformers 4. max_shard_size: "20KB" gives several files. std: standard
    deviation of the weights; the default makes the most likely token stand out.
    """
    config = _config(family, overrides)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        corrections = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
        for name, parameter in (*model.named_parameters(), *corrections):
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name or "ln_" in name
            middle = 0.0 if family in LESS_ONE and "linear_attn" not in name else 1.0
            parameter.copy_(noise * 0.2 + middle if is_norm and name.endswith("weight") else noise * std)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    if old_config:
        _write_old_config(directory / "config.json")
    return int(config.vocab_size)


def make_served_checkpoint(directory: Path, family: str, **overrides: Any) -> str:
    """Write a tiny model that takes 1,024 tokens, with the demo model's tokenizer. overrides: see `make_checkpoint`.
    Returns its path."""
    make_checkpoint(directory, family, vocab_size=4096, max_position_embeddings=1024, **overrides)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory / name)
    return str(directory)


def config_of(family: str, **overrides: Any) -> dict[str, Any]:
    """Return config.json as `make_checkpoint` would write it, without a model."""
    config = _config(family, overrides)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return dict(json.loads(config.to_json_string()))


def _config(family: str, overrides: dict[str, Any]) -> PreTrainedConfig:
    sizes = copy.deepcopy({**{**SIZES, **OTHERS}[family], **overrides})  # transformers writes into rope_parameters
    if rope := sizes.pop("rope", None):
        scaled = {"rope_theta": 10000.0, **ROPE_SCALINGS[rope]}
        nested = "full_attention" in sizes.get("rope_parameters", {})
        sizes["rope_parameters"] = {**sizes["rope_parameters"], "full_attention": scaled} if nested else scaled
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    if sizes.get("layer_types"):
        sizes["layer_types"] = sizes["layer_types"][: sizes["num_hidden_layers"]]
    return AutoConfig.for_model(family, **{**ids, **sizes})


def _write_old_config(path: Path) -> None:
    config = json.loads(path.read_text())
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    if rope := config.pop("rope_parameters", None):
        if "sliding_attention" in rope:
            local, rope = rope["sliding_attention"], rope["full_attention"]
            if config["model_type"] != "olmo3":
                config["rope_local_base_freq"] = local["rope_theta"]
        if config["model_type"] == "gpt_neox":
            config["rotary_emb_base"], config["rotary_pct"] = rope.pop("rope_theta"), rope.pop("partial_rotary_factor")
        else:
            config |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        config["rope_scaling"] = None if rope["rope_type"] == "default" else {**rope, "type": rope.pop("rope_type")}
    if config["model_type"] in ("cohere2", "gemma2", "gemma3_text"):
        config["sliding_window_pattern"] = config.pop("layer_types").index("full_attention") + 1
    path.write_text(json.dumps(config, indent=2))


TEXT = """The quick brown fox jumps over the lazy dog, and then the dog looks at the fox for a while. After that they
both walk along the river to the old house on the hill, where another thousand words are written on every single wall.
Nobody has ever read all of them; some say that the last one, when it is spoken, stands for all the others."""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; 0 ends a sequence
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE of exactly `vocab_size` (259 to 400) tokens.

    The special tokens come first, then all bytes, then merges from a few lines of English. Any text round-trips.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([string.printable, TEXT], trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"no tokenizer of {vocab_size} tokens comes from this text")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 256,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
