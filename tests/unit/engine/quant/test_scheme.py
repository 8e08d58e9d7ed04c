"""quantization_config as a closed world: int8 compressed-tensors and blocks of 8-bit floats are read, everything else
is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.engine.errors import ModelError
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.quant import scheme
from support import published
from support.quantised import quantization_config


@pytest.mark.parametrize("value", [None, {}, False])
def test_nothing(value: object) -> None:
    assert scheme.read(value) is None


def older(config: dict[str, Any]) -> None:
    """As the first W8A8 checkpoints have it."""
    config["quantization_status"] = "frozen"
    config["sparsity_config"] = {"format": "dense", "global_sparsity": 0.14, "registry_requires_subclass": False}
    config["sparsity_config"] |= {"sparsity_structure": "unstructured"}
    config["global_compression_ratio"] = 1.46
    for key in ("version", "transform_config"):
        config.pop(key)
    config["config_groups"]["group_0"]["weights"] |= {"observer": "mse", "observer_kwargs": {"norm": 2.4}}


@pytest.mark.parametrize("change", [lambda config: None, older, lambda config: config.update(ignore=None)])
def test_served(change: Callable[[dict[str, Any]], None]) -> None:
    config = quantization_config()
    change(config)
    stored = scheme.read(config)
    assert isinstance(stored, scheme.Stored)
    assert stored.ignore == (() if config["ignore"] is None else ("lm_head",))


def test_what_is_ignored() -> None:
    stored = scheme.Stored(("lm_head", "re:.*down_proj$", "re:model\\.layers\\.1\\."))
    names = ["lm_head", "lm_head2", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj", "model.layers.10.up"]
    assert [stored.ignores(name) for name in names] == [True, False, True, True, False]


FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 64]}


@pytest.mark.parametrize("more", [{}, {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"}])
def test_blocks_of_8_bit_floats(more: dict[str, object]) -> None:
    assert scheme.read(FP8 | more) == scheme.Blocks(128, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"weight_block_size": None}, "weight_block_size must be two whole numbers, but it is None"),
        ({"weight_block_size": [128]}, "weight_block_size must be two"),
        ({"weight_block_size": [128, 0]}, "weight_block_size must be two"),
        ({"weight_block_size": [128, True]}, "weight_block_size must be two"),
        ({"more": 1}, "more 1"),
    ],
)
def test_other_8_bit_floats(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: quantization_config.*{re.escape(message)}.*supported: "):
        scheme.read(FP8 | change)


def group(part: str, **change: object) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        config["config_groups"]["group_0"][part] |= change

    return edit


REFUSED: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda c: c.update(quant_method="gptq"), "quant_method 'gptq'"),
    (lambda c: c.pop("quant_method"), "quant_method None"),
    (lambda c: c.update(format="pack-quantized"), "format 'pack-quantized'"),
    (lambda c: c.update(quantization_status="calibration"), "quantization_status 'calibration'"),
    (lambda c: c.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    (
        lambda c: c.update(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config: format 'sparse-24-bitmask'",
    ),
    (lambda c: c.update(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    (lambda c: c.update(desc_act=True), "desc_act True"),
    (lambda c: c.update(config_groups={}), "config_groups must be one group"),
    (lambda c: c.update(config_groups={"a": {}, "b": {}}), "config_groups must be one group"),
    (lambda c: c.update(ignore="lm_head"), "ignore must be a list"),
    (lambda c: c.update(ignore=["re:("]), r"ignore: 're:\(' is no pattern"),
    (lambda c: c["config_groups"]["group_0"].update(targets=["Linear", "Embedding"]), "targets"),
    (lambda c: c["config_groups"]["group_0"].update(output_activations={"num_bits": 8}), "output_activations"),
    (lambda c: c["config_groups"]["group_0"].update(input_activations=None), "input_activations must be an object"),
    (group("weights", num_bits=4), "weights: num_bits 4"),
    (group("weights", type="float"), "weights: type 'float'"),
    (group("weights", strategy="group", group_size=128), "weights: strategy 'group'"),
    (group("weights", symmetric=False), "weights: symmetric False"),
    (group("weights", actorder="group"), "weights: actorder 'group'"),
    (group("input_activations", dynamic=False), "input_activations: dynamic False"),
    (group("input_activations", strategy="tensor"), "input_activations: strategy 'tensor'"),
    (group("input_activations", symmetric=False), "input_activations: symmetric False"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(change: Callable[[dict[str, Any]], object], message: str) -> None:
    config = quantization_config()
    change(config)
    with pytest.raises(ModelError, match=rf"config\.json: quantization_config.*{message}"):
        scheme.read(config)


@pytest.mark.parametrize("value", ["int8", 8, ["int8"]])
def test_not_an_object(value: object) -> None:
    with pytest.raises(ModelError, match=r"quantization_config must be an object.*supported: quant_method compressed"):
        scheme.read(value)


class TestModel:
    def test_products_of_modules(self) -> None:
        ignore = ["lm_head", "re:.*layers\\.3\\..*", "model.layers.5.self_attn.o_proj"]
        spec, weights = read_model({**published.LLAMA_8B, "quantization_config": quantization_config(ignore)})
        assert spec.int8 is not None and spec.int8.stored
        third = [*(f"attention.{name}" for name in ("q", "k", "v", "output")), "ffn.gate", "ffn.up", "ffn.down"]
        assert spec.int8.kept == {*(f"layers.3.{name}" for name in third), "layers.5.attention.output"}
        rows = weights.expanded(len(spec.layers), spec.int8)
        scales = [name for name in rows if name.endswith("weight_scale")]
        assert len(scales) == 32 * 7 - 8
        assert rows["model.layers.4.mlp.up_proj.weight_scale"].parameters == ("layers.4.ffn.up.weight_scale",)
        assert spec.with_int8() is spec

    def test_the_head_must_be_ignored(self) -> None:
        config = {"quantization_config": quantization_config([])}
        with pytest.raises(ModelError, match=r'"ignore" must name lm_head'):
            read_model({**published.LLAMA_8B, **config})
        assert read_model({**published.LLAMA_1B, **config})[0].tied_head

    def test_gpt2_has_no_linear_modules(self) -> None:
        with pytest.raises(ModelError, match="int8 checkpoints of a GPT2LMHeadModel are not served"):
            read_model({**published.GPT2_XL, "quantization_config": quantization_config()})
