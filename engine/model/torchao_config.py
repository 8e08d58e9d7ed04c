"""Read `quantization_config` of checkpoints that transformers writes with torchao, as safetensors. Torch-free.

One configuration applies to all linear modules. Settings of activations do not matter, except whether they are rounded
to 8-bit floats.
"""

from __future__ import annotations

from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.weight_format import MarkedModules, ScaledNumbers, Strategy, TorchaoInt4, WeightFormat

WEIGHT = "_weight_qdata"
SCALE = "_weight_scale"
ZERO_POINT = "_weight_zero_point"
STRATEGIES: dict[str, Strategy] = {
    "PerTensor": "tensor",
    "PerRow": "channel",
    "PerAxis": "channel",
    "PerGroup": "block",
}
INTEGERS = {f"int{bits}": bits for bits in (2, 3, 4, 8)}
FLOAT8 = ("float8_e4m3fn",)
MAPPINGS = ("SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR", "ASYMMETRIC")
# How numbers are multiplied or scales were found; no stored number depends on these.
UNREAD = (
    "activation_dtype activation_value_lb activation_value_ub act_mapping_type int4_choose_qparams_algorithm "
    "int4_tile_packed_ntile intx_choose_qparams_algorithm kernel_preference mm_config reduce_range scale_dtype "
    "set_inductor_config weight_only_decode weight_scale_dtype"
).split()


def read_torchao(config: ConfigReader) -> MarkedModules:
    """Raises ModelError for configurations that store weights in any other way."""
    unconverted = config.names("modules_to_not_convert") or ()
    config.ignore("include_input_output_embeddings", "untie_embedding_weights", "quant_type_kwargs")
    types = config.require("quant_type")
    chosen = types.require("default")
    types.done()
    readers = {
        "Float8WeightOnlyConfig": _read_float8,
        "Float8DynamicActivationFloat8WeightConfig": _read_dynamic_float8,
        "Int4WeightOnlyConfig": _read_int4,
        "Int8WeightOnlyConfig": _read_int8,
        "Int8DynamicActivationInt8WeightConfig": _read_int8,
        "IntxWeightOnlyConfig": _read_intx,
        "Int8DynamicActivationIntxWeightConfig": _read_intx,
    }
    kind = chosen.choice("_type", {name: name for name in readers}, "")
    chosen.only("_version", 2)
    inner = chosen.require("_data")
    numbers = readers[kind](inner)
    inner.ignore(*UNREAD)
    inner.done()
    chosen.done()
    return MarkedModules(numbers, unconverted)


def _read_float8(config: ConfigReader) -> ScaledNumbers:
    _read_choice(config, "weight_dtype", FLOAT8, FLOAT8[0])
    _read_choice(config, "packing_format", ("PLAIN",), "PLAIN")
    strategy, size = _read_granularity(config, "granularity", "PerTensor")
    if size:
        raise ModelError("config.json: quantization_config: granularity PerGroup is not supported for 8-bit floats")
    return ScaledNumbers("fp8", strategy, scale=SCALE, weight=WEIGHT)


def _read_dynamic_float8(config: ConfigReader) -> WeightFormat:
    return replace(_read_float8(config), inputs="dynamic")


def _read_int4(config: ConfigReader) -> WeightFormat:
    _read_choice(config, "int4_packing_format", ("PLAIN",), "PLAIN")
    return TorchaoInt4(config.integer("group_size", 128, lowest=2))


def _read_int8(config: ConfigReader) -> WeightFormat:
    config.empty("group_size")
    return _scale_integers(8, *_read_granularity(config, "granularity", "PerRow"), is_symmetric=True, is_float32=True)


def _read_intx(config: ConfigReader) -> WeightFormat:
    _read_choice(config, "intx_packing_format", ("UNPACKED_TO_INT8",), "UNPACKED_TO_INT8")
    bits = INTEGERS[_read_choice(config, "weight_dtype", tuple(INTEGERS), "int8")]
    prefix = "weight_" if "weight_granularity" in config.keys else ""
    mapping = _read_choice(config, f"{prefix}mapping_type", MAPPINGS, MAPPINGS[0])
    granularity = _read_granularity(config, f"{prefix}granularity", "PerAxis")
    return _scale_integers(bits, *granularity, is_symmetric=mapping != "ASYMMETRIC", is_float32=False)


def _scale_integers(bits: int, strategy: Strategy, size: int, *, is_symmetric: bool, is_float32: bool) -> ScaledNumbers:
    return ScaledNumbers(
        "int8",
        strategy,
        (1, size) if size else (0, 0),
        scale=SCALE,
        bits=bits,
        has_zeros=not is_symmetric,
        weight=WEIGHT,
        zero_point=ZERO_POINT,
        has_float32_scales=is_float32,
    )


def _read_choice(config: ConfigReader, key: str, served: tuple[str, ...], default: str) -> str:
    """Read a dtype or enumerated value, which is stored as {"_type": ..., "_data": name}."""
    stored = config.inner(key)
    if stored is None:
        return default
    stored.ignore("_type")
    value = stored.choice("_data", {name: name for name in served}, "")
    stored.done()
    return value


def _read_granularity(config: ConfigReader, key: str, default: str) -> tuple[Strategy, int]:
    """Read the strategy, and the size of groups, or 0 without groups. Of two, the second is for the weights."""
    stored = config.last(key)
    if stored is None:
        return STRATEGIES[default], 0
    kind = stored.choice("_type", {name: name for name in STRATEGIES}, "")
    stored.ignore("_version")
    inner = stored.inner("_data") or ConfigReader({})
    size = inner.integer("group_size") if kind == "PerGroup" else 0
    if kind == "PerAxis" and inner.integer("axis", 0, lowest=0) != 0:
        raise ModelError(f"config.json: quantization_config: {key}: axis other than 0 is not supported")
    inner.only("dim", None, -1)
    inner.done()
    stored.done()
    return STRATEGIES[kind], size
