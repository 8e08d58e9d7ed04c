"""GGUF files of random tiny models, written with the gguf package as llama.cpp's converter writes them.

Each comes with the same weights in floating point, as a checkpoint that transformers reads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from support.quantised import is_linear
from support.tiny import CHAT_TEMPLATE, LESS_ONE, SPECIAL_TOKENS, make_checkpoint, make_tokenizer

SIZES: dict[str, Any] = {  # rows of whole blocks
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
}
PLAIN_HEADS = {key: value for key, value in SIZES.items() if key != "head_dim"}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "truncate": False,
}
MINISTRAL = {  # with a temperature and a YaRN magnitude that differ from the published ones
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "llama_4_scaling_beta": 0.5,
}
EXPERTS = {"moe_intermediate_size": 256}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # transformers' model_type -> architecture in GGUF, sizes
    "llama": ("llama", SIZES),
    "mistral": ("llama", {**SIZES, "sliding_window": None}),
    "mixtral": ("llama", {**SIZES, "intermediate_size": 256, "sliding_window": None}),
    "qwen2": ("qwen2", {**SIZES, "use_sliding_window": False}),
    "qwen2_moe": (
        "qwen2moe",
        {**PLAIN_HEADS, **EXPERTS, "shared_expert_intermediate_size": 256, "norm_topk_prob": False},
    ),
    "qwen3": ("qwen3", SIZES),
    "qwen3_moe": ("qwen3moe", {**SIZES, **EXPERTS, "mlp_only_layers": []}),
    "gpt_oss": ("gpt-oss", {**SIZES, "intermediate_size": 256, "sliding_window": 21, "rope_parameters": YARN}),
    "gemma2": ("gemma2", {**SIZES, "query_pre_attn_scalar": 64}),
    "gemma3_text": ("gemma3", {**SIZES, "query_pre_attn_scalar": 64}),
    "phi3": ("phi3", {**PLAIN_HEADS, "intermediate_size": 512}),
    "granite": ("granite", SIZES),
    "smollm3": ("smollm3", {**PLAIN_HEADS, "num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "olmo2": ("olmo2", PLAIN_HEADS),
    "glm4": ("glm4", {**SIZES, "attention_bias": True}),
    "starcoder2": ("starcoder2", {**PLAIN_HEADS, "sliding_window": None}),
    "stablelm": ("stablelm", PLAIN_HEADS),
    "nemotron": ("nemotron", SIZES),
    "cohere": ("command-r", {**PLAIN_HEADS, "use_qk_norm": True, "logit_scale": 0.7}),
    "cohere2": ("cohere2", {**PLAIN_HEADS, "num_hidden_layers": 4, "sliding_window_pattern": 4, "logit_scale": 0.7}),
    "ministral3": ("mistral3", {**SIZES, "rope_parameters": MINISTRAL}),
}
GPT_OSS_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?")
INTERLEAVED = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2), "down_proj": slice(None)}
PERMUTED = ("llama", "mistral3", "granite", "smollm3")
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")


def make_gguf(
    directory: Path,
    family: str,
    storage: str = "Q8_0",
    *,
    others: Mapping[str, str] | None = None,
    leave_out: str = "",
    metadata: Mapping[str, int] | None = None,
    tensors_per_file: int = 0,
    architecture: str = "",
    fuses_experts: bool = False,
    **overrides: Any,
) -> int:
    """Write a random model to directory/model.gguf, and the same numbers in float32 to directory/plain. Returns the
    vocabulary's size.

    storage: the type of linear layers, such as "Q4_K". others: the types of tensors, by the end of their names.
    leave_out: a tensor that the file lacks. metadata: additional keys. tensors_per_file: 0 for one file, otherwise for
    several, model-00001-of-0000N.gguf and so on. architecture: the family's if empty. fuses_experts: whether
    gate and up of a layer's experts are one tensor.
    """
    usual, sizes = FAMILIES[family]
    architecture = architecture or usual
    vocab_size = make_checkpoint(directory / "plain", family, std=0.1, **{**sizes, **overrides})
    make_tokenizer(directory / "plain", vocab_size)
    config = json.loads((directory / "plain" / "config.json").read_text())
    writer = GGUFWriter(directory / "model.gguf", architecture, split_max_tensors=tensors_per_file)
    add_metadata(writer, config, architecture)
    add_vocabulary(writer, directory / "plain")
    for key, value in (metadata or {}).items():
        writer.add_uint32(key, value)
    plain = load_file(directory / "plain" / "model.safetensors")
    stored = merge_experts(plain)
    names = gguf.get_tensor_name_map(
        next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config["num_hidden_layers"],
    )
    generator = np.random.default_rng(0)
    gates: dict[str, np.ndarray] = {}
    for name, tensor in stored.items():
        values = tensor.float().numpy()
        if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
            values = permute(values, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if family in LESS_ONE and name.endswith("norm.weight"):
            values = values + 1
        full_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert full_name is not None, name
        if full_name == leave_out:
            continue
        kind = choose_type(name, values, storage, others or {})
        if kind > GGMLQuantizationType.F16:
            packed = pack(values, kind, generator)
            if fuses_experts and "_up_exps" in full_name:
                both = np.concatenate((gates.pop(full_name.replace("_up_", "_gate_")), packed), axis=1)
                writer.add_tensor(full_name.replace("_up_", "_gate_up_"), both, raw_dtype=kind)
            elif fuses_experts and "_gate_exps" in full_name:
                gates[full_name] = packed
            else:
                writer.add_tensor(full_name, packed, raw_dtype=kind)
            values = quants.dequantize(packed, kind)
            if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
                heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
                values = permute(values, heads, back=True)
            store_plain(plain, name, torch.from_numpy(values.copy()))
        else:
            dtype = np.float32 if kind == GGMLQuantizationType.F32 else np.float16
            writer.add_tensor(full_name, np.ascontiguousarray(values, dtype=dtype))
            if dtype == np.float16:
                store_plain(plain, name, tensor.half().float())
    add_rope_factors(writer, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(plain, directory / "plain" / "model.safetensors", metadata={"format": "pt"})
    return vocab_size


def choose_type(name: str, values: np.ndarray, storage: str, others: Mapping[str, str]) -> GGMLQuantizationType:
    for ending, other in others.items():
        if name.endswith(ending):
            return GGMLQuantizationType[other]
    return GGMLQuantizationType[storage if is_linear(name) or values.ndim == 3 else "F32"]


def add_rope_factors(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Add the tensors that represent llama3 scaling and LongRoPE."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        plain, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), torch.device("cpu"))
        head_dim = config["head_dim"]
        unscaled = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (unscaled / plain).float().numpy())
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], dtype=np.float32))


def pack(values: np.ndarray, kind: GGMLQuantizationType, generator: np.random.Generator) -> np.ndarray:
    """Return the values as blocks if the gguf package supports the type, otherwise blocks of random numbers."""
    try:
        return quants.quantize(values, kind)
    except NotImplementedError:
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // block, num_bytes)
        blocks = generator.integers(0, 256, shape, dtype=np.uint8)
        if kind is GGMLQuantizationType.IQ1_M:
            set_scale_of_iq1_m(blocks)
        for place, size in SCALES.get(kind.name, ()):
            scales = generator.uniform(0.5, 1.0, (*shape[:-1], 1)) * size
            blocks[..., place : place + 2] = scales.astype(np.float16).view(np.uint8)
        return blocks.reshape(*values.shape[:-1], -1)


SCALES = {  # position of a block's float16 numbers, and their magnitude for weights of about 0.1
    "Q2_K": ((80, 6e-3), (82, 9e-3)),
    "Q3_K": ((108, 2e-3),),
    "Q4_K": ((0, 4e-4), (2, 3e-3)),
    "Q5_K": ((0, 2e-4), (2, 3e-3)),
    "Q6_K": ((208, 5e-5),),
    "IQ4_NL": ((0, 2e-3),),
    "IQ4_XS": ((0, 1e-4),),
    "IQ1_S": ((0, 1e-2),),
    "IQ2_XXS": ((0, 1e-3),),
    "IQ2_XS": ((0, 1e-3),),
    "IQ2_S": ((0, 1e-3),),
    "IQ3_XXS": ((0, 5e-4),),
    "IQ3_S": ((0, 5e-4),),
}


def set_scale_of_iq1_m(blocks: np.ndarray) -> None:
    """Write 0.01 to the highest 4 bits of the last four words of each block."""
    (bits,) = np.array([0.01], dtype=np.float16).view(np.uint16)
    for place in range(4):
        last = blocks[..., 49 + 2 * place]
        last[...] = last & 0xF | ((int(bits) >> (4 * place)) & 0xF) << 4


def permute(rows: np.ndarray, heads: int, back: bool = False) -> np.ndarray:
    """Interleave the two halves of each head's rows, as llama.cpp's converter does, or undo this."""
    halves = (heads, -1, 2) if back else (heads, 2, -1)
    return rows.reshape(*halves, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def merge_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return each projection of a layer's experts as one tensor."""
    merged: dict[str, list[torch.Tensor]] = {}
    result: dict[str, torch.Tensor] = {}
    tensors = split_gate_up(tensors)
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        if match := EXPERT.fullmatch(name):
            merged.setdefault(f"{match[1]}.{match[3]}.weight", []).append(tensors[name])
        else:
            result[name] = tensors[name]
    return result | {name: torch.stack(parts) for name, parts in merged.items()}


