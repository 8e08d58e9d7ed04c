"""A PEFT adapter on disk: adapter_config.json and adapter_model.safetensors, read and checked as a whole. No torch.

The digest of the two files is the adapter's identity: whoever loads it later compares what it reads with the digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import safetensors

from serve_llm.common.adapter_files import ADAPTER_CONFIG as CONFIG
from serve_llm.common.adapter_files import ADAPTER_WEIGHTS as WEIGHTS
from serve_llm.common.errors import AdapterError
from serve_llm.common.types import LoRATarget
from serve_llm.engine.lora.base_copies import BaseCopy
from serve_llm.engine.lora.config import AdapterConfig, read_adapter_config
from serve_llm.engine.lora.tensors import AdapterTensor, check_tensor

PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."  # before the module's name in those of PEFT's tensors
DOWN = ".lora_A.weight"  # (rank, inputs)
UP = ".lora_B.weight"  # (outputs, rank)
MAGNITUDE = ".lora_magnitude_vector"  # (outputs,); with DoRA
EMBEDDING_DOWN = ".lora_embedding_A"  # (rank, vocabulary)
EMBEDDING_UP = ".lora_embedding_B"  # (embedding size, rank)
COPIES = (".base_layer.weight", ".weight")  # the base model's own weight
BIAS_COPIES = (".base_layer.bias", ".bias")
_KINDS = {  # suffixes by `LoRATarget.kind`: the weight of the first product, that of the second, and others
    "linear": (DOWN, UP, MAGNITUDE),
    "head": (DOWN, UP, MAGNITUDE, *COPIES, *BIAS_COPIES),
    "embedding": (EMBEDDING_DOWN, EMBEDDING_UP, MAGNITUDE, *COPIES),
}
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20


class AdapterModule(NamedTuple):
    """What an adapter makes of a module with weight W: (W + scale * up @ down) x. Of an embedding, x has a 1 at the id.

    With DoRA (arXiv:2402.09353) each row of that sum is brought to the length that `magnitude` says.
    """

    down: AdapterTensor  # (rank, inputs)
    up: AdapterTensor  # (outputs, rank)
    scale: float
    magnitude: AdapterTensor | None = None  # (outputs,)


class AdapterContents(NamedTuple):
    digest: str
    modules: dict[str, AdapterModule]  # by `LoRATarget.module`
    copies: list[BaseCopy]  # must be equal to the base model's weights


def read_adapter(directory: Path, targets: Mapping[str, LoRATarget], max_rank: int) -> AdapterContents:
    """Read and check the adapter of a directory.

    targets: the modules that an adapter may adapt, by each name that they may have. Raises AdapterError.
    """
    if not directory.is_dir():
        raise AdapterError(f"{directory} is not a directory with {CONFIG} and {WEIGHTS}")
    if (directory / PICKLE).is_file() and not (directory / WEIGHTS).is_file():
        raise AdapterError(f"{directory} has {PICKLE}, a pickle, which is not read; save the adapter as {WEIGHTS}")
    most = 4 * sum(
        max_rank * (target.outputs + target.inputs)
        + (target.outputs if target.kind == "linear" else target.outputs * target.inputs)
        for target in targets.values()
    )
    config_bytes = _read(directory / CONFIG, MAX_CONFIG_BYTES)
    weight_bytes = _read(directory / WEIGHTS, most + MAX_HEADER_BYTES)
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
    modules = _match(config, tensors, targets, max_rank)
    return AdapterContents(digest, modules, _list_copies(tensors, targets))


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


class _TensorName(NamedTuple):
    """The parts of a tensor's name."""

    module: str  # as the file calls it
    kind: str


def _split_name(name: str, targets: Mapping[str, LoRATarget]) -> _TensorName:
    """Raises AdapterError unless it is a tensor of a module that can be adapted."""
    for kind in (DOWN, UP, MAGNITUDE, EMBEDDING_DOWN, EMBEDDING_UP, *COPIES, *BIAS_COPIES):
        module = name.removeprefix(PREFIX).removesuffix(kind)
        target = targets.get(module)
        if name == f"{PREFIX}{module}{kind}" and target is not None and kind in _KINDS[target.kind]:
            return _TensorName(module, kind)
    raise AdapterError(f"{WEIGHTS}: {name} is not supported: {_find_reason(name)}")


