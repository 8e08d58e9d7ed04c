"""Strict reading of PEFT's adapter_config.json: every key is used, known to be harmless, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from serve_llm.common.adapter_files import ADAPTER_CONFIG as CONFIG
from serve_llm.common.errors import AdapterError
from serve_llm.engine.lora.module_patterns import ModulePatterns

# Keys that do not change what a trained adapter computes.
IGNORED = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "runtime_config"),
        *("lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
        *("eva_config", "loftq_config", "corda_config", "lora_ga_config"),  # see init_lora_weights
        *("layers_to_transform", "layers_pattern", "exclude_modules"),  # the tensors say which modules are adapted
    )
)
REASONS = {
    "bias": "adapters with biases are not supported, only bias: none",
    "lora_bias": "adapters with biases are not supported",
    "modules_to_save": "modules that are stored whole are not supported",
    "trainable_token_indices": "trained embeddings are not supported",
    "layer_replication": "replicated layers are not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "megatron_config": "Megatron's parallel layers are not supported",
}
# Initialisations that also change the base model's weights: the adapter's files alone do not define the model.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
ALL_LINEAR = "all-linear"
TASKS = ("CAUSAL_LM", "FEATURE_EXTRACTION")  # the latter, without an LM head, are adapters for embeddings


class ProductConfig(NamedTuple):
    """What the config says about an adapted module."""

    rank: int
    scale: float  # factor of the low-rank product


@dataclass(frozen=True)
class AdapterConfig:
    rank: int
    alpha: float
    is_rank_stabilised: bool  # rsLoRA: the scale is alpha / sqrt(rank)
    rank_pattern: ModulePatterns[int]
    alpha_pattern: ModulePatterns[float]
    modules: tuple[str, ...] | None  # suffixes of the names of adapted modules; None: the tensors determine them
    parameters: tuple[str, ...]  # suffixes of adapted parameters' names: experts' weights, routers' with .weight
    is_all_linear: bool  # adapt all linear layers of attention and feed-forward networks
    use_dora: bool  # each module also has a magnitude for each of its outputs
    ties_weights: bool  # an embedding's adapter also applies to a tied LM head, and vice versa

    def find_product(self, module: str) -> ProductConfig:
        rank = self.rank_pattern.find(module, self.rank)
        alpha = self.alpha_pattern.find(module, self.alpha)
        return ProductConfig(rank, alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank))

    def adapts(self, module: str, kind: str = "linear") -> bool | None:
        """Whether the config names the module; None if only the tensors determine it. kind: as in `LoRATarget`."""
        if kind == "experts":
            return self.names_parameter(module)
        if kind == "router" and self.names_parameter(f"{module}.weight"):
            return True
        if self.is_all_linear:  # only some versions of transformers have routers and experts as linear layers
            return None if kind in ("router", "expert") else kind == "linear"
        return None if self.modules is None else _is_named(module, self.modules)

    def names_parameter(self, parameter: str) -> bool:
        return _is_named(parameter, self.parameters)


def read_adapter_config(raw: object) -> AdapterConfig:
    """raw: the parsed JSON. Raises AdapterError."""
    if not isinstance(raw, dict):
        raise AdapterError(f"{CONFIG} must be a JSON object")
    config: dict[str, object] = dict(raw)
    kind = config.pop("peft_type", None)
    if kind != "LORA":
        raise AdapterError(f"{CONFIG}: peft_type must be LORA, not {kind!r}")
    task = config.pop("task_type", None)
    if task not in (None, *TASKS):
        raise AdapterError(f"{CONFIG}: task_type must be {' or '.join(TASKS)}, not {task!r}")
    beginning = config.pop("init_lora_weights", True)
    if isinstance(beginning, str) and beginning.lower().startswith(CHANGES_BASE):
        raise AdapterError(
            f"{CONFIG}: init_lora_weights: {beginning} changes the base model's weights; convert the adapter with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    parameters = config.pop("target_parameters", None) or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise AdapterError(f"{CONFIG}: target_parameters must be a list of names")
    rank = _read_rank("r", config.pop("r", None))
    alpha = _read_number("lora_alpha", config.pop("lora_alpha", None))
    ranks = {
        pattern: _read_rank(f"rank_pattern.{pattern}", value) for pattern, value in _read_object("rank_pattern", config)
    }
    alphas = {
        pattern: _read_number(f"alpha_pattern.{pattern}", value)
        for pattern, value in _read_object("alpha_pattern", config)
    }
    rank_pattern = ModulePatterns(f"{CONFIG}: rank_pattern", ranks)
    alpha_pattern = ModulePatterns(f"{CONFIG}: alpha_pattern", alphas)
    use_rslora = _read_flag("use_rslora", config)
    use_dora = _read_flag("use_dora", config)
    ties_weights = _read_flag("ensure_weight_tying", config)
    targets = config.pop("target_modules", None)
    is_partial = bool(config.get("layers_to_transform") or config.get("exclude_modules"))
    modules: tuple[str, ...] | None = None
    if parameters and not targets:
        modules = ()
    elif isinstance(targets, list) and targets and all(isinstance(name, str) for name in targets):
        modules = None if is_partial else tuple(targets)
    elif not isinstance(targets, str):
        raise AdapterError(f"{CONFIG}: target_modules must be a list of names, a regular expression or {ALL_LINEAR}")
    if config.pop("bias", "none") != "none":
        raise AdapterError(f"{CONFIG}: bias: {REASONS['bias']}")
    for name, value in config.items():
        if name not in IGNORED and value not in (None, False, [], {}):
            raise AdapterError(f"{CONFIG}: {name}: {REASONS.get(name, 'this key is not known')}")
    is_all_linear = targets == ALL_LINEAR and not is_partial
    return AdapterConfig(
        rank=rank,
        alpha=alpha,
        is_rank_stabilised=use_rslora,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        modules=modules,
        parameters=tuple(parameters),
        is_all_linear=is_all_linear,
        use_dora=use_dora,
        ties_weights=ties_weights,
    )


def _is_named(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _read_flag(key: str, config: dict[str, object]) -> bool:
    value = config.pop(key, None)
    if value is None:  # as Axolotl writes an option that is not set
        return False
    if not isinstance(value, bool):
        raise AdapterError(f"{CONFIG}: {key} must be true or false, not {value!r}")
    return value


def _read_object(key: str, config: dict[str, object]) -> Iterable[tuple[str, object]]:
    value = config.pop(key, None) or {}
    if not isinstance(value, dict):
        raise AdapterError(f"{CONFIG}: {key} must be an object")
    return value.items()


def _read_rank(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AdapterError(f"{CONFIG}: {key} must be a positive integer, not {value!r}")
    return value


def _read_number(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise AdapterError(f"{CONFIG}: {key} must be a number, not {value!r}")
    return float(value)
