"""A PEFT adapter on disk: adapter_config.json and adapter_model.safetensors, read and checked as a whole. No torch.

The digest of the two files is the adapter's identity: whoever loads it later compares what it reads with the digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors

from serve_llm.common.adapter_files import ADAPTER_CONFIG as CONFIG
from serve_llm.common.adapter_files import ADAPTER_WEIGHTS as WEIGHTS
from serve_llm.common.errors import AdapterError
from serve_llm.common.types import LoRATarget
from serve_llm.engine.lora.config import AdapterConfig, read_adapter_config

PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."  # before the module's name in those of PEFT's tensors
DOWN = ".lora_A.weight"  # (rank, inputs)
UP = ".lora_B.weight"  # (outputs, rank)
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class AdapterTensor(NamedTuple):
    dtype: str  # a key of ELEMENT_BYTES
    shape: tuple[int, ...]
    data: bytes


class AdapterModule(NamedTuple):
    """What an adapter adds to a module: scale * up @ down @ x."""

    down: AdapterTensor  # (rank, inputs)
    up: AdapterTensor  # (outputs, rank)
    scale: float


class AdapterContents(NamedTuple):
    digest: str
    modules: dict[str, AdapterModule]  # by `LoRATarget.module`


def read_adapter(directory: Path, targets: Mapping[str, LoRATarget], max_rank: int) -> AdapterContents:
    """Read and check the adapter of a directory.

    targets: the modules that an adapter may adapt, by each name that they may have. Raises AdapterError.
    """
    if not directory.is_dir():
        raise AdapterError(f"{directory} is not a directory with {CONFIG} and {WEIGHTS}")
    if (directory / PICKLE).is_file() and not (directory / WEIGHTS).is_file():
        raise AdapterError(f"{directory} has {PICKLE}, a pickle, which is not read; save the adapter as {WEIGHTS}")
    most = sum(max_rank * (target.outputs + target.inputs) for target in targets.values()) * 4 + MAX_HEADER_BYTES
    config_bytes = _read(directory / CONFIG, MAX_CONFIG_BYTES)
    weight_bytes = _read(directory / WEIGHTS, most)
    digest = _compute_digest(config_bytes, weight_bytes)
    try:
        config = read_adapter_config(json.loads(config_bytes))
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{directory / CONFIG} is not JSON: {error}") from None
    try:
        stored = safetensors.deserialize(weight_bytes)  # type: ignore[no-untyped-call]
        tensors = {
            str(name): AdapterTensor(tensor["dtype"], tuple(tensor["shape"]), tensor["data"]) for name, tensor in stored
        }
    except (safetensors.SafetensorError, ValueError) as error:
        raise AdapterError(f"{directory / WEIGHTS} cannot be read: {error}") from None
    return AdapterContents(digest, _match(config, tensors, targets, max_rank))


def compute_digest(directory: Path) -> str:
    """The digest of the files as they are now. Raises AdapterError."""
    return _compute_digest(_read(directory / CONFIG), _read(directory / WEIGHTS))


def _compute_digest(config: bytes, weights: bytes) -> str:
    return sha256(sha256(config).digest() + sha256(weights).digest()).hexdigest()


def _read(path: Path, most: int | None = None) -> bytes:
    try:
        if most is not None and path.stat().st_size > most:
            raise AdapterError(f"{path} is larger than an adapter of --max-lora-rank can be: {most:,} bytes")
        return path.read_bytes()
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from None


def _match(
    config: AdapterConfig, tensors: Mapping[str, AdapterTensor], targets: Mapping[str, LoRATarget], max_rank: int
) -> dict[str, AdapterModule]:
    names = {}  # module as the file calls it -> as the model does
    for name in sorted(tensors):
        module = name.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP)
        if not name.startswith(PREFIX) or not name.endswith((DOWN, UP)) or module not in targets:
            raise AdapterError(f"{WEIGHTS}: {name} is not supported: {_find_reason(name)}")
        if config.adapts(module) is False:
            raise AdapterError(f"{WEIGHTS}: {name} is none of {CONFIG}'s target_modules")
        names[module] = targets[module].module
    modules = {}
    for module, own_name in names.items():
        pair = [tensors.get(f"{PREFIX}{module}{kind}") for kind in (DOWN, UP)]
        down, up = pair
        if down is None or up is None:
            raise AdapterError(f"{WEIGHTS} lacks {PREFIX}{module}{DOWN if down is None else UP}")
        target = targets[module]
        rank = config.find_rank(module)
        if rank > max_rank:
            raise AdapterError(f"{CONFIG}: the rank of {module} is {rank}, more than --max-lora-rank {max_rank}")
        _check(f"{PREFIX}{module}{DOWN}", down, (rank, target.inputs))
        _check(f"{PREFIX}{module}{UP}", up, (target.outputs, rank))
        if own_name in modules:
            raise AdapterError(f"{WEIGHTS}: {module} is there under two names")
        modules[own_name] = AdapterModule(down, up, config.find_scale(module))
    if not modules:
        raise AdapterError(f"{WEIGHTS} has no tensors")
    spellings: dict[str, list[str]] = {}
    for spelling, target in targets.items():
        spellings.setdefault(target.module, []).append(spelling)
    for own_name, all_names in spellings.items():
        if own_name not in modules and any(map(config.adapts, all_names)):
            raise AdapterError(f"{WEIGHTS} lacks {PREFIX}{own_name}{DOWN}, which {CONFIG}'s target_modules name")
    return modules


def _find_reason(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "DoRA is not served"
    if "lora_embedding" in name or "embed_tokens" in name or "lm_head" in name:
        return "embeddings and the LM head take no adapters here"
    if "experts" in name or "mlp.gate." in name or "router" in name:
        return "experts and routers take no adapters here"
    return "the model has no such linear layer that an adapter can change"


def _check(name: str, tensor: AdapterTensor, shape: tuple[int, int]) -> None:
    if tensor.dtype not in ELEMENT_BYTES:
        raise AdapterError(f"{WEIGHTS}: {name} is stored as {tensor.dtype}, not as one of {', '.join(ELEMENT_BYTES)}")
    if tensor.shape != shape:
        raise AdapterError(f"{WEIGHTS}: {name} has shape {list(tensor.shape)}, but must have {list(shape)}")
    if not _is_finite(tensor):
        raise AdapterError(f"{WEIGHTS}: {name} contains numbers that are not finite")


def _is_finite(tensor: AdapterTensor) -> bool:
    if tensor.dtype == "BF16":
        bits = np.frombuffer(tensor.data, np.uint16)
        return not bool(((bits & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(np.frombuffer(tensor.data, np.float32 if tensor.dtype == "F32" else np.float16)).all())
