"""Reading `quantization_config` of config.json: int8 compressed-tensors checkpoints, weights in blocks of 8-bit floats,
and nothing else. Torch-free; knows no family.

The format of int8 is that of the compressed-tensors library (`QuantizationConfig`), which llm-compressor writes; that
of 8-bit floats is transformers' (`FineGrainedFP8Config`), which DeepSeek-V3 came with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from serve_llm.engine.errors import ModelError
from serve_llm.engine.model.config import Config


@dataclass(frozen=True)
class Blocks:
    """Weights in 8-bit floats, which become the model's dtype while loading; activations are not rounded."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Stored:
    """Int8 weights in a checkpoint: of all linear modules but those that `ignore` names."""

    ignore: tuple[str, ...]  # names of modules, or `re:` and a regular expression that matches their beginning

    def ignores(self, module: str) -> bool:
        return any(
            re.match(entry[3:], module) is not None if entry.startswith("re:") else entry == module
            for entry in self.ignore
        )


def read(config: Config) -> Stored | Blocks:
    """config: the object under `quantization_config`. Raises ModelError, and OptionError as `Config.done` does."""
    method = config.choice("quant_method", {"compressed-tensors": "int8", "fp8": "fp8"}, "")
    found = _blocks(config) if method == "fp8" else _int8(config)
    config.done()
    return found


def _blocks(config: Config) -> Blocks:
    config.only("fmt", None, "e4m3")
    config.only("activation_scheme", None, "dynamic")
    # Which weights are stored so, the checkpoint shows by their scales; how scales were rounded is of no influence.
    config.ignore("modules_to_not_convert", "scale_fmt", "dequantize")
    size = config.integers("weight_block_size", lowest=1, highest=2**31 - 1)
    if size is None or len(size) != 2:
        raise ModelError(
            f"config.json: quantization_config: weight_block_size must be two whole numbers, but it is {size}"
        )
    return Blocks(*size)


def _int8(config: Config) -> Stored:
    config.only("format", "int-quantized")
    config.only("quantization_status", None, "compressed", "frozen")
    config.empty("kv_cache_scheme", "transform_config")
    config.ignore("global_compression_ratio", "version")
    if sparsity := config.inner("sparsity_config"):
        sparsity.only("format", None, "dense")
        sparsity.ignore("global_sparsity", "registry_requires_subclass", "sparsity_structure")
        sparsity.done()
    groups = config.needed("config_groups")
    if len(groups.keys) != 1:
        raise ModelError("config.json: quantization_config: config_groups must be one group")
    _check_group(groups.needed(*groups.keys))
    groups.done()
    ignore = config.names("ignore") or ()
    _check_patterns(ignore)
    return Stored(ignore)


def _check_group(config: Config) -> None:
    config.only("targets", ["Linear"])
    config.only("format", None, "int-quantized")
    config.empty("output_activations")
    for part, strategy, dynamic in (("weights", "channel", False), ("input_activations", "token", True)):
        numbers = config.needed(part)
        numbers.only("num_bits", 8)
        numbers.only("type", "int")
        numbers.only("symmetric", True)
        numbers.only("strategy", strategy)
        numbers.only("dynamic", dynamic)
        numbers.empty("actorder", "block_structure", "group_size")
        numbers.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
        numbers.done()
    config.done()


def _check_patterns(ignore: tuple[str, ...]) -> None:
    for entry in ignore:
        try:
            re.compile(entry[3:] if entry.startswith("re:") else "")
        except re.error as error:
            raise ModelError(f"config.json: quantization_config: ignore: {entry!r} is no pattern: {error}") from None
