"""quantization_config as a closed world: unread keys are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.options.sources import make_options
from serve_llm.engine.model.cache_scales import is_calibrated
from serve_llm.engine.model.compressed_tensors_config import Int8Checkpoint
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.quantization_config import read_quantization_config
from serve_llm.engine.model.quantization_spec import GroupQuantForm
from serve_llm.engine.model.registry import apply_engine_config, read_model
from serve_llm.engine.model.spec import AttentionSpec
from serve_llm.engine.model.weight_format import (
    BitsAndBytes4,
    MarkedModules,
    NamedModules,
    NvFp4,
    PackedIntegers,
    ScaledNumbers,
    TargetedModules,
    WeightFormat,
)
from support import published
from support.quantised import quantization_config
from support.resolved import resolve_all


def read(stored: object) -> object:
    return read_quantization_config(ConfigReader({"quantization_config": stored}).require("quantization_config"))


@pytest.mark.parametrize("value", [None, {}])
def test_nothing(value: object) -> None:
    assert read_model(published.LLAMA_1B | {"quantization_config": value}) == read_model(published.LLAMA_1B)


def group(part: str, **change: object) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        config["config_groups"]["group_0"][part] |= change

    return edit


def older(config: dict[str, Any]) -> None:
    """Write the config in the format of the first W8A8 checkpoints."""
    config["quantization_status"] = "frozen"
    config["sparsity_config"] = {"format": "dense", "global_sparsity": 0.14, "registry_requires_subclass": False}
    config["sparsity_config"] |= {"sparsity_structure": "unstructured", "targets": [], "ignore": ["lm_head"]}
    config["global_compression_ratio"] = 1.46
    for key in ("version", "transform_config"):
        config.pop(key)
    config["config_groups"]["group_0"]["weights"] |= {"observer": "mse", "observer_kwargs": {"norm": 2.4}}


@pytest.mark.parametrize("change", [lambda config: None, older, lambda config: config.update(ignore=None)])
def test_served(change: Callable[[dict[str, Any]], None]) -> None:
    config = quantization_config()
    change(config)
    stored = read(config)
    assert isinstance(stored, Int8Checkpoint)
    assert stored.ignore == (() if config["ignore"] is None else ("lm_head",))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["config_groups"]["group_0"].update(input_activations=None),
        group("input_activations", dynamic=False, strategy="tensor"),
        group("input_activations", symmetric=False),
    ],
)
def test_int8_weights_alone(change: Callable[[dict[str, Any]], None]) -> None:
    """Activations are only rounded if the config asks for token-wise rounding."""
    config = quantization_config()
    change(config)
    stored = read(config)
    assert isinstance(stored, TargetedModules)
    assert stored.find_format("model.layers.0.mlp.up_proj") == ScaledNumbers("int8", "channel")


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (
            {"quant_method": "fp8", "activation_scheme": "static", "expert_dtype": "fp8", "modules_to_convert": None},
            ScaledNumbers("fp8", "tensor", other_scale="weight_scale_inv", inputs="static"),
        ),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            ScaledNumbers("fp8", "channel", inputs="dynamic"),
        ),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, BitsAndBytes4("fp4", is_nested=False)),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "config_groups": {"group_0": {"targets": ["Linear"]}}},
            ScaledNumbers("fp8", "tensor", inputs="static"),
        ),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}},
            NvFp4("modelopt"),
        ),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, NvFp4("modelopt")),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, NvFp4("modelopt")),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            ScaledNumbers("fp8", "channel", inputs="dynamic"),
        ),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, BitsAndBytes4("nf4", is_nested=False)),
        (
            {"quant_method": "fp8", "fmt": "float8_e4m3fn"},
            ScaledNumbers("fp8", "tensor", other_scale="weight_scale_inv", inputs="dynamic"),
        ),
    ],
)
def test_floats_and_bitsandbytes(stored: dict[str, object], expected: WeightFormat) -> None:
    found = read(stored)
    assert isinstance(found, MarkedModules) and found.find_format("model.layers.0.mlp.up_proj") == expected


def test_modules_that_bitsandbytes_skips() -> None:
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    found = read(stored | {"llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp"]})
    assert isinstance(found, MarkedModules)
    names = ["model.layers.1.mlp.up_proj", "model.layers.10.mlp.up_proj", "lm_head"]
    assert [found.find_form(name) is None for name in names] == [True, False, True]


def test_modules_that_model_optimizer_leaves_out() -> None:
    stored = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "model.layers.1.*", "*.mlp.gate"]}
    found = read({"quant_method": "modelopt", "quantization": stored, "producer": {"name": "modelopt"}})
    assert isinstance(found, MarkedModules)
    names = ["1.mlp.up_proj", "10.mlp.up_proj", "2.mlp.gate", "2.mlp.gate_proj"]
    assert [found.find_form(f"model.layers.{name}") is None for name in names] == [True, False, True, False]
    assert found.find_form("lm_head") is None


def test_formats_of_modules_of_model_optimizer() -> None:
    layers = {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}
    layers["model.layers.0.mlp.up_proj"] = {"quant_algo": "NVFP4", "group_size": 16}
    stored = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    found = read(stored)
    assert isinstance(found, NamedModules)
    names = ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
    formats = [found.find_format(f"model.layers.0.{name}") for name in names]
    assert formats == [ScaledNumbers("fp8", "tensor", inputs="static"), NvFp4("modelopt"), None]
    layers["model.layers.0.mlp.up_proj"]["quant_algo"] = "W4A8_AWQ"
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.up_proj: quant_algo 'W4A8_AWQ' is not supported"):
        read(stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported (supported: FP8, FP8_PER_CHANNEL"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers is missing"),
        ({"group_size": 32}, "group_size 32"),
        ({"pre_quant_scale": True}, "pre_quant_scale is not supported"),
        ({"new": 1}, "unknown keys, which may mean another computation: new"),
    ],
)
def test_other_formats_of_model_optimizer(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        read({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"} | change})


def test_int8_activations_of_some_groups() -> None:
    """If other groups have other formats, activations are not rounded."""
    config = quantization_config()
    config["config_groups"]["group_1"] = {
        "targets": ["re:.*mlp.*"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        "format": "pack-quantized",
    }
    found = read(config)
    assert isinstance(found, TargetedModules)
    assert found.find_format("model.layers.0.self_attn.q_proj") == ScaledNumbers("int8", "channel")
    assert found.find_format("model.layers.0.mlp.up_proj") == PackedIntegers("compressed", 4, 32, True)


def test_integers_that_fill_bytes() -> None:
    """4-bit integers in groups, as in llm-compressor's W4AFP8."""
    config = quantization_config()
    group("weights", num_bits=4, strategy="group", group_size=32, symmetric=False)(config)
    found = read(config)
    assert isinstance(found, TargetedModules)
    stored = found.find_format("model.layers.0.mlp.up_proj")
    assert stored == ScaledNumbers("int8", "block", (1, 32), bits=4, has_zeros=True)
    assert stored.form == GroupQuantForm(4, 32, has_zeros=True)


