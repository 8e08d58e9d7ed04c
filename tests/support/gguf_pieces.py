"""How llama.cpp's converter stores architectures whose tensors are split or joined differently from checkpoints, and
the metadata that it writes for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.gguf_files import add_vocabulary, choose_type, pack
from support.tiny import HYBRIDS, make_checkpoint, make_tokenizer

HEADS = {"hidden_size": 128, "num_attention_heads": 4}
SIZES = {**HEADS, "intermediate_size": 96, "num_hidden_layers": 2}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
LATENT |= {**SIZES, "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
LATENT |= {"num_key_value_heads": 4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
YARN |= {"mscale": 0.707, "mscale_all_dim": 0.707}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
GPT2 = {"n_embd": 128, "n_inner": 96, "n_head": 4, "n_layer": 2}
MOE: dict[str, Any] = {"num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # as in `gguf_files`
    "deepseek_v2": ("deepseek2", {**LATENT, "q_lora_rank": None, "rope_parameters": YARN}),
    "deepseek_v3": ("deepseek2", LATENT),
    "glm4_moe": ("glm4moe", {**SIZES, **MOE, "num_key_value_heads": 2, "head_dim": 32}),
    "llama4_text": (
        "llama4",
        {**SIZES, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 64}
        | {"intermediate_size_mlp": 96, "num_local_experts": 4, "interleave_moe_layer_step": 2, "attn_scale": 0.1}
        | {"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192},
    ),
    "granitemoe": ("granitemoe", {**SIZES, "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 32}),
    "granitemoeshared": (
        "granitemoe",
        {**SIZES, "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 32, "shared_intermediate_size": 64},
    ),
    "glm": ("chatglm", {**SIZES, "num_key_value_heads": 2, "head_dim": 32}),
    "falcon": ("falcon", {**HEADS, "num_hidden_layers": 2, "num_kv_heads": 2, "ffn_hidden_size": 96}),
    "gpt_neox": ("gptneox", {**SIZES, "rope_parameters": PARTIAL_ROPE}),
    "gpt2": ("gpt2", GPT2),
    "bloom": ("bloom", {"hidden_size": 128, "n_head": 4, "n_layer": 2}),
    "mpt": ("mpt", {"d_model": 128, "n_heads": 4, "n_layers": 2, "attn_config": {"clip_qkv": 2.5}}),
    "qwen": ("qwen", {**SIZES, "intermediate_size": 192, "kv_channels": 32}),
}
HYBRID = {**SIZES, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 32}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
HYBRID |= {"linear_value_head_dim": 32}
HYBRID_EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
FAMILIES |= {
    "qwen3_next": ("qwen3next", HYBRID | HYBRID_EXPERTS),
    "qwen3_5_text": ("qwen35", HYBRID),
    "qwen3_5_moe_text": ("qwen35moe", HYBRID | HYBRID_EXPERTS),
}
QKV = ("attention.query_key_value.", "self_attention.query_key_value.")


def make_gguf(directory: Path, family: str, storage: str = "Q8_0", *, kept: str = "", **overrides: Any) -> int:
    """Like `gguf_files.make_gguf`. kept: tensors whose names end so are stored as in the checkpoint."""
    architecture, sizes = FAMILIES[family]
    vocab_size = make_checkpoint(directory / "plain", family, std=0.1, **{**sizes, **overrides})
    make_tokenizer(directory / "plain", vocab_size)
    config = json.loads((directory / "plain" / "config.json").read_text())
    writer = GGUFWriter(directory / "model.gguf", architecture)
    add_metadata(writer, config, architecture)
    add_vocabulary(writer, directory / "plain")
    plain = load_file(directory / "plain" / "model.safetensors")
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    stored = {name: [tensor] for name, tensor in plain.items() if kept and name.endswith(kept)}
    changed = {name: tensor for name, tensor in plain.items() if name not in stored}
    pieces = list_pieces(family, config, changed) | stored
    write_tensors(writer, plain, pieces, gguf.get_tensor_name_map(number, 4), storage)
    save_file(plain, directory / "plain" / "model.safetensors", metadata={"format": "pt"})
    return vocab_size


def write_tensors(
    writer: GGUFWriter,
    plain: dict[str, Tensor],
    pieces: dict[str, list[Tensor]],
    names: gguf.TensorNameMap,
    storage: str,
) -> None:
    """Write the file, and change `plain` to the values that it represents."""
    generator = np.random.default_rng(0)
    for name, views in pieces.items():
        shape = plain[name].shape[1:] if name in plain else views[0].shape[-1 if ".in_proj_" in name else 1 :]
        rows = [view.reshape(-1, *(shape if view.dim() > len(shape) + 1 else view.shape[1:])) for view in views]
        values = torch.cat(rows).contiguous().numpy()
        kind = choose_type(name, values, storage, {})
        if kind == GGMLQuantizationType.F32:
            writer.add_tensor(find_name(names, name), values)
            continue
        packed = pack(values, kind, generator)
        writer.add_tensor(find_name(names, name), packed, raw_dtype=kind)
        whole = torch.from_numpy(quants.dequantize(packed, kind).copy())
        for view, part in zip(views, whole.split([len(one) for one in rows]), strict=True):
            view.copy_(part.reshape(view.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def list_pieces(family: str, config: dict[str, Any], plain: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the converter's name before renaming -> views of tensors of `plain` whose rows follow each other in the
    file."""
    pieces: dict[str, list[Tensor]] = {}
    for name, tensor in plain.items():
        if family in HYBRIDS and not (".experts." in name and name.endswith(".weight")):
            pieces |= list_hybrid_pieces(family, config, name, tensor)
        elif any(part in name for part in QKV):
            pieces[name] = split_qkv(family, config, tensor)
        elif family == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            pieces[name] = [tensor.T]
        elif family.startswith("granitemoe") and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            pieces[name] = [tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2)]
        elif ".kv_b_proj." in name:
            per_head = tensor.view(config["num_attention_heads"], -1, config["kv_lora_rank"])
            nope = config["qk_nope_head_dim"]
            pieces[name.replace("kv_b_proj", "k_b_proj")] = [per_head[:, :nope].transpose(1, 2)]
            pieces[name.replace("kv_b_proj", "v_b_proj")] = [per_head[:, nope:]]
        elif family == "glm" and ".self_attn." in name and "o_proj" not in name:  # as in THUDM's own checkpoints
            joined = re.sub(r"self_attn\.[qkv]_proj", "self_attn.qkv_proj", name)
            pieces[joined] = [plain[joined.replace("qkv_proj", f"{part}_proj")] for part in "qkv"]
        elif name.endswith("experts.gate_up_proj"):
            gate, up = tensor.mT.chunk(2, dim=1)
            pieces |= {name.replace("gate_up", part) + ".weight": [one] for part, one in (("gate", gate), ("up", up))}
        elif name.endswith("feed_forward.experts.down_proj"):
            pieces[f"{name}.weight"] = [tensor.mT]
        elif ".experts." in name:
            before, _, rest = name.partition(".experts.")
            pieces.setdefault(f"{before}.experts.{rest.partition('.')[2]}", []).append(tensor[None])
        elif name.endswith("input_linear.weight"):
            gate, up = tensor.chunk(2, dim=tensor.dim() - 2)
            base = name.removesuffix("input_linear.weight")
            is_shared = "shared_mlp" in name
            pieces[f"{base}{'gate_proj' if is_shared else 'input_linear.gate'}.weight"] = [gate]
            pieces[f"{base}{'up_proj' if is_shared else 'input_linear.up'}.weight"] = [up]
        else:
            pieces[name.replace("e_score_correction_bias", "e_score_correction.bias")] = [tensor]
    return pieces


