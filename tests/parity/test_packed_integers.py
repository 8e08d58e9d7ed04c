"""AWQ, GPTQ and pack-quantized checkpoints are the models that transformers builds from the same numbers, on any
ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve_llm.common.errors import ModelError
from serve_llm.common.hub import resolve_model
from support.forward import load
from support.matrix import mostly_slow
from support.packed import SCALED, Packing, make_packed, pack_checkpoint
from support.parity import check_greedy, check_logprobs, random_prompts
from support.quantised import is_linear

PACKINGS = {
    "awq": Packing("awq"),
    "awq-32": Packing("awq", group_size=32),
    "awq-symmetric": Packing("awq", is_symmetric=True),
    "gptq": Packing("gptq"),
    "gptq-symmetric": Packing("gptq", is_symmetric=True, group_size=32),
    "gptq-order": Packing("gptq", has_order=True),
    "gptq-2": Packing("gptq_v2", bits=2),
    "gptq-3": Packing("gptq", bits=3, has_order=True),
    "gptq-8": Packing("gptq_v2", bits=8, is_symmetric=True),
    "gptq-channel": Packing("gptq", group_size=0),
    "w4a16": Packing("compressed", is_symmetric=True, scale_dtype=torch.bfloat16),
    "w4a16-asymmetric": Packing("compressed"),
    "w4a16-order": Packing("compressed", has_order=True, is_symmetric=True),
    "w8a16-channel": Packing("compressed", bits=8, group_size=0, is_symmetric=True),
    "w8a16-channel-asymmetric": Packing("compressed", bits=8, group_size=0),
    "w8a16": Packing("compressed", bits=8),
    "awq-gemv": Packing("awq_gemv"),
    "awq-gemv-64": Packing("awq_gemv", group_size=64, is_symmetric=True),
}
LENGTHS = (1, 17, 60)


def check(directory: Path, vocab_size: int) -> None:
    """Compare with transformers."""
    prompts = random_prompts(vocab_size)
    check_logprobs(directory / "packed", directory / "plain", prompts)


@pytest.mark.parametrize("name", PACKINGS)
def test_every_packing(name: str, tmp_path: Path) -> None:
    check(tmp_path, make_packed(tmp_path, "llama", PACKINGS[name]))


PAIRS = [
    (family, packing)
    for family in (
        *("qwen3_moe", "opt", "phi3", "gpt_neox", "glm", "deepseek_v3", "gemma3_text", "qwen", "bloom", "mpt"),
        "qwen3_next",
    )
    for packing in ("awq", "gptq-order", "w4a16-asymmetric", "w8a16-channel-asymmetric")
]
FAST_PAIRS = [("qwen3_moe", "gptq-order"), ("phi3", "awq"), ("deepseek_v3", "w4a16-asymmetric"), ("gpt_neox", "awq")]
FAST_PAIRS += [("glm", "w8a16-channel-asymmetric"), ("qwen3_next", "awq")]


@pytest.mark.parametrize(("family", "packing"), mostly_slow(PAIRS, FAST_PAIRS))
def test_families(family: str, packing: str, tmp_path: Path) -> None:
    check(tmp_path, make_packed(tmp_path, family, PACKINGS[packing]))


@pytest.mark.parametrize("family", SCALED)
def test_activations_that_autoawq_scales(family: str, tmp_path: Path) -> None:
    packing = Packing("awq", scales_activations=True)
    vocab_size = make_packed(tmp_path, family, packing)
    assert SCALED[family][1] in str(load_file(tmp_path / "packed" / "model.safetensors").keys())
    check(tmp_path, vocab_size)
    compare_ranks(tmp_path, random_prompts(vocab_size), [{"tensor": 3}, {"pipeline": 2}])


def test_modules_of_gpt2(tmp_path: Path) -> None:
    """GPT-2 checkpoints store weights transposed, but packed ones do not."""
    names = ("attn.c_attn.weight", "c_proj.weight", "c_fc.weight")
    check(tmp_path, make_packed(tmp_path, "gpt2", PACKINGS["gptq"], choose=lambda name: name.endswith(names)))


RANKED = [("llama", name) for name in PACKINGS]
RANKED += [(family, name) for family in ("qwen3_moe", "gpt_neox", "deepseek_v3") for name in list(PACKINGS)[::3]]
FAST_RANKED = [("llama", name) for name in ("gptq-order", "w4a16-asymmetric")] + [("qwen3_moe", "awq")]


@pytest.mark.parametrize(("family", "name"), mostly_slow(RANKED, FAST_RANKED))
def test_several_ranks(family: str, name: str, tmp_path: Path) -> None:
    """Ranks begin in the middle of words and groups."""
    prompts = random_prompts(make_packed(tmp_path, family, PACKINGS[name]))
    compare_ranks(tmp_path, prompts, [{}, {"tensor": 2}, {"tensor": 3}, {"pipeline": 2}])


def compare_ranks(directory: Path, prompts: list[list[int]], grids: list[dict[str, int]]) -> None:
    check_greedy(directory / "packed", directory / "plain", prompts, grids, num_tokens=8)


@pytest.mark.parametrize("name", mostly_slow(PACKINGS, ("awq",)))
def test_trained_weights(name: str, tmp_path: Path) -> None:
    """Uses the demo model's weights."""
    shutil.copytree(resolve_model("demo"), tmp_path / "plain")
    pack_checkpoint(tmp_path / "plain", tmp_path / "packed", PACKINGS[name])
    check(tmp_path, 4096)
    compare_ranks(tmp_path, random_prompts(4096), [{}, {"tensor": 3}, {"pipeline": 2}])