@pytest.mark.parametrize(
    ("stored", "weights", "expected"),
    [
        ("naive-quantized", {}, ScaledNumbers("int8", "channel")),
        ("naive-quantized", {"type": "float"}, ScaledNumbers("fp8", "channel")),
    ],
)
def test_bytes_by_their_older_name(stored: str, weights: dict[str, Any], expected: WeightFormat) -> None:
    config = quantization_config() | {"format": stored}
    group("weights", **weights)(config)
    found = read(config)
    found = found.without_activations() if isinstance(found, Int8Checkpoint) else found
    assert isinstance(found, TargetedModules)
    assert found.find_format("model.layers.0.mlp.up_proj") == expected


def test_what_autoround_adds_to_compressed_tensors() -> None:
    more = {"provider": "auto-round", "attention_input_activations": FLOAT_CACHE}
    assert read(quantization_config() | more) == read(quantization_config())


def test_bitsandbytes_names_one_width() -> None:
    with pytest.raises(ModelError, match="one of load_in_4bit and load_in_8bit must be true"):
        read({"quant_method": "bitsandbytes"})


def test_what_is_ignored() -> None:
    stored = Int8Checkpoint(("lm_head", "re:.*down_proj$", "re:model\\.layers\\.1\\."))
    names = ["lm_head", "lm_head2", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj", "model.layers.10.up"]
    assert [stored.ignores(name) for name in names] == [True, False, True, True, False]


FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 64]}


