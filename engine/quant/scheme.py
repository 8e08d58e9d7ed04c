"""Reading `quantization_config` of config.json: int8 compressed-tensors checkpoints, weights in blocks of 8-bit floats,
and nothing else. Torch-free.

A closed world as `model.config` is: every key means what is served here, is known to be harmless, or is an error that
names it. The format of int8 is that of the compressed-tensors library (`QuantizationConfig`), which llm-compressor
writes; that of 8-bit floats is transformers' (`FineGrainedFP8Config`), which DeepSeek-V3 came with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from serve_llm.engine.errors import ModelError

SUPPORTED = (
    "supported: quant_method compressed-tensors, format int-quantized, with weights of 8 bits, symmetric, one scale "
    "per channel, and activations of 8 bits, symmetric, dynamic, one scale per token; or quant_method fp8, fmt e4m3, "
    "with a weight_block_size"
)
Allowed = dict[str, tuple[object, ...] | None]
_ANY = None  # of no influence on what is computed
_NOTHING: tuple[object, ...] = (None, False, "", {}, [])
# Each object's keys and their allowed values. All other keys must be absent or say nothing.
_NUMBERS: Allowed = {
    "num_bits": (8,),
    "type": ("int",),
    "symmetric": (True,),
    **dict.fromkeys(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"), _ANY),
}
WEIGHTS: Allowed = {**_NUMBERS, "strategy": ("channel",), "dynamic": (False,)}
ACTIVATIONS: Allowed = {**_NUMBERS, "strategy": ("token",), "dynamic": (True,)}
GROUP: Allowed = {
    "targets": (["Linear"],),
    "format": (None, "int-quantized"),
    **dict.fromkeys(("weights", "input_activations"), _ANY),
}
SPARSITY: Allowed = {
    "format": (None, "dense"),
    **dict.fromkeys(("global_sparsity", "registry_requires_subclass", "sparsity_structure"), _ANY),
}
WHOLE: Allowed = {
    "quant_method": ("compressed-tensors",),
    "format": ("int-quantized",),
    "quantization_status": (None, "compressed", "frozen"),
    **dict.fromkeys(("config_groups", "ignore", "sparsity_config", "global_compression_ratio", "version"), _ANY),
}
FP8: Allowed = {
    "quant_method": ("fp8",),
    "fmt": (None, "e4m3"),
    "activation_scheme": (None, "dynamic"),
    # Which weights are stored so, the checkpoint shows by their scales; how scales were rounded is of no influence.
    **dict.fromkeys(("weight_block_size", "modules_to_not_convert", "scale_fmt", "dequantize"), _ANY),
}


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


def read(value: object) -> Stored | Blocks | None:
    """value: what stands under `quantization_config`. None when it is absent or empty. Raises ModelError."""
    if value in _NOTHING:
        return None
    if isinstance(value, dict) and value.get("quant_method") == "fp8":
        return _blocks(_checked(value, "quantization_config", FP8).get("weight_block_size"))
    whole = _checked(value, "quantization_config", WHOLE)
    groups = whole.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ModelError(f"config.json: quantization_config: config_groups must be one group; {SUPPORTED}")
    ((name, group),) = groups.items()
    where = f"quantization_config: {name}"
    parts = _checked(group, where, GROUP)
    _checked(parts.get("weights"), f"{where}: weights", WEIGHTS)
    _checked(parts.get("input_activations"), f"{where}: input_activations", ACTIVATIONS)
    _checked(whole.get("sparsity_config") or {}, "quantization_config: sparsity_config", SPARSITY)
    ignore = whole.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(entry, str) for entry in ignore):
        raise ModelError("config.json: quantization_config: ignore must be a list of names of modules")
    _check_patterns(ignore)
    return Stored(tuple(ignore))


def _blocks(size: object) -> Blocks:
    if not isinstance(size, list) or len(size) != 2 or not all(type(number) is int and number > 0 for number in size):
        raise ModelError(
            f"config.json: quantization_config: weight_block_size must be two whole numbers, but it is {size!r}; "
            f"{SUPPORTED}"
        )
    return Blocks(*size)


def _checked(value: object, where: str, allowed: Allowed) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ModelError(f"config.json: {where} must be an object, but it is {value!r}; {SUPPORTED}")
    for key in (*allowed, *value):
        found, good = value.get(key), allowed.get(key, _NOTHING)
        if good is not _ANY and not any(found == one and type(found) is type(one) for one in good):
            raise ModelError(f"config.json: {where}: {key} {found!r} is not supported; {SUPPORTED}")
    return value


def _check_patterns(ignore: list[str]) -> None:
    for entry in ignore:
        try:
            re.compile(entry[3:] if entry.startswith("re:") else "")
        except re.error as error:
            raise ModelError(f"config.json: quantization_config: ignore: {entry!r} is no pattern: {error}") from None