def list_hybrid_pieces(family: str, config: dict[str, Any], name: str, tensor: Tensor) -> dict[str, list[Tensor]]:
    """Return the pieces of one tensor of Qwen3-Next or Qwen3.5. Norms have their whole weight. In Qwen3.5, the heads
    that share a key head are not next to each other."""
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = key_heads * config["linear_key_head_dim"]

    def order(rows: Tensor) -> Tensor:
        """Reorder the rows of all heads, of which those that share a key head are next to each other."""
        per_key = rows.unflatten(0, (key_heads, heads // key_heads, -1))
        return per_key if family == "qwen3_next" else per_key.transpose(0, 1)

    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        return {name.replace("gate_up", part) + ".weight": [one] for part, one in (("gate", gate), ("up", up))}
    if name.endswith("experts.down_proj"):
        return {f"{name}.weight": [tensor]}
    if name.endswith(".A_log"):
        return {name: [-order(tensor).flatten().exp()]}
    if name.endswith(".dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): [order(tensor).flatten()]}
    if name.endswith(".conv1d.weight"):
        rows = tensor.squeeze(1)
        return {name: [torch.cat((rows[: 2 * keys], order(rows[2 * keys :]).flatten(0, 2)))]}
    if name.endswith("norm.weight"):
        return {name: [tensor if ".linear_attn." in name else tensor + 1]}
    if name.endswith("in_proj_qkvz.weight"):
        sizes = [keys // key_heads] * 2 + [heads * config["linear_value_head_dim"] // key_heads] * 2
        *qkv, z = tensor.unflatten(0, (key_heads, -1)).split(sizes, dim=1)
        return {name.replace("qkvz", "qkv"): qkv, name.replace("qkvz", "z"): [z]}
    if name.endswith("in_proj_qkv.weight"):
        return {name: [tensor[:keys], tensor[keys : 2 * keys], order(tensor[2 * keys :])]}
    if name.endswith(("in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight")):
        return {name: [order(tensor)]}
    if name.endswith("linear_attn.out_proj.weight") and family != "qwen3_next":
        return {name: [tensor.unflatten(1, (key_heads, heads // key_heads, -1)).transpose(1, 2)]}
    return {name: [tensor]}


def split_qkv(family: str, config: dict[str, Any], tensor: Tensor) -> list[Tensor]:
    """Return all query rows, then all key rows, then all value rows."""
    heads = config.get("n_head") or config["num_attention_heads"]
    if family == "falcon":
        groups = tensor.view(config["num_kv_heads"], heads // config["num_kv_heads"] + 2, -1, *tensor.shape[1:])
        return [groups[:, :-2], groups[:, -2], groups[:, -1]]
    groups = tensor.view(heads, 3, -1, *tensor.shape[1:])
    return [groups[:, part] for part in range(3)]


NAMES = {  # entries that the gguf package's map lacks
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "block_sparse_moe.input_linear.gate": "ffn_gate_exps",
    "block_sparse_moe.input_linear.up": "ffn_up_exps",
    "shared_mlp.gate_proj": "ffn_gate_shexp",
    "shared_mlp.up_proj": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}


def find_name(names: gguf.TensorNameMap, name: str) -> str:
    for source, target in NAMES.items():
        if f".{source}." in name:
            layer = next(part for part in name.split(".") if part.isdigit())
            return f"blk.{layer}.{target}.{name.rpartition('.')[2]}"
    suffixes = (".weight", ".bias")
    found = names.get_name(name, suffixes) or names.get_name(name.partition(".")[2], suffixes)  # as in the base model
    assert found is not None, name
    return str(found)


def add_metadata(writer: GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    def first(*keys: str) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), None)

    width, heads = first("hidden_size", "n_embd", "d_model"), first("num_attention_heads", "n_head", "n_heads")
    writer.add_context_length(first("max_position_embeddings", "n_positions", "seq_length", "max_seq_len") or 2048)
    writer.add_embedding_length(width)
    writer.add_block_count(first("num_hidden_layers", "n_layer", "n_layers"))
    if architecture != "llama4":
        writer.add_feed_forward_length(first("ffn_hidden_size", "intermediate_size", "n_inner") or 4 * width)
    writer.add_head_count(heads)
    for key in ("layer_norm_epsilon", "layer_norm_eps"):
        if key in config:
            add = writer.add_layer_norm_rms_eps if architecture == "qwen" else writer.add_layer_norm_eps
            add(config[key])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    ADD[architecture](writer, config, heads)
    adders: dict[str, Callable[[Any], None]] = {
        "n_routed_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "n_shared_experts": writer.add_expert_shared_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "norm_topk_prob": writer.add_expert_weights_norm,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "n_group": lambda value: writer.add_uint32(f"{architecture}.expert_group_count", value),
        "topk_group": lambda value: writer.add_uint32(f"{architecture}.expert_group_used_count", value),
        "shared_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
    }
    for key, add in adders.items():
        if config.get(key) is not None:
            add(config[key])


def add_deepseek(writer: GGUFWriter, config: dict[str, Any], heads: int) -> None:
    rope_dim, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope_dim)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope_dim)
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    is_v3 = config["model_type"] == "deepseek_v3"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if is_v3 else gguf.ExpertGatingFuncType.SOFTMAX)
    if (rope := config["rope_parameters"])["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def add_heads(writer: GGUFWriter, config: dict[str, Any], heads: int) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(int(head_dim * config["rope_parameters"].get("partial_rotary_factor", 1.0)))


def add_glm(writer: GGUFWriter, config: dict[str, Any], heads: int) -> None:
    add_heads(writer, config, heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def add_llama4(writer: GGUFWriter, config: dict[str, Any], heads: int) -> None:
    add_heads(writer, config, heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])


def add_hybrid(writer: GGUFWriter, config: dict[str, Any], heads: int) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]))
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)


def add_falcon(writer: GGUFWriter, config: dict[str, Any], heads: int) -> None:
    writer.add_tensor_data_layout("jploski")
    writer.add_head_count_kv(config["num_kv_heads"])


def add_neox(writer: GGUFWriter, config: dict[str, Any], heads: int) -> None:
    head_dim = config["hidden_size"] // heads
    writer.add_rope_dimension_count(int(head_dim * config["rope_parameters"]["partial_rotary_factor"]))
    writer.add_parallel_residual(config["use_parallel_residual"])


def add_mpt(writer: GGUFWriter, config: dict[str, Any], heads: int) -> None:
    writer.add_clamp_kqv(config["attn_config"]["clip_qkv"])
    writer.add_max_alibi_bias(config["attn_config"]["alibi_bias_max"])


def add_qwen(writer: GGUFWriter, config: dict[str, Any], heads: int) -> None:
    writer.add_rope_freq_base(config["rotary_emb_base"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)


def add_nothing(writer: GGUFWriter, config: dict[str, Any], heads: int) -> None:
    pass


ADD: dict[str, Callable[[GGUFWriter, dict[str, Any], int], None]] = {
    "deepseek2": add_deepseek,
    "chatglm": add_heads,
    "glm4moe": add_glm,
    "llama4": add_llama4,
    "granitemoe": add_heads,
    "falcon": add_falcon,
    "gptneox": add_neox,
    "gpt2": add_nothing,
    "bloom": add_nothing,
    "mpt": add_mpt,
    "qwen": add_qwen,
    "qwen3next": add_hybrid,
    "qwen35": add_hybrid,
    "qwen35moe": add_hybrid,
}