def test_the_head_and_biases_of_zeros(tmp_path: Path) -> None:
    """GPTQModel can pack the head too; AutoGPTQ writes biases that the model does not have."""
    vocab_size = make_packed(
        tmp_path, "llama", PACKINGS["gptq"], choose=lambda name: name.endswith(("proj.weight", "head.weight"))
    )
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.o_proj.bias"] = torch.zeros(64)
    save_file(tensors, path)
    check(tmp_path, vocab_size)
    tensors["model.layers.1.self_attn.o_proj.bias"][3] = 1.0
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"no parameter of a LlamaForCausalLM uses .*o_proj\.bias"):
        load(tmp_path / "packed")


def test_modules_that_differ(tmp_path: Path) -> None:
    """GPTQModel's `dynamic` sets other bits for some modules, none for others; q, k and v may differ too."""
    wider = ("model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj")
    make_packed(tmp_path / "8", "llama", Packing("gptq", bits=8))
    vocab_size = make_packed(
        tmp_path, "llama", PACKINGS["gptq"], choose=lambda name: name.endswith("proj.weight") and ".2." not in name
    )
    for folder in ("packed", "plain"):
        path = tmp_path / folder / "model.safetensors"
        tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(wider)}
        others = load_file(tmp_path / "8" / folder / "model.safetensors")
        tensors |= {name: tensor for name, tensor in others.items() if name.startswith(wider)}
        save_file(tensors, path, metadata={"format": "pt"})
    path = tmp_path / "packed" / "config.json"
    config = json.loads(path.read_text())
    rules = {r"+:model\.layers\.(1\.mlp\.down|0\..*\.v_)": {"bits": 8}, r"-:model\.layers\.2\.": {}}
    config["quantization_config"]["dynamic"] = rules
    path.write_text(json.dumps(config))
    check(tmp_path, vocab_size)


