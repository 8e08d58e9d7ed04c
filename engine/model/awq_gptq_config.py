"""Reading `quantization_config` of AWQ and GPTQ checkpoints, as AutoAWQ, AutoGPTQ and GPTQModel write it. Torch-free.

Which modules are quantised shows in the checkpoint's tensors, so keys that only say how a checkpoint was made are
ignored.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.weight_format import DynamicModules, PackedIntegers, UnlistedModules

CALIBRATION = (  # how scales were found, and which kernels the writer's machine used
    "act_group_aware backend batch_size block_name_to_quantize cache_block_outputs cache_examples_on_gpu "
    "damp_auto_increment damp_percent dataset disable_exllama do_fuse exllama_config fuse_max_seq_len hyb_act "
    "is_marlin_format max_input_length meta model_file_base_name model_name_or_path model_seqlen "
    "module_name_preceding_first_block modules_in_block_to_quantize modules_to_fuse mse offload_to_disk "
    "offload_to_disk_path static_groups tokenizer true_sequential use_cuda_fp16 use_exllama"
).split()


def read_awq(config: ConfigReader) -> UnlistedModules:
    """Raises ModelError for other versions than "gemm", whose layouts differ."""
    for key in ("version", "format"):
        config.choice(key, {"gemm": "gemm", "GEMM": "gemm"}, "gemm")
    config.only("zero_point", None, True)
    bits = _read_either(config, "bits", "w_bit")
    if bits != 4:
        raise ModelError(f"config.json: quantization_config: AWQ with {bits} bits is not supported (supported: 4)")
    group_size = _read_group_size(config, _read_either(config, "group_size", "q_group_size"))
    unconverted = config.names("modules_to_not_convert") or ()
    config.ignore(*CALIBRATION)
    return UnlistedModules(PackedIntegers("awq", bits, group_size, is_symmetric=False), unconverted)


def read_gptq(config: ConfigReader) -> DynamicModules:
    """`dynamic` maps regular expressions for module names to settings of their own; with "-:" before them, to none."""
    layouts: dict[str, Literal["gptq", "gptq_v2"]] = {"gptq": "gptq", "gptq_v2": "gptq_v2"}
    newer_key = config.choice("format", layouts, "gptq")
    layout = config.choice("checkpoint_format", layouts, newer_key)
    bits = _read_bits(config, None)
    group_size = _read_group_size(config, config.integer("group_size", -1, lowest=-1))
    is_symmetric = config.flag("sym", True)
    config.only("pack_dtype", None, "int32")
    has_order = config.flag("desc_act", False) and group_size is not None
    config.ignore("lm_head", *CALIBRATION)
    whole = PackedIntegers(layout, bits, group_size, is_symmetric, has_order)
    return DynamicModules(whole, _read_rules(config, whole))


def _read_rules(config: ConfigReader, whole: PackedIntegers) -> tuple[tuple[str, PackedIntegers | None], ...]:
    dynamic = config.inner("dynamic")
    if dynamic is None:
        return ()
    rules: list[tuple[str, PackedIntegers | None]] = []
    for key in dynamic.keys:
        pattern = key.removeprefix("+:").removeprefix("-:")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelError(
                f"config.json: quantization_config: dynamic: {key!r} is not a valid pattern: {error}"
            ) from None
        changes = dynamic.inner(key)
        if key.startswith("-:"):
            rules.append((pattern, None))
            if changes is not None:
                changes.ignore(*changes.keys)
        elif changes is None:
            rules.append((pattern, whole))
        else:
            group_size = changes.integer("group_size", whole.group_size or -1, lowest=-1)
            own = replace(
                whole,
                bits=_read_bits(changes, whole.bits),
                group_size=_read_group_size(changes, group_size),
                is_symmetric=changes.flag("sym", whole.is_symmetric),
                has_order=changes.flag("desc_act", whole.has_order) and group_size != -1,
            )
            rules.append((pattern, own))
            changes.ignore(*CALIBRATION)
            changes.done()
    dynamic.done()
    return tuple(rules)


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
