"""quantization_config as transformers writes it with torchao: the meaning of each configuration, and refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.quantization_config import read_quantization_config
from serve_llm.engine.model.quantization_spec import GroupQuantForm
from serve_llm.engine.model.weight_format import MarkedModules, ScaledNumbers, TorchaoInt4, WeightFormat

ROW = {"_data": {"dim": -1}, "_type": "PerRow", "_version": 1}
GROUP = {"_data": {"group_size": 32}, "_type": "PerGroup", "_version": 1}
AXIS = {"_data": {"axis": 0}, "_type": "PerAxis", "_version": 1}
FLOAT8 = {"_data": "float8_e4m3fn", "_type": "torch.dtype"}
UNPACKED = {"_data": "UNPACKED_TO_INT8", "_type": "IntxPackingFormat"}
ALGORITHM = {"_data": "AFFINE", "_type": "IntxChooseQParamsAlgorithm"}
NAMES = {"scale": "_weight_scale", "weight": "_weight_qdata"}
INTEGERS = {**NAMES, "zero_point": "_weight_zero_point"}


def config_of(kind: str, version: int = 2, **data: object) -> dict[str, Any]:
    return {
        "include_input_output_embeddings": False,
        "modules_to_not_convert": ["visual"],
        "quant_method": "torchao",
        "quant_type": {"default": {"_data": data, "_type": kind, "_version": version}},
        "untie_embedding_weights": False,
    }


def intx(**changes: object) -> dict[str, Any]:
    data: dict[str, object] = {
        "granularity": GROUP,
        "intx_choose_qparams_algorithm": ALGORITHM,
        "intx_packing_format": UNPACKED,
        "mapping_type": {"_data": "SYMMETRIC", "_type": "MappingType"},
        "scale_dtype": None,
        "weight_dtype": {"_data": "int4", "_type": "torch.dtype"},
    }
    return config_of("IntxWeightOnlyConfig", **data | changes)


def read(stored: dict[str, Any]) -> MarkedModules:
    found = read_quantization_config(ConfigReader({"quantization_config": stored}).require("quantization_config"))
    assert isinstance(found, MarkedModules)
    return found


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (
            config_of("Float8WeightOnlyConfig", granularity=ROW, set_inductor_config=True, weight_dtype=FLOAT8),
            ScaledNumbers("fp8", "channel", **NAMES),
        ),
        (
            config_of(
                "Float8DynamicActivationFloat8WeightConfig",
                granularity=[{"_data": {}, "_type": "PerTensor", "_version": 1}] * 2,
                activation_dtype=FLOAT8,
                mm_config={"_data": {"emulate": False}, "_type": "Float8MMConfig"},
                kernel_preference={"_data": "AUTO", "_type": "KernelPreference"},
            ),
            ScaledNumbers("fp8", "tensor", inputs="dynamic", **NAMES),
        ),
        (
            config_of("Int8WeightOnlyConfig", granularity=ROW, group_size=None, set_inductor_config=True),
            ScaledNumbers("int8", "channel", has_float32_scales=True, **INTEGERS),
        ),
        (intx(), ScaledNumbers("int8", "block", (1, 32), bits=4, **INTEGERS)),
        (
            intx(mapping_type={"_data": "ASYMMETRIC", "_type": "MappingType"}, granularity=AXIS),
            ScaledNumbers("int8", "channel", bits=4, has_zeros=True, **INTEGERS),
        ),
        (config_of("Int4WeightOnlyConfig", group_size=64), TorchaoInt4(64)),
    ],
)
def test_served(stored: dict[str, Any], expected: WeightFormat) -> None:
    modules = read(stored)
    assert modules.format == expected
    assert modules.find_form("visual.proj") is None and modules.find_form("model.layers.0.mlp.up_proj") == expected.form


def test_integers_of_few_bits_stay_in_4_bits() -> None:
    modules = read(intx(weight_dtype={"_data": "int3", "_type": "torch.dtype"}))
    assert modules.format.form == GroupQuantForm(4, 32, has_zeros=False)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (config_of("Int8WeightOnlyConfig", version=1), "_version 1 is not supported (supported: 2)"),
        (config_of("UIntXWeightOnlyConfig", dtype="uint4"), "_type 'UIntXWeightOnlyConfig' is not supported"),
        (intx(weight_dtype={"_data": "int6", "_type": "torch.dtype"}), "weight_dtype: _data 'int6'"),
        (intx(intx_packing_format={"_data": "OPAQUE_ATEN_AUTO"}), "intx_packing_format: _data 'OPAQUE_ATEN_AUTO'"),
        (intx(granularity={"_data": {"block": 1}, "_type": "PerBlock"}), "granularity: _type 'PerBlock'"),
        (intx(granularity={"_data": {"axis": 1}, "_type": "PerAxis"}), "axis other than 0"),
        (intx(new=1), "unknown keys, which may mean another computation: new"),
        (
            config_of("Int4WeightOnlyConfig", int4_packing_format={"_data": "TILE_PACKED_TO_4D"}),
            "int4_packing_format: _data 'TILE_PACKED_TO_4D' is not supported (supported: PLAIN)",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}, "lm_head": {}}},
            "unknown keys, which may mean another computation: lm_head",
        ),
    ],
)
def test_refused(stored: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: quantization_config.*{re.escape(message)}"):
        read(stored)