def split_gate_up(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the experts of gpt-oss with separate gate and up, and stacks as (experts, outputs, inputs)."""
    result = {f"{name}.weight" if name.endswith(".sinks") else name: tensor for name, tensor in tensors.items()}
    for name in [name for name in tensors if ".experts.gate_up_proj" in name or ".experts.down_proj" in name]:
        if not (match := GPT_OSS_EXPERTS.fullmatch(name)):
            continue
        rows = result.pop(name) if match[3] else result.pop(name).mT
        kind = "bias" if match[3] else "weight"
        parts = (
            {"down_proj": rows} if match[2] == "down_proj" else {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]}
        )
        result |= {f"{match[1]}.{part}.{kind}": values.contiguous() for part, values in parts.items()}
    return result


def store_plain(plain: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    module, _, part = name.removesuffix(".weight").rpartition(".")
    stack = f"{module}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"
    if part in INTERLEAVED and stack in plain:
        plain[stack][..., INTERLEAVED[part]] = values.mT
        return
    if name in plain:
        plain[name] = values
        return
    before, projection = name.removesuffix(".weight").rsplit(".", 1)
    for number, expert in enumerate(values):
        plain[f"{before}.{number}.{projection}.weight"] = expert.contiguous()


def add_metadata(writer: GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    """Add the architecture's keys, from the model's config.json."""
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if full["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if full["rope_type"] == "longrope":
        factor = config["max_position_embeddings"] / full["original_max_position_embeddings"]
        magnitude = math.sqrt(1 + math.log(factor) / math.log(full["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(magnitude)
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for key in ("norm_epsilon", "layer_norm_eps", "norm_eps"):
        if key in config:
            writer.add_layer_norm_eps(config[key])
    adders: dict[str, Callable[[Any], None]] = {
        "num_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
        "use_parallel_residual": writer.add_parallel_residual,
    }
    for key, add in adders.items():
        if config.get(key) is not None:
            add(config[key])
    if architecture in ("gemma2", "gemma3", "phi3", "cohere2", "gpt-oss") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(full["mscale_all_dim"])
        writer.add_attn_temperature_scale(full["llama_4_scaling_beta"])
    if "vl" in architecture:
        writer.add_rope_dimension_sections([16, 8, 8, 0])
    if architecture.startswith("qwen3vl"):
        writer.add_num_deepstack_layers(3)
    if "sliding_attention" in rope:
        writer.add_float32(f"{architecture}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        writer.add_uint32(f"{architecture}.attention.sliding_window_pattern", 2)


def add_vocabulary(writer: GGUFWriter, directory: Path) -> None:
    """Add the tokenizer in the directory, as byte-level BPE."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