@pytest.mark.parametrize("more", [{}, {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"}])
def test_blocks_of_8_bit_floats(more: dict[str, object]) -> None:
    found = read(FP8 | more)
    assert isinstance(found, MarkedModules)
    expected = ScaledNumbers("fp8", "block", (128, 64), scale="weight_scale_inv", inputs="dynamic")
    assert found.find_format("lm_head") == expected
    form = GroupQuantForm(8, 64, False, scale_bytes=4, is_float8=True, block_outputs=128, rounds_inputs=True)
    assert found.find_form("model.layers.0.mlp.up_proj") == form
    assert (found.find_form("lm_head") is None) == bool(more)


def test_modules_that_are_not_in_8_bit_floats() -> None:
    listed = {"modules_to_not_convert": ["layers.1.mlp.gate", "model.layers.2"], "ignored_layers": ["re:.*lm_head"]}
    found = read(FP8 | listed)
    assert isinstance(found, MarkedModules)
    names = ["layers.1.mlp.gate", "layers.1.mlp.gate_proj", "layers.11.mlp.gate", "layers.2.mlp.up_proj"]
    forms = [found.find_form(f"model.{name}") for name in names] + [found.find_form("lm_head")]
    assert [form is None for form in forms] == [True, False, False, True, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_scheme": "other"}, "activation_scheme 'other' is not supported (supported: dynamic, static)"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ({"modules_to_convert": ["embed"]}, "modules_to_convert is not supported"),
        ({"weight_block_size": [128]}, "weight_block_size must be two"),
        ({"weight_block_size": [128, 0]}, "weight_block_size must be a list of integers from 1"),
        ({"weight_block_size": [128, True]}, "weight_block_size must be a list of integers from 1"),
    ],
)
def test_other_8_bit_floats(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: quantization_config.*{re.escape(message)}"):
        read(FP8 | change)


FLOAT_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kv_cache_scheme": FLOAT_CACHE}, True),
        ({"kv_cache_scheme": FLOAT_CACHE | {"dynamic": True}}, False),
        ({"kv_cache_scheme": FLOAT_CACHE | {"type": "int"}}, False),
        ({"kv_cache_scheme": FLOAT_CACHE | {"num_bits": 4}}, False),
        ({"kv_cache_scheme": None}, False),
        ({"quant_method": "fp8"}, True),
        ({"quant_method": "gptq", "kv_cache_scheme": FLOAT_CACHE}, False),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, True),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, False),
        ({"quant_method": "modelopt"}, False),
    ],
)
def test_which_checkpoints_were_calibrated_for_a_cache_in_fp8(change: dict[str, object], expected: bool) -> None:
    assert is_calibrated(quantization_config() | change) == expected


def test_scales_of_the_cache_are_read_where_it_is_in_fp8() -> None:
    stored = quantization_config() | {"kv_cache_scheme": FLOAT_CACHE}
    raw = published.LLAMA_8B | {"quantization_config": stored}
    config, _, _ = resolve_all(make_options("published", device="cpu"), "published", raw)
    for kv_cache_dtype in ("auto", "fp8"):
        settings = replace(config, device="cuda", kv_cache_dtype=kv_cache_dtype)
        mixers = [layer.attention for layer in apply_engine_config(read_model(raw)[0], settings).layers]
        assert all(isinstance(mixer, AttentionSpec) for mixer in mixers)
        assert all(mixer.cache_scales == (kv_cache_dtype == "fp8") for mixer in mixers)


def deeper(key: str) -> dict[str, Any]:
    config = quantization_config()
    group("weights", **{key: 3})(config)
    return config


