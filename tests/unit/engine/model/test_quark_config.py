"""quantization_config as AMD's Quark writes it: the meaning of each configuration, and refusals."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.cache_scales import is_calibrated
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.quantization_config import read_quantization_config
from serve_llm.engine.model.weight_format import MXFP8, MxFp4, QuarkInt4, ScaledNumbers, TargetedModules, WeightFormat
from support.packed_floats import CONFIGS

UP = "model.layers.3.mlp.up_proj"
FP8 = CONFIGS["quark-fp8"]["global_quant_config"]
MXFP4 = CONFIGS["quark-mxfp4"]["global_quant_config"]


def read(stored: dict[str, Any]) -> TargetedModules:
    found = read_quantization_config(ConfigReader({"quantization_config": stored}).require("quantization_config"))
    assert isinstance(found, TargetedModules)
    return found


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("quark-fp8", ScaledNumbers("fp8", "tensor")),
        ("quark-fp8-channel", ScaledNumbers("fp8", "channel")),
        ("quark-fp8-group", ScaledNumbers("fp8", "block", (1, 16))),
        ("quark-mxfp8", MXFP8),
        ("quark-mxfp4", MxFp4("weight", "weight_scale")),
        ("quark-int8", ScaledNumbers("int8", "channel", has_float32_scales=True)),
        ("quark-int4", QuarkInt4(16, is_symmetric=True, is_signed=True, is_reordered=True)),
        ("quark-uint4", QuarkInt4(16, is_symmetric=False, is_signed=False, is_reordered=False)),
    ],
)
def test_weights(form: str, expected: WeightFormat) -> None:
    modules = read(CONFIGS[form])
    assert modules.find_format(UP) == expected
    for excluded in ("lm_head", "model.layers.3.mlp.gate", "model.layers.3.block.router"):
        assert modules.find_format(excluded) is None
    assert modules.find_embedding_format("model.embed_tokens") is None


def test_modules_with_settings_of_their_own() -> None:
    """The first pattern that matches applies; with no others, modules are not quantised."""
    stored = CONFIGS["quark-fp8"] | {"layer_quant_config": {"*.experts.*": MXFP4, "*up_proj": {"weight": None}}}
    modules = read(stored)
    assert modules.find_format("model.layers.3.mlp.experts.7.up_proj") == MxFp4("weight", "weight_scale")
    assert modules.find_format(UP) is None
    assert modules.find_format("model.layers.3.mlp.down_proj") == ScaledNumbers("fp8", "tensor")
    assert read(stored | {"global_quant_config": {}}).find_format("model.layers.3.mlp.down_proj") is None


@pytest.mark.parametrize(
    ("dtype", "group", "expected"),
    [("fp8_e4m3", ["*k_proj"], True), ("fp8_e4m3", [], False), ("int8", ["*k_proj"], False)],
)
def test_scales_for_the_cache(dtype: str, group: list[str], expected: bool) -> None:
    layers = {"*k_proj": FP8 | {"output_tensors": FP8["weight"] | {"dtype": dtype}}}
    stored = CONFIGS["quark-fp8"] | {"layer_quant_config": layers}
    stored |= {"export": stored["export"] | {"kv_cache_group": group}}
    read(stored)
    assert is_calibrated(stored) is expected


def change(*path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        *outer, last = path
        for key in outer:
            config = config[key]
        config[last] = value

    return edit


OLDER = {"kv_cache_group": ["*k_proj", "*v_proj"], "min_kv_scale": 0.0, "weight_format": "real_quantized"}


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
        | {"kv_cache_scheme": "static"},
    ],
)
def test_formats_of_others_that_quark_writes(stored: dict[str, Any]) -> None:
    """Quark adds a key to the settings of AutoAWQ and AutoFP8."""

    def read_any(config: dict[str, Any]) -> object:
        return read_quantization_config(ConfigReader({"quantization_config": config}).require("quantization_config"))

    assert read_any(stored | {"export": OLDER | {"pack_method": "reorder"}}) == read_any(stored)
    with pytest.raises(ModelError, match="weight_format 'fake_quantized' is not supported"):
        read_any(stored | {"export": OLDER | {"weight_format": "fake_quantized"}})
    if stored["quant_method"] == "awq":
        with pytest.raises(ModelError, match="pack_method 'order' is not supported"):
            read_any(stored | {"export": OLDER | {"pack_method": "order"}})


WEIGHT = ("global_quant_config", "weight")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("export", "weight_format", value="fake_quantized"), "weight_format 'fake_quantized' is not supported"),
        (change("export", "pack_method", value="other"), "pack_method 'other' is not supported"),
        (change("export", value=None), "export is missing"),
        (change("algo_config", value=[{"name": "rotation"}]), "name 'rotation' is not supported"),
        (change("algo_config", value=["awq"]), "algo_config must be a list of objects"),
        (change("layer_type_quant_config", value={"Conv2d": {}}), "layer_type_quant_config is not supported"),
        (change(*WEIGHT, "dtype", value="fp6_e2m3"), "dtype 'fp6_e2m3' is not supported"),
        (change(*WEIGHT, "dtype", value="int4"), "weights of dtype 'int4', qscheme 'per_tensor'"),
        (change(*WEIGHT, "scale_format", value="e5m3"), "scale_format 'e5m3' is not supported"),
        (change(*WEIGHT, "is_dynamic", value=True), "is_dynamic True is not supported"),
        (change(*WEIGHT, value=[FP8["weight"]] * 2), "weight must be an object"),
        (change("global_quant_config", "bias", value=FP8["weight"]), "bias is not supported"),
        (change(*WEIGHT, "sparsity", value=2), "unknown keys, which may mean another computation: sparsity"),
        (change("sparsity", value=2), "unknown keys, which may mean another computation: sparsity"),
    ],
)
def test_refused(edit: Callable[[dict[str, Any]], None], message: str) -> None:
    stored = copy.deepcopy(CONFIGS["quark-fp8"])
    edit(stored)
    with pytest.raises(ModelError, match=re.escape(message)):
        read(stored)