@pytest.mark.parametrize(
    ("layout", "method", "named"),
    [
        ("gptq", "auto-round", {"packing_format": "auto_round:auto_gptq"}),
        ("gptq_v2", "auto-round", {"packing_format": "auto_round"}),
        ("gptq_v2", "intel/auto-round", {"backend": "auto_round:exllamav2"}),
    ],
)
def test_settings_of_autoround_for_modules(layout: str, method: str, named: dict[str, str], tmp_path: Path) -> None:
    """Its layouts are those of GPTQ; one module is not quantised."""
    left_out = "model.layers.1.mlp.up_proj"
    vocab_size = make_packed(
        tmp_path, "llama", Packing(layout), choose=lambda name: is_linear(name) and left_out not in name
    )
    path = tmp_path / "packed" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": method, **named, "bits": 4}
    config["quantization_config"] |= {"group_size": 16, "sym": False, "extra_config": {left_out: {"bits": 16}}}
    path.write_text(json.dumps(config))
    check(tmp_path, vocab_size)


def test_one_scale_of_a_tensor(tmp_path: Path) -> None:
    vocab_size = make_packed(tmp_path, "llama", PACKINGS["w8a16-channel"])
    paths = [tmp_path / kind / "model.safetensors" for kind in ("packed", "plain")]
    packed, plain = map(load_file, paths)
    for name in [name for name in packed if name.endswith("weight_scale")]:
        scale = packed[name].float().mean()
        plain[name.removesuffix("_scale")] *= scale / packed[name].float()
        packed[name] = scale.reshape(1)
    for path, tensors in zip(paths, (packed, plain), strict=True):
        save_file(tensors, path, metadata={"format": "pt"})
    path = tmp_path / "packed" / "config.json"
    path.write_text(path.read_text().replace('"strategy": "channel"', '"strategy": "tensor"'))
    check(tmp_path, vocab_size)


def test_names_of_mixtral_as_llm_compressor_writes_them(tmp_path: Path) -> None:
    vocab_size = make_packed(tmp_path, "mixtral", PACKINGS["w4a16"])
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    for short, long in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        tensors = {name.replace(f".{short}.", f".{long}."): tensor for name, tensor in tensors.items()}
    save_file(tensors, path)
    check(tmp_path, vocab_size)


@pytest.mark.parametrize(
    ("packing", "suffix", "change", "message"),
    [
        ("awq", "scales", None, r"lacks model\.layers\.1\.self_attn\.q_proj\.scales"),
        ("awq", "qzeros", lambda t: t[:2], r"q_proj\.qzeros has shape \[2, 8\], but config\.json asks for \[4, 8\]"),
        (
            "awq",
            "qweight",
            lambda t: t.float(),
            r"q_proj\.qweight is stored as torch\.float32, but .* asks for torch\.int32",
        ),
        (
            "gptq",
            "scales",
            lambda t: t.int(),
            r"q_proj\.scales is stored as torch\.int32, but .* a floating point type",
        ),
        ("gptq", "g_idx", lambda t: t + 1, r"q_proj\.g_idx names group 4, but .* group_size 16 gives groups 0 to 3"),
        (
            "awq-symmetric",
            "qzeros",
            lambda t: t + 1,
            r"q_proj\.qzeros has zero point 9, but .* zero_point: false means 8",
        ),
        (
            "gptq-8",
            "qzeros",
            lambda t: t - 1,
            r"q_proj\.qzeros has zero point 127, but .* sym: true and .* gptq_v2 means",
        ),
        ("w4a16", "weight_shape", lambda t: t + 8, r"q_proj\.weight_shape says \[72, 72\], but .* \[64, 64\]"),
        ("w4a16", "weight_packed", lambda t: t[:, 1:], r"q_proj\.weight_packed has shape \[64, 7\]"),
    ],
)
def test_what_does_not_fit_is_named(
    packing: str, suffix: str, change: Callable[[Tensor], Tensor] | None, message: str, tmp_path: Path
) -> None:
    make_packed(tmp_path, "llama", PACKINGS[packing])
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.1.self_attn.q_proj.{suffix}"
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor).contiguous()
    save_file(tensors, path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "packed")