REFUSED: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda c: c.update(quant_method="exl3"), "quant_method 'exl3'"),
    (lambda c: c.pop("quant_method"), "quant_method '' is not supported"),
    (lambda c: c.update(format="marlin-24"), "format 'marlin-24'"),
    (lambda c: c.update(quantization_status="calibration"), "quantization_status 'calibration'"),
    (lambda c: c.update(kv_cache_scheme={"num_bits": 3}), "kv_cache_scheme: num_bits 3"),
    (
        lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config: format 'sparse-24-bitmask'",
    ),
    (lambda c: c.update(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    (lambda c: c.update(config_groups={}), "config_groups is missing"),
    (lambda c: c["config_groups"].update(b={}), "config_groups: b is missing"),
    (lambda c: c.update(ignore="lm_head"), "ignore must be a list"),
    (lambda c: c.update(ignore=["re:("]), r"ignore: 're:\(' is not a valid pattern"),
    (lambda c: c["config_groups"]["group_0"].update(targets=["Linear", "Conv1d"]), "targets 'Conv1d'"),
    (lambda c: c["config_groups"]["group_0"].update(output_activations={"num_bits": 8}), "output_activations"),
    (group("weights", num_bits=3), r"num_bits 3 is not supported \(supported: 4, 8\)"),
    (group("weights", type="float"), "weights: type 'float'"),
    (group("weights", strategy="group"), "weights: group_size is missing"),
    (group("weights", strategy="block"), "weights: strategy 'block'"),
    (group("weights", actorder="group"), "weights: actorder 'group'"),
    (group("input_activations", dynamic=3), "input_activations: dynamic must be true, false or 'local'"),
    (group("input_activations", strategy="row"), "input_activations: strategy 'row'"),
    (group("input_activations", num_bits=3), "input_activations: num_bits 3"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(change: Callable[[dict[str, Any]], object], message: str) -> None:
    config = quantization_config()
    change(config)
    with pytest.raises(ModelError, match=rf"config\.json: quantization_config.*{message}"):
        read(config)


@pytest.mark.parametrize("value", ["int8", 8, ["int8"]])
def test_not_an_object(value: object) -> None:
    with pytest.raises(ModelError, match="quantization_config must be an object"):
        read(value)


UNKNOWN: list[tuple[dict[str, Any], str, str]] = [
    (FP8 | {"new": 3}, "", "new"),
    (quantization_config() | {"new": 3}, "", "new"),
    (quantization_config() | {"sparsity_config": {"new": 3}}, ": sparsity_config", "sparsity_config.new"),
    (deeper("new"), ": config_groups: group_0: weights", "config_groups.group_0.weights.new"),
]


@pytest.mark.parametrize(("stored", "where", "key"), UNKNOWN, ids=[f"{u[0]['quant_method']}-{u[2]}" for u in UNKNOWN])
def test_unknown_keys_are_refused_unless_allowed(stored: dict[str, Any], where: str, key: str) -> None:
    config = published.LLAMA_1B | {"quantization_config": stored}
    option = f"quantization_config.{key}"
    with pytest.raises(ModelError, match=rf"quantization_config{where}: unknown keys.*: new; .*-config {option}$"):
        read_model(config)
    plain = FP8 if stored["quant_method"] == "fp8" else quantization_config()
    assert read_model(config, [option]) == read_model(published.LLAMA_1B | {"quantization_config": plain})
    with pytest.raises(OptionError, match=f"{option}er: there is no such key in config.json: quantization_config"):
        read_model(config, [option, f"{option}er"])


class TestModel:
    def test_products_of_modules(self) -> None:
        ignore = ["lm_head", "re:.*layers\\.3\\..*", "model.layers.5.self_attn.o_proj"]
        spec, weights = read_model({**published.LLAMA_8B, "quantization_config": quantization_config(ignore)})
        assert spec.int8 is not None and spec.int8.in_checkpoint
        third = [*(f"attention.{name}" for name in ("q", "k", "v", "output")), "ffn.gate", "ffn.up", "ffn.down"]
        assert spec.int8.excluded == {*(f"layers.3.{name}" for name in third), "layers.5.attention.output"}
        rows = weights.expand(len(spec.layers), spec.int8)
        scales = [name for name in rows if name.endswith("weight_scale")]
        assert len(scales) == 32 * 7 - 8
        assert rows["model.layers.4.mlp.up_proj.weight_scale"].parameters == ("layers.4.ffn.up.weight_scale",)
        assert spec.with_int8() is spec

    def test_models_of_which_not_all_products_can_be_rounded(self) -> None:
        """Their weights keep their integers, and neither rows nor the LM head's inputs are rounded."""
        config = {"quantization_config": quantization_config([])}
        form = GroupQuantForm(8, None, has_zeros=False)
        spec, _ = read_model({**published.LLAMA_8B, **config})
        assert spec.int8 is None and spec.grouped is not None and spec.grouped.in_checkpoint
        assert (spec.grouped.default, spec.grouped.head) == (form, form)
        assert read_model({**published.LLAMA_1B, **config})[0].int8 is not None  # its LM head is the embedding
        config = {"quantization_config": quantization_config(["lm_head", "model.layers.5.mlp.up_proj"])}
        spec, _ = read_model({**published.LLAMA_8B, **config})
        assert spec.int8 is None and spec.grouped is not None
        assert (spec.grouped.default, spec.grouped.others) == (form, {"layers.5.ffn.up": None})
