"""Reading `quantization_config` of AWQ and GPTQ checkpoints, as AutoAWQ, AutoGPTQ, GPTQModel, transformers and
AutoRound write it. Torch-free.

The checkpoint's tensors show which modules are quantised, so keys that only describe how a checkpoint was made are
ignored.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.quark_config import read_export
from serve_llm.engine.model.weight_format import DynamicModules, PackedIntegers

CALIBRATION = (  # how scales were found, and which kernels the writer used
    "act_group_aware backend batch_size block_name_to_quantize cache_block_outputs cache_examples_on_gpu "
    "damp_auto_increment damp_percent dataset disable_exllama do_fuse exllama_config fuse_max_seq_len hyb_act "
    "max_input_length meta model_file_base_name model_name_or_path model_seqlen "
    "module_name_preceding_first_block modules_in_block_to_quantize modules_to_fuse mse offload_to_disk "
    "offload_to_disk_path static_groups tokenizer true_sequential use_cuda_fp16 use_exllama "
    # AutoRound's; activations are not rounded
    "act_bits act_data_type act_dynamic act_group_size act_sym amp autoround_version enable_minmax_tuning "
    "enable_norm_bias_tuning enable_quanted_input gradient_accumulate_steps iters low_gpu_mem_usage lr minmax_lr "
    "model_free nsamples provider quant_block_list scale_dtype seqlen static_attention_dtype "
    "static_attention_granularity static_kv_dtype static_kv_granularity supported_types to_quant_block_names train_bs"
).split()

# AutoRound's names for layouts, with "auto_round:" before most of them. `packing_format` names the layout; versions
# before 0.5 wrote `backend` instead, with the kernel after the last colon.
AUTOROUND_LAYOUTS: dict[str, Literal["awq", "gptq", "gptq_v2"]] = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
# A backend with the name of AutoRound, in each of its spellings, packed zero points as they are; AutoGPTQ's minus 1.
KERNELS = ("cuda", "exllamav1", "exllamav2", "triton", "tritonv2")
OLDER_BACKENDS: dict[str, Literal["awq", "gptq", "gptq_v2"]] = {
    **{f"{name}:{kernel}": "gptq_v2" for name in ("auto_round", "autoround", "auto-round") for kernel in KERNELS[2:]},
    **{f"{name}:{kernel}": "gptq" for name in ("gptq", "auto_gptq") for kernel in KERNELS},
    **{f"auto_round:{name}:{kernel}": "gptq" for name in ("gptq", "auto_gptq") for kernel in KERNELS},
    "auto_round:awq:gemm": "awq",
}

Rule = tuple[str, PackedIntegers | None]  # see `DynamicModules`
UNQUANTISED = 16  # bits
REGEX_CHARACTERS = frozenset("*+?^$()[]{}|\\")  # a name with one of these characters is a pattern, as in AutoRound


def read_awq(config: ConfigReader) -> DynamicModules:
    """Raises ModelError for versions other than "gemm" and "gemv", whose layouts differ."""
    layouts: dict[str, Literal["awq", "awq_gemv"]] = {"gemm": "awq", "gemv": "awq_gemv"}
    versions = layouts | {name.upper(): layout for name, layout in layouts.items()}
    layout = config.choice("version", versions, "gemm")
    for key in ("format", "checkpoint_format"):
        if config.text(key) is not None:
            layout = config.choice(key, versions, "gemm")
    config.only("desc_act", None, False)
    read_export(config, "reorder")
    config.ignore("sym")  # transformers writes it regardless of zero_point
    bits = _read_either(config, "bits", "w_bit")
    if bits != 4:
        raise ModelError(f"config.json: quantization_config: AWQ with {bits} bits is not supported (supported: 4)")
    group_size = _read_group_size(config, _read_either(config, "group_size", "q_group_size"))
    has_zeros = config.flag("zero_point", True)  # otherwise each is stored as 8
    return _read_whole(config, PackedIntegers(layout, bits, group_size, is_symmetric=not has_zeros))


def read_gptq(config: ConfigReader) -> DynamicModules:
    """Read GPTQ settings. `dynamic` maps regular expressions for module names to settings of their own; those that
    begin with "-:" exclude modules."""
    layouts: dict[str, Literal["gptq", "gptq_v2"]] = {"gptq": "gptq", "gptq_v2": "gptq_v2"}
    newer_key = config.choice("format", layouts, "gptq")
    layout = config.choice("checkpoint_format", layouts, newer_key)
    bits = _read_bits(config, None)
    group_size = _read_group_size(config, config.integer("group_size", -1, lowest=-1))
    is_symmetric = config.flag("sym", True)
    has_order = config.flag("desc_act", False) and group_size is not None
    return _read_whole(config, PackedIntegers(layout, bits, group_size, is_symmetric, has_order))


def read_autoround(config: ConfigReader) -> DynamicModules:
    """Read AutoRound's settings, for the layouts of GPTQ and AWQ. `extra_config` has settings for modules, by name or
    regular expression; modules with 16 bits are not quantised."""
    layout = config.choice("packing_format", AUTOROUND_LAYOUTS, "auto_round:auto_gptq")
    if config.text("packing_format") is None and config.text("backend") not in (None, "auto"):
        layout = config.choice("backend", AUTOROUND_LAYOUTS | OLDER_BACKENDS, "")
    bits = _read_bits(config, None)
    size = _read_group_size(config, config.integer("group_size", None, lowest=-1))
    if layout == "awq" and bits != 4:
        raise ModelError(f"config.json: quantization_config: AWQ with {bits} bits is not supported (supported: 4)")
    config.only("desc_act", None, False)
    whole = PackedIntegers(layout, bits, size, config.flag("sym", True))
    return replace(_read_whole(config, whole), rules=_read_extra(config.inner("extra_config"), whole))


def _read_extra(extra: ConfigReader | None, whole: PackedIntegers) -> tuple[Rule, ...]:
    """Names take precedence over patterns, which may match anywhere in a name."""
    if extra is None:
        return ()
    named: list[Rule] = []
    matched: list[Rule] = []
    for name in extra.keys:
        _check_pattern("extra_config", name, name)
        own = _read_own_format(f"extra_config: {name}", extra.require(name), whole)
        if REGEX_CHARACTERS & set(name):
            matched.append((f".*({name})", own))
        else:
            named.append((f"{re.escape(name)}$", own))
    extra.done()
    return (*named, *matched)


def _read_whole(config: ConfigReader, whole: PackedIntegers) -> DynamicModules:
    """Read the common parts of AWQ and GPTQ. whole: the format of modules without their own rule."""
    unconverted = tuple(name for key in ("modules_to_not_convert", "ignore") for name in config.names(key) or ())
    config.refuse("is_marlin_format")
    config.only("method", None, config.text("quant_method"))  # GPTQModel writes both
    config.only("pack_dtype", None, "int32")
    config.only("data_type", None, "int")
    config.empty("activation", "regex_config", "rotation", "rotation_configs", "super_bits", "super_group_size")
    config.ignore(*CALIBRATION)
    packs_head = config.flag("lm_head", False)
    return DynamicModules(whole, _read_rules(config, whole), unconverted, packs_head)


def _read_rules(config: ConfigReader, whole: PackedIntegers) -> tuple[Rule, ...]:
    dynamic = config.inner("dynamic")
    if dynamic is None:
        return ()
    rules: list[Rule] = []
    for key in dynamic.keys:
        pattern = key.removeprefix("+:").removeprefix("-:")
        _check_pattern("dynamic", key, pattern)
        changes = dynamic.inner(key)
        if key.startswith("-:"):
            rules.append((pattern, None))
            if changes is not None:
                changes.ignore(*changes.keys)
        else:
            rules.append((pattern, whole if changes is None else _read_own_format(f"dynamic: {key}", changes, whole)))
    dynamic.done()
    return tuple(rules)


def _read_own_format(where: str, changes: ConfigReader, whole: PackedIntegers) -> PackedIntegers | None:
    """Read the format of modules with settings of their own; None with 16 bits."""
    group_size = changes.integer("group_size", whole.group_size or -1, lowest=-1)
    bits = changes.integer("bits", whole.bits)
    own = replace(
        whole,
        bits=whole.bits if bits == UNQUANTISED else _read_bits(changes, whole.bits),
        group_size=_read_group_size(changes, group_size),
        is_symmetric=changes.flag("sym", whole.is_symmetric),
        has_order=changes.flag("desc_act", whole.has_order) and group_size != -1,
    )
    if own.layout == "awq" and own.bits != whole.bits:
        raise ModelError(f"config.json: quantization_config: {where}: AWQ with {own.bits} bits")
    changes.only("data_type", None, "int", *(("fp", "float") if bits == UNQUANTISED else ()))
    changes.ignore(*CALIBRATION)
    changes.done()
    return None if bits == UNQUANTISED else own


def _check_pattern(where: str, key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ModelError(
            f"config.json: quantization_config: {where}: {key!r} is not a valid pattern: {error}"
        ) from None


def _read_either(config: ConfigReader, key: str, older: str) -> int:
    value = config.integer(older, -2, lowest=-1)
    return config.integer(key, None if value == -2 else value, lowest=-1)


def _read_bits(config: ConfigReader, default: int | None) -> int:
    bits = config.integer("bits", default)
    if bits not in (2, 3, 4, 8):
        raise ModelError(
            f"config.json: quantization_config: bits {bits} is not supported for GPTQ (supported: 2, 3, 4, 8)"
        )
    return bits


def _read_group_size(config: ConfigReader, size: int) -> int | None:
    """None for -1, which means one group of all inputs."""
    if size == 0:
        raise ModelError("config.json: quantization_config: group_size must be above 0, or -1, but it is 0")
    return None if size == -1 else size
