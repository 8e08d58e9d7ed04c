"""Read `quantization_config` of checkpoints with 8-bit floats (fp8, FBGEMM) and of bitsandbytes and NVIDIA's Model
Optimizer. Torch-free."""

from __future__ import annotations

import fnmatch
from typing import Literal

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.quark_config import read_export
from serve_llm.engine.model.weight_format import (
    MXFP8,
    BitsAndBytes4,
    Inputs,
    MarkedModules,
    NamedModules,
    NvFp4,
    ScaledNumbers,
    WeightFormat,
)


def read_fp8(config: ConfigReader) -> MarkedModules:
    """Read fp8 settings. With `weight_block_size`, as transformers (`FineGrainedFP8Config`) and DeepSeek-V3 write it,
    there is a scale per block; otherwise one per tensor, which AutoFP8 and transformers name differently."""
    config.only("fmt", None, "e4m3", "e4m3fn", "float8_e4m3fn")
    config.only("expert_dtype", None, "fp8")
    config.empty("modules_to_convert")
    read_export(config, "reorder", "order")
    # How scales were rounded does not matter, and `cache_scales` reads the last.
    config.ignore("scale_fmt", "dequantize", "kv_cache_scheme")
    unconverted = _read_unconverted(config)
    schemes: dict[str, Inputs] = {"dynamic": "dynamic", "static": "static"}
    inputs = config.choice("activation_scheme", schemes, "dynamic")
    size = config.integers("weight_block_size", lowest=1, highest=2**31 - 1)
    if size is None:
        numbers = ScaledNumbers("fp8", "tensor", other_scale="weight_scale_inv", inputs=inputs)
        return MarkedModules(numbers, unconverted)
    if len(size) != 2:
        raise ModelError(
            f"config.json: quantization_config: weight_block_size must be two whole numbers, but it is {list(size)}"
        )
    block = (size[0], size[1])
    return MarkedModules(ScaledNumbers("fp8", "block", block, "weight_scale_inv", inputs=inputs), unconverted)


def read_fbgemm(config: ConfigReader) -> MarkedModules:
    """Read FBGEMM's settings: 8-bit floats with a scale per output. Scales of inputs have no upper bound here."""
    config.ignore("activation_scale_ub")
    return MarkedModules(ScaledNumbers("fp8", "channel", inputs="dynamic"), _read_unconverted(config))


def _read_unconverted(config: ConfigReader) -> tuple[str, ...]:
    """Read which modules are not quantised. The checkpoint's tensors determine this; until they are there, these lists
    do."""
    keys = ("modules_to_not_convert", "ignored_layers")
    return tuple(name for key in keys for name in config.names(key) or ())


MODELOPT: dict[str, ScaledNumbers | NvFp4] = {  # activations and how they are rounded make the other differences
    "FP8": ScaledNumbers("fp8", "tensor", inputs="static"),
    "FP8_PER_CHANNEL_PER_TOKEN": ScaledNumbers("fp8", "channel", inputs="dynamic"),
    "FP8_PB_WO": ScaledNumbers("fp8", "block", (128, 128)),
    "MXFP8": MXFP8,
    "NVFP4": NvFp4("modelopt"),
    "W4A16_NVFP4": NvFp4("modelopt"),
}
MIXED = "MIXED_PRECISION"
ALGORITHMS = {name: name for name in MODELOPT} | {"fp8_pb_wo": "FP8_PB_WO"}
GROUP_SIZES = {"FP8_PB_WO": 128, "MXFP8": 32}  # others: 16


def read_modelopt(config: ConfigReader) -> MarkedModules | NamedModules:
    """Read Model Optimizer's settings from config.json or, as a separate object, from hf_quant_config.json."""
    config.ignore("producer", "config_groups")  # quant_algo says what the groups do
    stored = config.inner("quantization") or config
    algorithm = stored.choice("quant_algo", ALGORITHMS | {MIXED: MIXED}, "")
    stored.only("group_size", None, GROUP_SIZES.get(algorithm, 16))
    stored.empty("has_zero_point", "pre_quant_scale")
    stored.ignore("kv_cache_quant_algo", "kv_cache_scheme")  # `cache_scales` reads them
    unconverted = [name for key in ("exclude_modules", "ignore") for name in stored.names(key) or ()]
    patterns = (f"re:{fnmatch.translate(name)}" if "*" in name else name for name in unconverted)
    found: MarkedModules | NamedModules
    if algorithm == MIXED:
        found = NamedModules(_read_layers(stored.require("quantized_layers")))
    else:
        stored.empty("quantized_layers")
        found = MarkedModules(MODELOPT[algorithm], tuple(patterns))
    if stored is not config:
        stored.done()
    return found


def _read_layers(layers: ConfigReader) -> dict[str, WeightFormat]:
    """Read the formats of modules by name."""
    found: dict[str, WeightFormat] = {}
    for name in layers.keys:
        layer = layers.require(name)
        algorithm = layer.choice("quant_algo", ALGORITHMS, "")
        found[name] = MODELOPT[algorithm]
        layer.only("group_size", None, GROUP_SIZES.get(algorithm, 16))
        layer.empty("has_zero_point", "pre_quant_scale")
        layer.done()
    layers.done()
    return found


def read_bitsandbytes(config: ConfigReader) -> MarkedModules:
    """Read bitsandbytes' settings. Raises ModelError unless exactly one of 4 and 8 bits is set."""
    is_int8 = config.flag("load_in_8bit", False)
    is_4_bits = config.flag("load_in_4bit", False)
    # `_load_in_*` repeat the keys without the underscore; the other keys say how the writer's machine computed.
    config.ignore("_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "llm_int8_enable_fp32_cpu_offload")
    config.ignore("llm_int8_has_fp16_weight", "llm_int8_threshold")
    unconverted = config.names("llm_int8_skip_modules") or ()
    storages = {"uint8": "1", "int8": "1", "float16": "2", "bfloat16": "2", "float32": "4"}
    item_bytes = int(config.choice("bnb_4bit_quant_storage", storages, "uint8"))
    types: dict[str, Literal["nf4", "fp4"]] = {"nf4": "nf4", "fp4": "fp4"}
    quant_type = config.choice("bnb_4bit_quant_type", types, "fp4")
    is_nested = config.flag("bnb_4bit_use_double_quant", False)
    if is_int8 == is_4_bits:
        raise ModelError("config.json: quantization_config: one of load_in_4bit and load_in_8bit must be true")
    if is_int8:
        return MarkedModules(ScaledNumbers("int8", "channel", scale="SCB", divisor=127.0), unconverted)
    return MarkedModules(BitsAndBytes4(quant_type, is_nested, item_bytes), unconverted)
