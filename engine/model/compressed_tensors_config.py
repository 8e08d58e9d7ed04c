"""Reading `quantization_config` of checkpoints that compressed-tensors and llm-compressor write. Torch-free.

A configuration has groups of modules; each group has its own numbers for weights and activations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.weight_format import (
    MXFP8,
    FormatGroup,
    MxFp4,
    NvFp4,
    PackedIntegers,
    ScaledNumbers,
    TargetedModules,
    WeightFormat,
)

CLASSES = ("Linear", "Embedding")  # modules that groups may name
CALIBRATION = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")  # how scales were found


@dataclass(frozen=True)
class Int8Checkpoint:
    """All linear modules except those matched by `ignore` have int8 weights and get int8 activations."""

    ignore: tuple[str, ...]  # module names, or `re:` and a regular expression that matches the start of a name

    def ignores(self, module: str) -> bool:
        return any(
            re.match(entry[3:], module) is not None if entry.startswith("re:") else entry == module
            for entry in self.ignore
        )

    def without_activations(self) -> TargetedModules:
        """The same weights, multiplied with activations that are not quantised."""
        return TargetedModules((FormatGroup(("Linear",), ScaledNumbers("int8", "channel")),), self.ignore)


def read_compressed_tensors(config: ConfigReader) -> Int8Checkpoint | TargetedModules:
    """Raises ModelError for numbers or strategies that are not supported."""
    default_format = config.text("format")
    config.only("quantization_status", None, "compressed", "frozen")
    config.empty("transform_config")
    if cache := config.inner("kv_cache_scheme"):  # `cache_scales` reads it if the cache is in fp8
        _read_activations("kv_cache_scheme", cache)
    config.ignore("attention_input_activations", "global_compression_ratio", "provider", "version")
    if sparsity := config.inner("sparsity_config"):
        sparsity.only("format", None, "dense")
        sparsity.ignore("global_sparsity", "registry_requires_subclass", "sparsity_structure", "targets", "ignore")
        sparsity.done()
    ignore = config.names("ignore") or ()
    _check_patterns("ignore", ignore)
    groups = config.require("config_groups")
    found = [
        _read_group(group, default_format)
        for group in map(groups.require, groups.keys)
        if not _is_for_activations_only(group)
    ]
    groups.done()
    if len(found) == 1 and found[0][1]:
        return Int8Checkpoint(ignore)
    return TargetedModules(tuple(group for group, _ in found), ignore)


def _is_for_activations_only(config: ConfigReader) -> bool:
    """Whether the group specifies no weights, like groups of attention modules. It then has no effect."""
    if config.inner("weights") is not None:
        return False
    config.ignore("format")
    config.empty("output_activations")
    config.names("targets")
    if activations := config.inner("input_activations"):
        _read_activations("input_activations", activations)
    config.done()
    return True


def _read_group(config: ConfigReader, default_format: str | None) -> tuple[FormatGroup, bool]:
    """Read the group, and whether it is int8 weights and activations of all linear modules, see `Int8Checkpoint`."""
    stored = config.text("format") or default_format
    config.empty("output_activations")
    weights = config.require("weights")
    activations = config.inner("input_activations")
    targets = config.names("targets") or ()
    _check_patterns("targets", targets)
    if classes := [target for target in targets if target not in CLASSES and target[:1].isupper()]:
        raise ModelError(
            f"config.json: quantization_config: config_groups: targets {classes[0]!r} is not supported "
            '(supported: "Linear", "Embedding", names of modules, and "re:" with a regular expression)'
        )
    numbers = _read_numbers(weights, stored)
    rounding = None if activations is None else _read_activations("input_activations", activations)
    config.done()
    is_int8 = numbers == ScaledNumbers("int8", "channel") and rounding == "int8 per token" and targets == ("Linear",)
    is_float8 = isinstance(numbers, ScaledNumbers) and numbers.kind == "fp8" and not numbers.has_exponents
    if isinstance(numbers, ScaledNumbers) and is_float8 and rounding in ("dynamic", "static"):
        numbers = replace(numbers, inputs=rounding)
    return FormatGroup(targets, numbers), is_int8


def _read_activations(where: str, config: ConfigReader) -> Literal["int8 per token", "dynamic", "static"] | None:
    """Return how activations are rounded: to int8, or to 8-bit floats with such scales. None: in another way, in which
    they are not rounded here, which is more exact.

    Raises ModelError for an unknown number format.
    """
    bits = config.integer("num_bits")
    kind = config.choice("type", {"int": "int", "float": "float"}, "int")
    if bits not in (4, 8):
        raise ModelError(
            f"config.json: quantization_config: {where}: num_bits {bits} is not supported (supported: 4, 8)"
        )
    is_dynamic = config.flag_or("dynamic", "local")
    strategies = {name: name for name in ("tensor", "token", "group", "tensor_group", "channel", "block", "attn_head")}
    strategy = config.choice("strategy", strategies, "tensor")
    is_symmetric = config.flag("symmetric", True)
    config.ignore("actorder", "block_structure", "group_size", *CALIBRATION)
    config.done()
    if (bits, kind, is_symmetric) == (8, "float", True):
        return "dynamic" if is_dynamic else "static"
    return (
        "int8 per token" if (bits, kind, strategy, is_dynamic) == (8, "int", "token", True) and is_symmetric else None
    )


def _read_numbers(weights: ConfigReader, stored: str | None) -> WeightFormat:
    weights.only("dynamic", None, False)
    weights.ignore(*CALIBRATION)
    readers = {
        "pack-quantized": _read_packed,
        "int-quantized": _read_int8,
        "float-quantized": _read_fp8,
        "naive-quantized": _read_naive,
        "nvfp4-pack-quantized": _read_nvfp4,
        "mxfp4-pack-quantized": _read_mxfp4,
        "mxfp8-quantized": _read_mxfp8,
    }
    if stored not in readers:
        raise ModelError(
            f"config.json: quantization_config: format {stored!r} is not supported (supported: {', '.join(readers)})"
        )
    numbers = readers[stored](weights)
    weights.done()
    return numbers


def _read_naive(weights: ConfigReader) -> WeightFormat:
    """Read numbers that fill bytes, of either type: the name that older versions wrote."""
    return _read_int8(weights) if weights.text("type") == "int" else _read_fp8(weights)


def _read_int8(weights: ConfigReader) -> WeightFormat:
    """Read int8 weights. 4-bit integers may also be stored one per byte."""
    weights.only("type", "int")
    weights.empty("block_structure")
    _check_order(weights)
    bits = weights.integer("num_bits")
    if bits not in (4, 8):
        raise ModelError(f"config.json: quantization_config: num_bits {bits} is not supported (supported: 4, 8)")
    has_zeros = not weights.flag("symmetric", True)
    strategy = weights.choice("strategy", {name: name for name in ("channel", "tensor", "group")}, "")
    if strategy != "group":
        weights.empty("group_size")
        return ScaledNumbers("int8", "channel" if strategy == "channel" else "tensor", bits=bits, has_zeros=has_zeros)
    return ScaledNumbers("int8", "block", (1, weights.integer("group_size")), bits=bits, has_zeros=has_zeros)


def _read_fp8(weights: ConfigReader) -> WeightFormat:
    weights.only("num_bits", 8)
    weights.only("type", "float")
    weights.only("symmetric", None, True)
    _check_order(weights)
    weights.ignore("group_size")
    block = weights.integers("block_structure", lowest=1, highest=2**31 - 1)
    strategy = weights.choice("strategy", {name: name for name in ("tensor", "channel", "block")}, "")
    if strategy != "block":
        return ScaledNumbers("fp8", "channel" if strategy == "channel" else "tensor")
    if block is None or len(block) != 2:
        raise ModelError("config.json: quantization_config: block_structure must be two whole numbers")
    return ScaledNumbers("fp8", "block", (block[0], block[1]))


def _read_nvfp4(weights: ConfigReader) -> WeightFormat:
    weights.only("num_bits", 4)
    weights.only("type", "float")
    weights.only("symmetric", None, True)
    weights.only("strategy", "tensor_group")
    weights.only("group_size", 16)
    _check_order(weights)
    weights.empty("block_structure")
    return NvFp4()


def _read_mxfp4(weights: ConfigReader) -> WeightFormat:
    _check_microscaling(weights, num_bits=4)
    return MxFp4()


def _read_mxfp8(weights: ConfigReader) -> WeightFormat:
    _check_microscaling(weights, num_bits=8)
    return MXFP8


def _check_microscaling(weights: ConfigReader, num_bits: int) -> None:
    weights.only("num_bits", num_bits)
    weights.only("type", "float")
    weights.only("symmetric", None, True)
    weights.only("strategy", "group")
    weights.only("group_size", 32)
    _check_order(weights)
    weights.empty("block_structure")


def _check_order(weights: ConfigReader) -> None:
    """Accept the orders in which GPTQ may round inputs whose groups still are of neighbouring inputs."""
    weights.only("actorder", None, "weight", "static")


def _read_packed(weights: ConfigReader) -> WeightFormat:
    weights.only("type", "int")
    bits = weights.integer("num_bits")
    if bits not in (4, 8):
        raise ModelError(f"config.json: quantization_config: num_bits {bits} is not supported (supported: 4, 8)")
    strategy = weights.choice("strategy", {name: name for name in ("group", "channel", "tensor")}, "")
    group_size = weights.integer("group_size", None if strategy == "group" else -1, lowest=-1)
    orders = {name: name for name in ("group", "weight", "static", "dynamic", "none")}
    has_order = weights.choice("actorder", orders, "none") in ("group", "dynamic")
    weights.empty("block_structure")
    is_symmetric = weights.flag("symmetric", True)
    if strategy == "tensor" and not is_symmetric:
        raise ModelError("config.json: quantization_config: strategy 'tensor' is supported for symmetric weights only")
    size = group_size if strategy == "group" else None
    return PackedIntegers("compressed", bits, size, is_symmetric, has_order, is_of_tensor=strategy == "tensor")


def _check_patterns(key: str, entries: tuple[str, ...]) -> None:
    for entry in entries:
        try:
            re.compile(entry[3:] if entry.startswith("re:") else "")
        except re.error as error:
            raise ModelError(
                f"config.json: quantization_config: {key}: {entry!r} is not a valid pattern: {error}"
            ) from None
