"""Reading `quantization_config` of checkpoints that AMD's Quark writes. Torch-free.

The file has one configuration for all linear modules, others for modules by name, and the names of modules that are not
quantised. A configuration says how weights, biases, inputs and outputs are stored or rounded; activations are not
rounded here, so only that of weights matters.
"""

from __future__ import annotations

import fnmatch

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.weight_format import (
    MXFP8,
    FormatGroup,
    MxFp4,
    QuarkInt4,
    ScaledNumbers,
    Strategy,
    TargetedModules,
    WeightFormat,
)

CALIBRATION = (  # how scales were found
    "enable_buffer_reuse max_input_numel observer_cls qat_spec round_method scale_calculation_mode scale_type "
    "zero_point_type"
).split()
# Algorithms that leave a plain model, whose weights alone differ; others rotate activations or add modules.
ALGORITHMS = ("autosmoothquant", "awq", "gptaq", "gptq", "smooth", "smoothquant")


def read_quark(config: ConfigReader) -> TargetedModules:
    """Raises ModelError for numbers that are not supported."""
    config.require("export")
    is_reordered = read_export(config, "reorder", "order") == "reorder"
    config.ignore("kv_cache_post_rope", "kv_cache_quant_config", "quant_mode", "softmax_quant_spec", "version")
    config.empty("layer_type_quant_config")
    for algorithm in config.objects("algo_config"):
        algorithm.only("name", *ALGORITHMS)
    groups = []
    if layers := config.inner("layer_quant_config"):
        for name in layers.keys:
            groups.append(FormatGroup((_translate(name),), _read_modules(layers.require(name), is_reordered)))
        layers.done()
    whole = config.inner("global_quant_config")
    groups.append(FormatGroup(("Linear",), None if whole is None else _read_modules(whole, is_reordered)))
    return TargetedModules(tuple(groups), tuple(map(_translate, config.names("exclude") or ())))


def read_export(config: ConfigReader, *methods: str) -> str:
    """Read how Quark packed numbers, also in files with the settings of AutoAWQ or AutoFP8. methods: those that are
    supported."""
    export = config.inner("export")
    if export is None:
        return methods[0]
    export.only("weight_format", None, "real_quantized")
    method = export.choice("pack_method", {name: name for name in methods}, "reorder")
    export.ignore("kv_cache_group", "min_kv_scale", "weight_merge_groups")  # `cache_scales` reads the first
    export.done()
    return method


def _translate(name: str) -> str:
    """Translate a name with wildcards to a regular expression."""
    return f"re:{fnmatch.translate(name)}" if "*" in name and not name.startswith("re:") else name


def _read_modules(config: ConfigReader, is_reordered: bool) -> WeightFormat | None:
    """Read how modules store their weights; None: in floating point."""
    config.empty("bias")
    config.ignore("input_tensors", "output_tensors", "target_device")
    weight = config.single("weight")
    found = None if weight is None else _read_weight(weight, is_reordered)
    config.done()
    return found


def _read_weight(weight: ConfigReader, is_reordered: bool) -> WeightFormat:
    weight.only("is_dynamic", None, False)
    weight.empty("is_scale_quant", "mx_element_dtype")
    weight.ignore(*CALIBRATION)
    dtype = weight.choice("dtype", {name: name for name in ("fp8_e4m3", "fp4", "int4", "uint4", "int8")}, "")
    schemes = {name: name for name in ("per_tensor", "per_channel", "per_group", "per_block")}
    scheme = weight.choice("qscheme", schemes, "")
    block = weight.integers("block_size", lowest=1, highest=2**31 - 1) or ()
    if len(block) != (2 if scheme == "per_block" else 0):
        raise ModelError(f"config.json: quantization_config: block_size {list(block)} is not supported with {scheme}")
    has_exponents = weight.choice("scale_format", {name: name for name in ("float32", "e8m0")}, "float32") == "e8m0"
    is_symmetric = weight.flag("symmetric", True)
    size = weight.integer("group_size", 0)
    axis = weight.integer("ch_axis", 0, lowest=-1)
    if scheme in ("per_tensor", "per_block"):
        axis = size = 0
    weight.done()
    strategy: Strategy = "tensor" if scheme == "per_tensor" else "channel"
    match dtype, scheme, axis, size, has_exponents:
        case "fp8_e4m3", "per_tensor" | "per_channel", 0, _, False:
            return ScaledNumbers("fp8", strategy)
        case "fp8_e4m3", "per_block", 0, _, False:
            return ScaledNumbers("fp8", "block", (block[0], block[1]))
        case "int8", "per_tensor" | "per_channel", 0, _, False:
            return ScaledNumbers("int8", strategy, has_zeros=not is_symmetric, has_float32_scales=True)
        case "fp8_e4m3", "per_group", 1 | -1, 32, True:
            return MXFP8
        case "fp8_e4m3", "per_group", 1 | -1, _, False if size:
            return ScaledNumbers("fp8", "block", (1, size))
        case "fp4", "per_group", 1 | -1, 32, True:
            return MxFp4("weight", "weight_scale")
        case "int4" | "uint4", "per_group", 1 | -1, _, False if size:
            return QuarkInt4(size, is_symmetric, dtype == "int4", is_reordered)
    raise ModelError(
        f"config.json: quantization_config: weights of dtype {dtype!r}, qscheme {scheme!r}, ch_axis {axis} and "
        f"group_size {size} with scales {'of exponents' if has_exponents else 'in floating point'} are not supported"
    )