def _match(
    config: AdapterConfig, tensors: Mapping[str, AdapterTensor], targets: Mapping[str, LoRATarget], max_rank: int
) -> dict[str, AdapterModule]:
    names = {}  # module as the file calls it -> its target
    for name in sorted(tensors):
        module, kind = _split_name(name, targets)
        target = targets[module]
        if kind in (*COPIES, *BIAS_COPIES):
            continue
        if kind == MAGNITUDE and not config.use_dora:
            raise AdapterError(f"{WEIGHTS}: {name} belongs to DoRA, but {CONFIG} does not say use_dora")
        is_tied = config.ties_weights and target.kind != "linear"  # the config names only one of the two
        if not is_tied and config.adapts(module, is_inner=target.kind == "linear") is False:
            raise AdapterError(f"{WEIGHTS}: {name} is not one of {CONFIG}'s target_modules")
        names[module] = target
    modules = {}
    for module, target in names.items():
        if target.module in modules:
            raise AdapterError(f"{WEIGHTS}: {module} is there under two names")
        modules[target.module] = _read_module(config, tensors, module, target, max_rank)
    if not modules:
        raise AdapterError(f"{WEIGHTS} has no tensors")
    if config.ties_weights:
        _check_tied(modules, targets)
    for spelling, target in targets.items():
        if target.module not in modules and config.adapts(spelling, is_inner=target.kind == "linear"):
            missing = f"{PREFIX}{target.module}{_KINDS[target.kind][0]}"
            raise AdapterError(f"{WEIGHTS} lacks {missing}, which {CONFIG}'s target_modules name")
    return modules


def _check_tied(modules: Mapping[str, AdapterModule], targets: Mapping[str, LoRATarget]) -> None:
    """Of an embedding and an LM head that share their weights, the file must have both adapters or none."""
    outer = {target.module: target for target in targets.values() if target.kind != "linear"}
    adapted = [target for name, target in outer.items() if name in modules]
    if len(adapted) != 1:
        return
    (target,) = adapted
    if all(f"{module}.weight" in target.stored for module in outer):
        raise AdapterError(
            f"{CONFIG}: ensure_weight_tying: embedding and LM head share their weights, but {WEIGHTS} has an adapter "
            f"of {target.module} only"
        )


def _read_module(
    config: AdapterConfig, tensors: Mapping[str, AdapterTensor], module: str, target: LoRATarget, max_rank: int
) -> AdapterModule:
    """module: as the file calls it."""
    down_kind, up_kind = _KINDS[target.kind][:2]
    down = tensors.get(f"{PREFIX}{module}{down_kind}")
    up = tensors.get(f"{PREFIX}{module}{up_kind}")
    if down is None or up is None:
        raise AdapterError(f"{WEIGHTS} lacks {PREFIX}{module}{down_kind if down is None else up_kind}")
    rank = config.find_rank(module)
    if rank > max_rank:
        raise AdapterError(f"{CONFIG}: the rank of {module} is {rank}, more than --max-lora-rank {max_rank}")
    check_tensor(f"{PREFIX}{module}{down_kind}", down, (rank, target.inputs))
    check_tensor(f"{PREFIX}{module}{up_kind}", up, (target.outputs, rank))
    magnitude = tensors.get(f"{PREFIX}{module}{MAGNITUDE}")
    if magnitude is not None:
        check_tensor(f"{PREFIX}{module}{MAGNITUDE}", magnitude, (target.outputs,))
    elif config.use_dora:
        raise AdapterError(f"{WEIGHTS} lacks {PREFIX}{module}{MAGNITUDE}, which {CONFIG}'s use_dora asks for")
    return AdapterModule(down, up, config.find_scale(module), magnitude)


def _list_copies(tensors: Mapping[str, AdapterTensor], targets: Mapping[str, LoRATarget]) -> list[BaseCopy]:
    copies = []
    for name, tensor in tensors.items():
        module, kind = _split_name(name, targets)
        target = targets[module]
        shape: tuple[int, ...] = (target.outputs, target.inputs)
        stored = target.stored
        if kind in BIAS_COPIES:
            shape = (target.outputs,)
            stored = tuple(f"{name.removesuffix('weight')}bias" for name in stored)
        elif kind not in COPIES:
            continue
        elif target.kind == "embedding":
            shape = (target.inputs, target.outputs)
        check_tensor(name, tensor, shape)
        copies.append(BaseCopy(name, stored, tensor))
    return copies


def _find_reason(name: str) -> str:
    if "experts" in name or "mlp.gate." in name or "router" in name or "shared_expert_gate" in name:
        return "experts and routers take no adapters here"
    return "the model has no such layer that an adapter can change"
