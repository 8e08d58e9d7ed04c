"""Layouts of published checkpoints that other versions of the packers wrote, or other programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve_llm.common.errors import ModelError
from support import packed, packed_floats
from support.forward import load
from support.packed import Packing
from support.parity import check_greedy, check_logprobs, random_prompts
from support.quantised import edit_config

Tensors = dict[str, Tensor]
W4A16 = Packing("compressed", is_symmetric=True)
W4A16_ASYMMETRIC = Packing("compressed")
ONE_STAGE_EACH: tuple[dict[str, Any], ...] = ({}, {"tensor": 3}, {"pipeline": 2})


def change_tensors(directory: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = directory / "packed" / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def check(directory: Path, vocab_size: int) -> None:
    """Compare with transformers, on one rank and on several."""
    prompts = random_prompts(vocab_size)
    check_logprobs(directory / "packed", directory / "plain", prompts)
    check_greedy(directory / "packed", directory / "plain", prompts, ONE_STAGE_EACH, num_tokens=6)


def shorten_shapes(tensors: Tensors) -> Tensors:
    """As in Kimi-K2-Thinking."""
    return {name: tensor.int() if name.endswith("weight_shape") else tensor for name, tensor in tensors.items()}


def unpack_zeros(tensors: Tensors) -> Tensors:
    """As compressed-tensors wrote asymmetric weights until it packed zero points, too."""
    unpacked = {}
    for name, tensor in tensors.items():
        if name.endswith("weight_zero_point"):
            scales = tensors[name.replace("weight_zero_point", "weight_scale")]
            words = torch.stack([(tensor >> 4 * place) & 15 for place in range(8)], 1)
            unpacked[name] = (words.flatten(0, 1)[: len(scales)] - 8).to(torch.int8)
    return tensors | unpacked


def add_zeros(tensors: Tensors) -> Tensors:
    """Symmetric weights with the zero points that they do not need."""
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("weight_scale")}
    zeros = {name.replace("scale", "zero_point"): torch.zeros_like(tensor).char() for name, tensor in scales.items()}
    return tensors | zeros


@pytest.mark.parametrize(
    ("packing", "change"),
    [(W4A16, shorten_shapes), (W4A16_ASYMMETRIC, unpack_zeros), (W4A16, add_zeros)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_pack_quantized(packing: Packing, change: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    vocab_size = packed.make_packed(tmp_path, "llama", packing)
    change_tensors(tmp_path, change)
    check(tmp_path, vocab_size)


def test_zero_points_of_symmetric_weights_must_be_zero(tmp_path: Path) -> None:
    packed.make_packed(tmp_path, "llama", W4A16)
    name = "model.layers.1.mlp.up_proj.weight_zero_point"
    change_tensors(tmp_path, add_zeros)
    change_tensors(tmp_path, lambda tensors: tensors | {name: tensors[name] + 1})
    message = r"up_proj\.weight_zero_point has zero point 9, but config\.json: .* symmetric: true means 8"
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "packed")


@pytest.mark.parametrize(("form", "order"), [("fp8-channel", "static"), ("nvfp4", "static"), ("mxfp4", "weight")])
def test_orders_that_do_not_change_groups(form: str, order: str, tmp_path: Path) -> None:
    """GPTQ of llm-compressor names the order in which it rounded, for floats too."""
    vocab_size = packed_floats.make_packed(tmp_path, "llama", form)
    change = {"actorder": order}
    edit_config(tmp_path / "packed", lambda config: config["config_groups"]["group_0"]["weights"].update(change))
    check(tmp_path, vocab_size)


def test_scales_of_inputs_in_the_first_version_of_autofp8(tmp_path: Path) -> None:
    vocab_size = packed_floats.make_packed(tmp_path, "llama", "autofp8")
    change_tensors(tmp_path, lambda all: {name.replace("input_scale", "act_scale"): all[name] for name in all})
    check(tmp_path, vocab_size)


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "fp8_pb_wo"])
def test_blocks_of_model_optimizer(algorithm: str, tmp_path: Path) -> None:
    """Scales have two more dimensions; blocks are 128 x 128."""
    sizes = {"hidden_size": 128, "intermediate_size": 200}
    vocab_size = packed_floats.make_packed(tmp_path, "llama", "fp8-128", **sizes)

    def rename(tensors: Tensors) -> Tensors:
        scales = {name: tensor for name, tensor in tensors.items() if name.endswith("weight_scale_inv")}
        renamed = {name.removesuffix("_inv"): scale[:, None, :, None] for name, scale in scales.items()}
        return {name: tensor for name, tensor in tensors.items() if name not in scales} | renamed

    change_tensors(tmp_path, rename)
    settings = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    edit_config(tmp_path / "packed", lambda config: (config.clear(), config.update(method_of(settings))))
    check(tmp_path, vocab_size)


def method_of(settings: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "quantization": settings}


def test_blocks_of_quark(tmp_path: Path) -> None:
    """AMD's files may have a list of one configuration for weights."""
    vocab_size = packed_floats.make_packed(tmp_path, "llama", "fp8-native")

    def rename(tensors: Tensors) -> Tensors:
        return {name.replace("weight_scale_inv", "weight_scale"): tensor for name, tensor in tensors.items()}

    change_tensors(tmp_path, rename)
    quark = packed_floats._quark("fp8_e4m3", "per_block", block_size=[24, 40])
    quark["global_quant_config"]["weight"] = [quark["global_quant_config"]["weight"]]
    edit_config(tmp_path / "packed", lambda config: (config.clear(), config.update(quark)))
    check(tmp_path, vocab_size)


def split_experts(tensors: Tensors, form: str, joins_gate_up: bool) -> tuple[Tensors, Tensors]:
    """Return gpt-oss's tensors with experts as packed modules, and the plain ones of the same values."""
    plain = dict(tensors)
    stored = {}
    for name, tensor in tensors.items():
        before, _, last = name.rpartition(".")
        if not before.endswith(".experts"):
            renamed = name.replace(".router.", ".router.linear.") if joins_gate_up else name
            stored[renamed] = tensor
            continue
        product, kind = last.removesuffix("_bias"), "bias" if last.endswith("_bias") else "weight"
        halves = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)} if product == "gate_up_proj" else {}
        for number, expert in enumerate(tensor):
            rows = expert if kind == "bias" else expert.T
            parts = {product: slice(None)} if joins_gate_up or not halves else halves
            for part, chosen in parts.items():
                module = f"{before}.{part}s.{number}" if joins_gate_up else f"{before}.experts.{number}.{part}"
                if kind == "bias":
                    stored[f"{module}.bias"] = rows[chosen].contiguous()
                    continue
                numbers, whole = packed_floats.pack_module(rows[chosen].float().contiguous(), form)
                stored |= {f"{module}.{suffix}": one.contiguous() for suffix, one in numbers.items()}
                plain[name][number].T[chosen] = whole
    return stored, plain


@pytest.mark.parametrize(
    ("form", "joins_gate_up"), [("nf4-nested", True), ("nf4", True), ("nvfp4", False), ("fp8-channel", False)]
)
def test_experts_of_gpt_oss_as_modules(form: str, joins_gate_up: bool, tmp_path: Path) -> None:
    """As in unsloth's bitsandbytes files and in those of llm-compressor."""
    vocab_size = packed_floats.make_packed(tmp_path, "gpt_oss", form, choose=lambda name: False)
    stored, plain = split_experts(load_file(tmp_path / "plain" / "model.safetensors"), form, joins_gate_up)
    save_file(stored, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    check(tmp_path, vocab_size)
