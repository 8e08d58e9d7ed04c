"""fp8, int8, NVFP4 and bitsandbytes checkpoints are the models that transformers builds from the same numbers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve_llm.common.errors import ModelError
from serve_llm.common.hub import resolve_model
from support.engine import generate, greedy, make_engine
from support.forward import Harness, load
from support.matrix import mostly_slow
from support.packed_floats import CONFIGS, FLOAT8, make_packed, pack_checkpoint, pack_module
from support.parity import check_greedy, check_logprobs, random_prompts
from support.quantised import edit_config
from support.reference import reference_logprobs

FAMILIES = ("llama", "qwen3_moe", "phi3", "opt", "deepseek_v3", "gemma3_text", "gpt_neox", "glm")
PAIRS = [(family, form) for family in FAMILIES for form in CONFIGS]
FAST_PAIRS = [("llama", form) for form in CONFIGS] + [
    ("qwen3_moe", "nvfp4"),
    ("phi3", "fp8-channel"),
    ("deepseek_v3", "fp8-native"),
]


@pytest.mark.parametrize(("family", "form"), mostly_slow(PAIRS, FAST_PAIRS))
def test_every_format(family: str, form: str, tmp_path: Path) -> None:
    prompts = random_prompts(make_packed(tmp_path, family, form))
    check_logprobs(tmp_path / "packed", tmp_path / "plain", prompts)


RANKED = [("llama", form) for form in CONFIGS]
RANKED += [(family, form) for family in ("qwen3_moe", "gpt_neox") for form in list(CONFIGS)[::3]]
FAST_RANKED = [("llama", form) for form in ("fp8-block", "int8-static", "nvfp4", "torchao-int4")]
FAST_RANKED += [("qwen3_moe", "fp8-native")]


@pytest.mark.pairs("fp8 + TP", "fp8 + PP")
@pytest.mark.parametrize(("family", "form"), mostly_slow(RANKED, FAST_RANKED))
def test_several_ranks(family: str, form: str, tmp_path: Path) -> None:
    compare_ranks(tmp_path, random_prompts(make_packed(tmp_path, family, form)))


def compare_ranks(directory: Path, prompts: list[list[int]]) -> None:
    check_greedy(directory / "packed", directory / "plain", prompts, ({"tensor": 2}, {"tensor": 3}, {"pipeline": 2}))


@pytest.mark.parametrize("form", mostly_slow(CONFIGS, ("fp8-native",)))
def test_trained_weights(form: str, tmp_path: Path) -> None:
    """Uses the demo model's weights."""
    shutil.copytree(resolve_model("demo"), tmp_path / "plain")
    pack_checkpoint(tmp_path, form)
    spec, decoder = load(tmp_path / "packed")
    prompt = list(range(5, 45))
    (ours,) = Harness(spec, decoder, torch.float32).logprobs([prompt])
    assert (ours - reference_logprobs(tmp_path / "plain", prompt)).abs().max() < 1e-3
    compare_ranks(tmp_path, [prompt])


