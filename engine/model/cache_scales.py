"""The scales of keys and values with which a checkpoint was calibrated for an fp8 KV cache. Torch-free.

compressed-tensors, AutoFP8, Model Optimizer and Quark store them next to the projections, one per layer or one per KV
head.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from dataclasses import replace

from serve_llm.common.options.parsers import OTHER_METHODS
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import AttentionSpec, MLASpec, ModelSpec
from serve_llm.engine.model.weight_map import WeightRule

logger = logging.getLogger(__name__)

CALIBRATED = ("compressed-tensors", "fp8", "modelopt")  # values of quant_method
INPUTS = ("k", "kv_down")  # projections next to which scales are stored
# Names in a layer's attention module; names that apply to both come last.
NAMES = ("{kind}_scale", "{kind}_proj.{kind}_scale", "attn.{kind}_scale", "{kind}_proj.output_scale", "kv_scale")


def is_calibrated(config: Mapping[str, object]) -> bool:
    """Whether the checkpoint's scales are for an fp8 KV cache. config: `quantization_config`."""
    method = str(config.get("quant_method"))
    method = OTHER_METHODS.get(method, method)
    stored = config.get("quantization")
    if method == "modelopt" and isinstance(stored, Mapping):  # as in hf_quant_config.json
        config = stored
    if method == "quark":
        return _is_calibrated_by_quark(config)
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        is_fp8 = (scheme.get("num_bits", 8), scheme.get("type")) == (8, "float")
        return method in CALIBRATED and is_fp8 and not scheme.get("dynamic")
    if method == "modelopt":
        return config.get("kv_cache_quant_algo") == "FP8"
    return method == "fp8"  # older versions of AutoFP8 wrote scales without a scheme


def _is_calibrated_by_quark(config: Mapping[str, object]) -> bool:
    """Whether the outputs of some modules that `kv_cache_group` names are 8-bit floats with a stored scale."""
    export, layers = config.get("export"), config.get("layer_quant_config")
    if not isinstance(export, Mapping) or not isinstance(layers, Mapping):
        return False
    named = export.get("kv_cache_group")
    groups = [layers.get(name) for name in named if isinstance(name, str)] if isinstance(named, list) else []
    outputs = [group.get("output_tensors") for group in groups if isinstance(group, Mapping)]
    return any(
        isinstance(output, Mapping) and output.get("dtype") == "fp8_e4m3" and not output.get("is_dynamic")
        for output in outputs
    )


def add_cache_scales(spec: ModelSpec) -> ModelSpec:
    """Return the spec with scales in all layers that cache keys and values."""
    return _change_attention(spec, dict.fromkeys(range(len(spec.layers)), True))


def find_cache_scales(
    spec: ModelSpec, rules: Mapping[str, WeightRule], stored: Container[str]
) -> tuple[ModelSpec, dict[str, WeightRule]]:
    """Return the spec, with scales only where the checkpoint has them, and the rules that read them.

    rules: those of all layers. stored: names of tensors, as in `rules`.

    A layer with only one scale uses it for keys and values.
    """
    if not any(_has_scales(layer.attention) for layer in spec.layers):
        return spec, {}
    modules = {
        parameter: tensor.removesuffix(".weight").rpartition(".")[0]
        for tensor, rule in rules.items()
        for parameter in rule.parameters
    }
    found: dict[str, WeightRule] = {}
    without: dict[int, bool] = {}
    for index, layer in enumerate(spec.layers):
        if not _has_scales(layer.attention):
            continue
        prefix = f"layers.{index}.attention"
        module = next((modules[name] for part in INPUTS if (name := f"{prefix}.{part}.weight") in modules), "")
        names = [_find_scale(module, kind, stored) for kind in "kv"]
        tensors = {kind: name or other for kind, name, other in zip("kv", names, reversed(names), strict=True)}
        if isinstance(layer.attention, MLASpec):
            del tensors["v"]
        if not tensors["k"]:
            without[index] = False
            continue
        for kind, tensor in tensors.items():
            before = found[tensor].parameters if tensor in found else ()
            found[tensor] = WeightRule(tensor, (*before, f"{prefix}.{kind}_cache_scale"), "per_head")
    if without:
        logger.warning(
            "%d of %d layers have no scales of keys and values for the KV cache in fp8; they use 1",
            len(without),
            len(spec.layers),
        )
    return _change_attention(spec, without), found


def count_cache_scales(spec: ModelSpec, shard: Shard) -> int:
    """Count the scale parameters that the shard's rank reads."""
    own = [spec.layers[index].attention for index in shard.layers]
    return sum(2 - isinstance(mixer, MLASpec) for mixer in own if _has_scales(mixer) and shard.attention(mixer).heads)


def _find_scale(module: str, kind: str, stored: Container[str]) -> str:
    names = (f"{module}.{name.format(kind=kind)}" for name in NAMES)
    return next((name for name in names if name in stored), "")


def _has_scales(mixer: object) -> bool:
    return isinstance(mixer, AttentionSpec | MLASpec) and mixer.cache_scales


def _change_attention(spec: ModelSpec, has_scales: Mapping[int, bool]) -> ModelSpec:
    """has_scales: by layer."""
    layers = list(spec.layers)
    for index, flag in has_scales.items():
        attention = layers[index].attention
        if isinstance(attention, AttentionSpec | MLASpec) and attention.causal:
            layers[index] = replace(layers[index], attention=replace(attention, cache_scales=flag))
    return replace(spec, layers=tuple(layers))
