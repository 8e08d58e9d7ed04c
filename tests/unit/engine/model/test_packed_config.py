"""quantization_config of AWQ, GPTQ and pack-quantized checkpoints: the meaning of each key, and refusals by name."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.quantization_config import read_quantization_config
from serve_llm.engine.model.weight_format import PackedIntegers, QuantizedModules
from support.packed import Packing, quantization_config

AWQ = quantization_config(Packing("awq", group_size=128))
GPTQ = quantization_config(Packing("gptq", group_size=128, is_symmetric=True))
W4A16 = quantization_config(Packing("compressed", group_size=128, is_symmetric=True))
GPTQMODEL = {"desc_act": False, "lm_head": False, "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}
TRANSFORMERS = {"act_group_aware": True, "backend": "auto", "batch_size": 1, "cache_block_outputs": True}
TRANSFORMERS |= {"damp_percent": 0.1, "desc_act": False, "sym": True, "true_sequential": True}
AUTOROUND = {"autoround_version": "0.16.1", "data_type": "int", "enable_quanted_input": True, "iters": 200}
AUTOROUND |= {"provider": "auto-round", "static_kv_granularity": "tensor", "supported_types": ["Linear"]}
INTEL = AUTOROUND | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "sym": True}
INTEL |= {"group_size": 128, "block_name_to_quantize": "model.layers"}
OPEA = INTEL | {"quant_method": "intel/auto-round", "packing_format": None, "train_bs": 8}  # older versions
UP = "model.layers.0.mlp.up_proj"


def read(stored: dict[str, Any]) -> QuantizedModules:
    found = read_quantization_config(ConfigReader({"quantization_config": stored}).require("quantization_config"))
    assert hasattr(found, "find_format")
    return found


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (AWQ, PackedIntegers("awq", 4, 128, False)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM", "zero_point": True},
            PackedIntegers("awq", 4, 64, False),
        ),
        (AWQ | {"group_size": -1}, PackedIntegers("awq", 4, None, False)),
        (AWQ | {"version": "GEMV"}, PackedIntegers("awq_gemv", 4, 128, False)),
        (AWQ | {"version": None, "format": "gemv"}, PackedIntegers("awq_gemv", 4, 128, False)),
        (AWQ | GPTQMODEL | {"method": "awq", "checkpoint_format": "gemm"}, PackedIntegers("awq", 4, 128, False)),
        (AWQ | {"zero_point": False}, PackedIntegers("awq", 4, 128, True)),
        (AWQ | TRANSFORMERS | {"format": "gemm"}, PackedIntegers("awq", 4, 128, False)),
        (GPTQ | GPTQMODEL | {"method": "gptq"}, PackedIntegers("gptq", 4, 128, True)),
        (GPTQ | TRANSFORMERS | {"format": "gptq", "pad_token_id": 3}, PackedIntegers("gptq", 4, 128, True)),
        (GPTQ | AUTOROUND, PackedIntegers("gptq", 4, 128, True)),
        (INTEL, PackedIntegers("gptq", 4, 128, True)),
        (INTEL | {"packing_format": "auto_round:auto_awq", "sym": False}, PackedIntegers("awq", 4, 128, False)),
        (INTEL | {"model_free": True, "iters": 0, "desc_act": False}, PackedIntegers("gptq", 4, 128, True)),
        (INTEL | {"packing_format": "auto_round", "sym": False}, PackedIntegers("gptq_v2", 4, 128, False)),
        (INTEL | {"packing_format": "auto_round:gptqmodel"}, PackedIntegers("gptq_v2", 4, 128, True)),
        (INTEL | {"packing_format": "auto_round:gptq"}, PackedIntegers("gptq", 4, 128, True)),
        (INTEL | {"packing_format": None}, PackedIntegers("gptq", 4, 128, True)),
        (OPEA | {"backend": "auto_round:gptq:exllamav2"}, PackedIntegers("gptq", 4, 128, True)),
        (OPEA | {"backend": "auto_round:exllamav2", "sym": False}, PackedIntegers("gptq_v2", 4, 128, False)),
        (OPEA | {"backend": "autoround:exllamav2", "sym": False}, PackedIntegers("gptq_v2", 4, 128, False)),
        (OPEA | {"backend": "gptq:exllamav2", "sym": False}, PackedIntegers("gptq", 4, 128, False)),
        (OPEA | {"backend": "auto"}, PackedIntegers("gptq", 4, 128, True)),
        (OPEA | {"backend": "auto_round:awq:gemm"}, PackedIntegers("awq", 4, 128, True)),
        (GPTQ, PackedIntegers("gptq", 4, 128, True)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "bits": 3, "sym": False}, PackedIntegers("gptq_v2", 3, 128, False)),
        (W4A16, PackedIntegers("compressed", 4, 128, True)),
    ],
)
def test_served(stored: dict[str, Any], expected: PackedIntegers) -> None:
    assert read(stored).find_format(UP) == expected


def test_modules_that_are_left_out() -> None:
    modules = read(AWQ | {"modules_to_not_convert": ["visual", "mlp.gate"]})
    assert modules.find_form("model.layers.3.mlp.gate") is None
    assert modules.find_form(UP) is not None
    modules = read(W4A16 | {"ignore": ["lm_head", "re:.*layers\\.1\\."]})
    assert modules.find_format("lm_head") is modules.find_format("model.layers.1.mlp.up_proj") is None
    assert modules.find_format(UP) is not None


@pytest.mark.parametrize(
    ("stored", "key"), [(GPTQ, "modules_to_not_convert"), (INTEL, "modules_to_not_convert"), (AWQ, "ignore")]
)
def test_other_keys_that_leave_modules_out(stored: dict[str, Any], key: str) -> None:
    modules = read(stored | {key: ["visual", "mlp.gate"]})
    assert modules.find_form("model.layers.3.mlp.gate") is None
    assert modules.find_form(UP) is not None


def test_modules_that_awq_leaves_out_by_rules() -> None:
    modules = read(AWQ | {"dynamic": {"-:.*down": {}, "+:.*up": {"group_size": 32}}})
    assert modules.find_format("model.layers.1.mlp.down_proj") is None
    assert modules.find_format(UP) == PackedIntegers("awq", 4, 32, False)


def test_settings_of_autoround_for_modules() -> None:
    """A name takes precedence over patterns, which may match anywhere in a name."""
    own = {"mlp\\.": {"bits": 8, "group_size": 32, "data_type": "int"}, UP: {"bits": 16, "data_type": "fp"}}
    own["model.layers.0.mlp.gate"] = {"bits": 16, "data_type": "float", "act_data_type": "float"}
    modules = read(INTEL | {"extra_config": own})
    assert modules.find_format(UP) is modules.find_format("model.layers.0.mlp.gate") is None
    assert modules.find_format("model.layers.0.mlp.down_proj") == PackedIntegers("gptq", 8, 32, True)
    assert modules.find_format("model.layers.0.self_attn.q_proj") == PackedIntegers("gptq", 4, 128, True)


def test_dynamic_rules() -> None:
    rules = {"+:.*down": {"bits": 8, "group_size": 32}, "-:.*layers\\.1\\.": {}, ".*up_proj": {"sym": False}}
    modules = read(GPTQ | {"dynamic": rules})
    assert modules.find_format("model.layers.1.mlp.down_proj") == PackedIntegers("gptq", 8, 32, True)
    assert modules.find_format("model.layers.1.mlp.up_proj") is None
    assert modules.find_format(UP) == PackedIntegers("gptq", 4, 128, False)
    assert modules.find_format("model.layers.0.mlp.gate_proj") == PackedIntegers("gptq", 4, 128, True)


def test_mixed_groups() -> None:
    stored = copy.deepcopy(W4A16)
    group = copy.deepcopy(stored["config_groups"]["group_0"])
    group["targets"] = ["re:.*down_proj$", UP]
    group["weights"] |= {"num_bits": 8, "strategy": "channel", "group_size": None}
    stored["config_groups"]["group_1"] = group
    modules = read(stored)
    assert modules.find_format(UP) == PackedIntegers("compressed", 8, None, True)
    assert modules.find_format("model.layers.0.mlp.gate_proj") == PackedIntegers("compressed", 4, 128, True)


def change_weights(**changes: object) -> dict[str, Any]:
    stored = copy.deepcopy(W4A16)
    stored["config_groups"]["group_0"]["weights"] |= changes
    return stored


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (AWQ | {"version": "gemv_fast"}, "version 'gemv_fast' is not supported (supported: gemm, gemv"),
        (AWQ | {"desc_act": True}, "desc_act True"),
        (AWQ | {"dynamic": {"+:a": {"bits": 8}}}, "dynamic: +:a: AWQ with 8 bits"),
        (AWQ | {"method": "gptq"}, "method 'gptq'"),
        (INTEL | {"packing_format": "auto_round:llm_compressor"}, "packing_format 'auto_round:llm_compressor'"),
        (INTEL | {"packing_format": "auto_round:auto_awq", "bits": 8}, "AWQ with 8 bits"),
        (INTEL | {"extra_config": {"(": {"bits": 8}}}, "extra_config: '(' is not a valid pattern"),
        (INTEL | {"extra_config": {"a": {"new": 8}}}, "extra_config: a: unknown keys"),
        (AWQ | {"bits": 8}, "AWQ with 8 bits"),
        (AWQ | {"group_size": 0}, "group_size must be above 0"),
        (AWQ | {"bits": None}, "bits is missing"),
        (AWQ | {"new": 1}, "unknown keys, which may mean another computation: new"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is not supported"),
        (INTEL | {"packing_format": None, "backend": "auto_round:new"}, "backend 'auto_round:new'"),
        (OPEA | {"backend": "autoround:new"}, "backend 'autoround:new'"),
        (GPTQ | {"bits": 5}, "bits 5"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        (GPTQ | {"rotation": "hadamard"}, "rotation is not supported"),
        (GPTQ | {"data_type": "mx_fp"}, "data_type 'mx_fp'"),
        (GPTQ | {"dynamic": {"+:(": {}}}, "dynamic: '+:(' is not a valid pattern"),
        (GPTQ | {"dynamic": {"+:a": {"bits": 7}}}, "bits 7"),
        (GPTQ | {"dynamic": {"+:a": {"new": 7}}}, "dynamic: +:a: unknown keys"),
        (change_weights(num_bits=3), "num_bits 3"),
        (change_weights(strategy="block"), "strategy 'block'"),
        (change_weights(strategy="tensor", symmetric=False), "strategy 'tensor' is supported for symmetric weights"),
        (change_weights(group_size=None), "group_size is missing"),
        (change_weights(actorder="random"), "actorder 'random'"),
        (change_weights(type="float"), "type 'float'"),
    ],
)
def test_refused(stored: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: quantization_config.*{re.escape(message)}"):
        read(stored)