@pytest.mark.parametrize("sizes", [{"hidden_size": 48, "intermediate_size": 37}, {"hidden_size": 52, "head_dim": 10}])
@pytest.mark.parametrize("form", mostly_slow(["nf4", "nf4-nested"], ["nf4-nested"]))
def test_rows_that_are_not_whole_blocks(form: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """bitsandbytes divides a matrix into blocks regardless of rows, so a byte may hold two numbers of different
    rows."""
    prompts = random_prompts(make_packed(tmp_path, "llama", form, **sizes))
    check_logprobs(tmp_path / "packed", tmp_path / "plain", prompts)
    compare_ranks(tmp_path, prompts)


ATTENTION_GROUP = {"targets": ["LlamaAttention"], "weights": None, "input_activations": FLOAT8 | {"strategy": "tensor"}}


@pytest.mark.parametrize(
    ("form", "suffixes"),
    [
        ("autofp8", ("kv_scale",)),
        ("fp8-channel", ("q_scale", "k_scale", "v_scale", "k_zero_point")),
        ("modelopt-fp8", ("k_proj.k_scale", "v_proj.v_scale")),
        ("fp8-tensor", ("k_proj.output_scale", "v_proj.output_scale", "q_proj.output_scale")),
    ],
)
def test_scales_of_attention_have_no_effect(form: str, suffixes: tuple[str, ...], tmp_path: Path) -> None:
    make_packed(tmp_path, "llama", form)
    expected = Harness(*load(tmp_path / "packed"), torch.float32).logprobs([[1, 2, 3]])[0]
    path = tmp_path / "packed" / "model.safetensors"
    scales = {f"model.layers.{layer}.self_attn.{suffix}": torch.ones(1) for layer in (0, 1) for suffix in suffixes}
    save_file(load_file(path) | scales, path)
    if "q_scale" in suffixes:
        edit_config(tmp_path / "packed", lambda config: config["config_groups"].update(attention=ATTENTION_GROUP))
    assert torch.equal(Harness(*load(tmp_path / "packed"), torch.float32).logprobs([[1, 2, 3]])[0], expected)


def test_formats_of_modules_of_model_optimizer(tmp_path: Path) -> None:
    """Attention in fp8 and the rest in NVFP4, as quant_algo MIXED_PRECISION lists them."""
    vocab_size = make_packed(tmp_path, "llama", "modelopt-nvfp4", choose=lambda name: ".mlp." in name)
    (tmp_path / "packed").rename(tmp_path / "mlp")
    pack_checkpoint(tmp_path, "modelopt-fp8", choose=lambda name: ".self_attn." in name)
    path = tmp_path / "packed" / "model.safetensors"
    stored = {name: tensor for name, tensor in load_file(path).items() if ".mlp." not in name}
    both = load_file(tmp_path / "mlp" / "model.safetensors")
    stored |= {name: tensor for name, tensor in both.items() if ".mlp." in name}
    save_file(stored, path, metadata={"format": "pt"})
    names = [name.removesuffix(".weight") for name in stored if name.endswith("_proj.weight")]
    layers = {name: {"quant_algo": "NVFP4" if ".mlp." in name else "FP8"} for name in names}

    def list_layers(config: dict[str, Any]) -> None:
        config.clear()
        config |= {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}

    edit_config(tmp_path / "packed", list_layers)
    spec = check_logprobs(tmp_path / "packed", tmp_path / "plain", random_prompts(vocab_size))
    assert spec.grouped is not None and len(spec.grouped.layer_forms) > 1


@pytest.mark.parametrize(
    "form",
    ["int8-static", "int8-asymmetric", "int4-in-bytes", "nvfp4", "modelopt-nvfp4", "nf4-nested", "bitsandbytes-int8"],
)
def test_integers_stay_packed(form: str, tmp_path: Path) -> None:
    make_packed(tmp_path, "llama", form)
    assert "(down): RowParallelLinear(96 -> 64, int" in repr(load(tmp_path / "packed")[1])


@pytest.mark.parametrize("form", [form for form in CONFIGS if "fp8" in form or form == "fbgemm"])
def test_8_bit_floats_stay_packed(form: str, tmp_path: Path) -> None:
    make_packed(tmp_path, "llama", form)
    assert "(down): RowParallelLinear(96 -> 64, fp8 in groups" in repr(load(tmp_path / "packed")[1])


@pytest.mark.parametrize("quantization", ["int8", "int4-g32"])
def test_8_bit_floats_are_quantised_again(quantization: str, tmp_path: Path) -> None:
    """They give the same result as the same numbers in floating point."""
    prompts = random_prompts(make_packed(tmp_path, "llama", "fp8-native"))
    wanted = [greedy(number, prompt, 6, logprobs=0) for number, prompt in enumerate(prompts)]
    expected, found = (
        generate(make_engine(tmp_path / kind, dtype="float32", quantization=quantization), wanted)
        for kind in ("plain", "packed")
    )
    assert [found[n].token_ids for n in found] == [expected[n].token_ids for n in expected]
    assert [found[n].logprobs for n in found] == [expected[n].logprobs for n in expected], "to the bit"


NOT_JSON = torch.tensor(list(b"{"), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("form", "suffix", "tensor", "message"),
    [
        ("fp8-channel", "weight", None, r"the checkpoint lacks model\.layers\.1\.self_attn\.q_proj\.weight"),
        ("int4-in-bytes", "weight", torch.full((64, 64), 8, dtype=torch.int8), r"weight has numbers beyond the 4 bits"),
        ("int4-in-bytes", "weight_zero_point", torch.ones(64, 4), r"weight_zero_point is stored as torch\.float32"),
        ("int8-asymmetric", "weight_zero_point", torch.ones(1), r"asks for one zero point for each of 64 outputs"),
        ("modelopt-nvfp4", "weight_scale_2", torch.ones(2), r"weight_scale_2 has shape \[2\], but must be one number"),
        ("fp8-tensor", "weight_scale", torch.ones(2), r"weight_scale has shape \[2\], but .* one scale for the tensor"),
        (
            "fp8-channel",
            "weight",
            torch.ones(64, 64),
            r"q_proj\.weight is stored as torch\.float32, but .*float8_e4m3fn",
        ),
        ("nvfp4", "weight_scale", torch.ones(64, 3), r"weight_scale has shape \[64, 3\], but .* \[64, 4\]"),
        ("nf4", "weight.absmax", torch.ones(7), r"weight\.absmax has shape \[7\], but .* \[128\]"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", NOT_JSON, r"__nf4 does not describe a quantised weight"),
    ],
)
def test_what_does_not_fit_is_named(
    form: str, suffix: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    make_packed(tmp_path, "llama", form)
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.1.self_attn.q_proj.{suffix}"
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "packed")


@pytest.mark.parametrize("form", ["fp8-channel", "nvfp4"])
def test_quantised_experts_of_llama_4_are_modules(form: str, tmp_path: Path) -> None:
    """Other checkpoints store them as stacks."""
    vocab_size = make_packed(tmp_path, "llama4_text", form, intermediate_size_mlp=96)
    paths = [tmp_path / kind / "model.safetensors" for kind in ("plain", "packed")]
    plain, stored = map(load_file, paths)
    for name in [name for name in stored if name.endswith("experts.gate_up_proj")]:
        down = name.replace("gate_up_proj", "down_proj")
        stacks = stored.pop(name), stored.pop(down)
        for number, (gate_up, expert_down) in enumerate(zip(*stacks, strict=True)):
            parts = dict(zip(("gate", "up", "down"), (*gate_up.T.chunk(2), expert_down.T), strict=True))
            whole = {}
            for part, weight in parts.items():
                packed, whole[part] = pack_module(weight.float().contiguous(), form)
                module = f"{name.removesuffix('gate_up_proj')}{number}.{part}_proj"
                stored |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
            plain[name][number] = torch.cat((whole["gate"], whole["up"])).T
            plain[down][number] = whole["down"].T
    save_file(plain, paths[0], metadata={"format": "pt"})
    save_file(stored, paths[1], metadata={"format": "pt"})
    prompts = random_prompts(vocab_size)
    check_logprobs(tmp_path / "packed", tmp_path / "plain", prompts)
    _, decoder = load(tmp_path / "packed")
    assert "(down): RowParallelLinear(96 -> 64, float32" not in repr(decoder)


def make_stacks(directory: Path, family: str, form: str) -> int:
    """Store the experts of a layer, and their scales, as one tensor each."""
    vocab_size = make_packed(directory, family, form)
    paths = [directory / kind / "model.safetensors" for kind in ("plain", "packed")]
    plain, stored = map(load_file, paths)
    for name in [name for name in stored if stored[name].dim() == 3]:
        experts = [pack_module(weight.float(), form) for weight in stored[name]]
        plain[name] = torch.stack([whole for _, whole in experts])
        for suffix in experts[0][0]:
            if suffix != "input_scale":
                stored[f"{name.removesuffix('.weight')}.{suffix}"] = torch.stack(
                    [packed[suffix] for packed, _ in experts]
                )
    save_file(plain, paths[0], metadata={"format": "pt"})
    save_file(stored, paths[1], metadata={"format": "pt"})
    return vocab_size


@pytest.mark.parametrize("form", mostly_slow(["fp8-native", "autofp8", "fbgemm"], ["fp8-native"]))
def test_stacks_of_8_bit_floats(form: str, tmp_path: Path) -> None:
    prompts = random_prompts(make_stacks(tmp_path, "granitemoe", form))
    spec = check_logprobs(tmp_path / "packed", tmp_path / "plain", prompts)
    assert spec.grouped is not None
    form_of_experts = spec.grouped.find_form("layers.1.ffn.experts.0.down")
    assert form_of_experts is not None and form_of_experts.is_float8
    whole_experts = {"tensor": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    check_greedy(tmp_path / "packed", tmp_path / "plain", prompts, ({}, {"tensor": 3}, {"pipeline": 2}, whole_experts))


@pytest.mark.parametrize("form", mostly_slow(["autofp8", "nf4", "torchao-int8"], ["nf4"]))
def test_gpt_oss_in_other_formats_than_its_own(form: str, tmp_path: Path) -> None:
    """Its experts are stacks, which may be in fp8."""
    prompts = random_prompts(make_packed(tmp_path, "gpt_oss", form))
    if form == "autofp8":
        paths = [tmp_path / kind / "model.safetensors" for kind in ("plain", "packed")]
        plain, stored = map(load_file, paths)
        for name in [name for name in stored if stored[name].dim() == 3]:
            scales = stored[name].abs().amax((1, 2), keepdim=True) / 448
            stored[name] = (stored[name] / scales).to(torch.float8_e4m3fn)
            plain[name], stored[f"{name}_scale"] = stored[name].float() * scales, scales
        save_file(plain, paths[0], metadata={"format": "pt"})
        save_file(stored, paths[1], metadata={"format": "pt"})
    check_logprobs(tmp_path / "packed", tmp_path / "plain", prompts)
    compare_ranks(tmp_path, prompts)


def make_fbgemm_llama_4(directory: Path) -> int:
    """Write experts as fp8 stacks (experts, inputs, outputs), with scales as transformers declares them."""
    vocab_size = make_packed(directory, "llama4_text", "fbgemm", intermediate_size_mlp=96)
    paths = [directory / kind / "model.safetensors" for kind in ("plain", "packed")]
    plain, stored = map(load_file, paths)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        scales = stored[name].abs().amax(1, keepdim=True) / 448
        stored[name] = (stored[name] / scales).to(torch.float8_e4m3fn)
        plain[name] = stored[name].float() * scales
        stored[f"{name}_scale"] = scales.mT.contiguous() if "down" in name else scales
    save_file(plain, paths[0], metadata={"format": "pt"})
    save_file(stored, paths[1], metadata={"format": "pt"})
    return vocab_size


def test_fbgemm_stacks_of_llama_4(tmp_path: Path) -> None:
    prompts = random_prompts(make_fbgemm_llama_4(tmp_path))
    spec = check_logprobs(tmp_path / "packed", tmp_path / "plain", prompts)
    assert spec.grouped is not None
    form = spec.grouped.find_form("layers.1.ffn.experts.0.down")
    assert form is not None and form.is_float8
    whole_experts = {"tensor": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    check_greedy(tmp_path / "packed", tmp_path / "plain", prompts, ({}, {"tensor": 3}, {"pipeline": 2}, whole_experts))


def test_scales_of_fbgemm_stacks_must_fit(tmp_path: Path) -> None:
    make_fbgemm_llama_4(tmp_path)
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.feed_forward.experts.down_proj"
    save_file({**tensors, f"{name}_scale": torch.ones(5, 1, 7)}, path)
    with pytest.raises(ModelError, match=r"down_proj_scale has shape \[5, 1, 7\], but .* each of 64 outputs"):
        load(tmp_path / "packed")
    save_file({**tensors, name: tensors[name].float()}, path)
    with pytest.raises(ModelError, match=r"down_proj is stored as torch\.float32, but .*float8_e4m3fn"):
        load(tmp_path / "packed")
