"""A PEFT adapter on disk: adapter_config.json and adapter_model.safetensors, read and checked as a whole. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import safetensors

from serve_llm.common.adapter_files import ADAPTER_CONFIG as CONFIG
from serve_llm.common.adapter_files import ADAPTER_PICKLE as PICKLE
from serve_llm.common.adapter_files import ADAPTER_WEIGHTS as WEIGHTS
from serve_llm.common.adapter_files import AdapterFiles
from serve_llm.common.errors import AdapterError
from serve_llm.common.types import LoRATarget
from serve_llm.engine.lora.base_copies import BaseCopy
from serve_llm.engine.lora.config import AdapterConfig, ProductConfig, read_adapter_config
from serve_llm.engine.lora.hashed_files import FileContents, HashedFiles, compute_digest_of, read_contents, read_files
from serve_llm.engine.lora.tensors import AdapterTensor, check_numbers, check_tensor, view_tensors

PREFIX = "base_model.model."  # prefix of module names in PEFT's tensors
DOWN = ".lora_A.weight"  # (rank, inputs)
UP = ".lora_B.weight"  # (outputs, rank)
MAGNITUDE = ".lora_magnitude_vector"  # (outputs,); with DoRA
EMBEDDING_DOWN = ".lora_embedding_A"  # (rank, vocabulary)
EMBEDDING_UP = ".lora_embedding_B"  # (embedding size, rank)
INNER = ".base_layer"  # a module nested in another adapter of the same module
OUTER = ("embedding", "head")  # kinds of `LoRATarget` outside the layers
COPIES = (".base_layer.weight", ".weight")  # the base model's own weight
BIAS_COPIES = (".base_layer.bias", ".bias")
_KINDS = {  # suffixes by `LoRATarget.kind`: the weight of the first product, that of the second, and others
    "linear": (DOWN, UP, MAGNITUDE),
    "router": (DOWN, UP, MAGNITUDE),
    "expert": (DOWN, UP),
    "experts": (DOWN, UP),
    "head": (DOWN, UP, MAGNITUDE, *COPIES, *BIAS_COPIES),
    "embedding": (EMBEDDING_DOWN, EMBEDDING_UP, MAGNITUDE, *COPIES),
}
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20


class AdapterModule(NamedTuple):
    """The adapter of a module with weight W, which becomes (W + scale * up @ down) x. For an embedding, x is one-hot.

    With DoRA (arXiv:2402.09353), each row of that sum is scaled to the length in `magnitude`. The weights of all
    experts form one module, as PEFT stores them: `down` expert by expert, `up` ordered by (rank, expert).
    """

    down: AdapterTensor  # (rank, inputs); for experts (experts * rank, inputs); `is_swapped`: (experts * rank, outputs)
    up: AdapterTensor  # (outputs, rank); for experts (outputs, rank * experts); `is_swapped`: (inputs, rank * experts)
    scale: float
    magnitude: AdapterTensor | None = None  # (outputs,)
    members: int = 1
    is_swapped: bool = False  # PEFT mistook the weight's inputs for its outputs, so `down` and `up` are those of W^T


class AdapterContents(NamedTuple):
    digest: str
    modules: dict[str, AdapterModule]  # by `LoRATarget.module`
    copies: list[BaseCopy]  # must be equal to the base model's weights


class KnownAdapter(NamedTuple):
    """The contents of an adapter that has been checked before, if its digest is the same."""

    modules: dict[str, AdapterModule]  # as in `AdapterContents`
    files: HashedFiles


def read_adapter(
    directory: Path,
    targets: Mapping[str, LoRATarget],
    max_rank: int,
    limit_time: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> AdapterContents:
    """Read and check the adapter of a directory.

    targets: the modules that can be adapted, by each of their possible names. limit_time: limits the time for regular
    expressions in a file that has not been checked. Raises AdapterError.
    """
    if not directory.is_dir():
        raise AdapterError(f"{directory} is not a directory with {CONFIG} and {WEIGHTS}")
    if not (directory / WEIGHTS).is_file():
        raise AdapterError(
            f"{directory} has no {WEIGHTS}; if it is saved as {PICKLE}, a pickle, `serve-llm convert ADAPTER -o DIR` "
            "converts it"
        )
    files = read_files(directory, MAX_CONFIG_BYTES, _limit_bytes(targets, max_rank))
    with limit_time():
        config = _parse_config(files.config, directory)
    try:
        stored = safetensors.deserialize(files.weights)  # type: ignore[no-untyped-call]
        tensors = {
            str(name): AdapterTensor(tensor["dtype"], tuple(tensor["shape"]), tensor["data"]) for name, tensor in stored
        }
    except (safetensors.SafetensorError, ValueError) as error:
        raise AdapterError(f"{directory / WEIGHTS} cannot be read: {error}") from None
    names = _split_names(config, tensors, targets)
    with limit_time():
        products = _find_products(config, names)
    modules = _match(config, tensors, names, products, targets, max_rank)
    copies = _list_copies(tensors, names)
    for name, tensor in tensors.items():
        check_numbers(name, tensor)
    return AdapterContents(compute_digest_of(files), modules, copies)


def start_reading(
    threads: Executor,
    directory: Path,
    targets: Mapping[str, LoRATarget],
    max_rank: int,
    files: AdapterFiles | None = None,
) -> HashedFiles:
    """Start to read the files of an adapter again. files: their contents if they come from elsewhere."""
    if files is not None:
        contents = FileContents(files.config, memoryview(files.weights))
        return HashedFiles(threads, lambda: contents)
    most = _limit_bytes(targets, max_rank)
    return HashedFiles(threads, lambda: read_contents(directory, MAX_CONFIG_BYTES, most))


def parse_known_adapter(
    files: HashedFiles, directory: Path, targets: Mapping[str, LoRATarget], max_rank: int
) -> KnownAdapter:
    """Read an adapter that `read_adapter` has checked, provided that its digest is the same, which the caller compares
    before others see the result. Numbers are not checked again. Raises AdapterError for another adapter if it shows."""
    contents = files.contents
    config = _parse_config(contents.config, directory)
    tensors = view_tensors(contents.weights)
    names = _split_names(config, tensors, targets)
    return KnownAdapter(_match(config, tensors, names, _find_products(config, names), targets, max_rank), files)


def _limit_bytes(targets: Mapping[str, LoRATarget], max_rank: int) -> int:
    """Find how large a file of weights can be."""
    num_elements = sum(
        max_rank * (target.outputs + target.inputs)
        + (target.outputs * target.inputs if target.kind in OUTER else target.outputs)
        for target in targets.values()
    )
    return 4 * num_elements + MAX_HEADER_BYTES


def _parse_config(config: bytes, directory: Path) -> AdapterConfig:
    try:
        raw = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{directory / CONFIG} is not JSON: {error}") from None
    return read_adapter_config(raw)


class _TensorName(NamedTuple):
    """The parts of a tensor's name."""

    module: str  # as it is called in the file
    kind: str
    target: LoRATarget
    configured: str  # the module or parameter that the config's patterns match


def _split_names(
    config: AdapterConfig, tensors: Mapping[str, AdapterTensor], targets: Mapping[str, LoRATarget]
) -> dict[str, _TensorName]:
    """Split each tensor's name, sorted. Raises AdapterError unless all belong to modules that can be adapted."""
    stacks: dict[str, list[str]] = {}  # module -> its parameters that the config names, in order
    for parameter, target in targets.items():
        if target.kind == "experts" and config.names_parameter(parameter):
            stacks.setdefault(parameter.rpartition(".")[0], []).append(parameter)
    names = {name: _split_name(name, targets, stacks) for name in sorted(tensors)}
    for name, split in names.items():
        if split.target.kind == "router" and config.names_parameter(f"{split.module}.weight"):
            names[name] = split._replace(configured=f"{split.module}.weight")
    return names


def _split_name(name: str, targets: Mapping[str, LoRATarget], stacks: Mapping[str, list[str]]) -> _TensorName:
    for kind in (DOWN, UP, MAGNITUDE, EMBEDDING_DOWN, EMBEDDING_UP, *COPIES, *BIAS_COPIES):
        module = name.removeprefix(PREFIX).removesuffix(kind)
        configured = _find_stack(module, stacks) or module
        target = targets.get(configured)
        if name == f"{PREFIX}{module}{kind}" and target is not None and kind in _KINDS[target.kind]:
            return _TensorName(module, kind, target, configured)
    raise AdapterError(f"{WEIGHTS}: {name} is not supported: {_find_reason(name, targets)}")


def _find_stack(module: str, stacks: Mapping[str, list[str]]) -> str | None:
    """Return the experts' parameter to which a tensor of this name belongs. PEFT nests the first inside the other."""
    outer = module.removesuffix(INNER)
    parameters = stacks.get(outer, [])
    if outer != module and len(parameters) < 2:
        return None
    return parameters[0 if outer != module else -1] if parameters else None


def _find_products(config: AdapterConfig, names: Mapping[str, _TensorName]) -> dict[str, ProductConfig]:
    """By `_TensorName.configured`."""
    return {name.configured: config.find_product(name.configured) for name in names.values()}


def _match(
    config: AdapterConfig,
    tensors: Mapping[str, AdapterTensor],
    names: Mapping[str, _TensorName],
    products: Mapping[str, ProductConfig],
    targets: Mapping[str, LoRATarget],
    max_rank: int,
) -> dict[str, AdapterModule]:
    modules: dict[str, AdapterModule] = {}
    found: dict[str, str] = {}  # module of a target -> its name in the file
    for name, split in names.items():
        module, kind, target, configured = split
        if kind in (*COPIES, *BIAS_COPIES):
            continue
        if kind == MAGNITUDE and not config.use_dora:
            raise AdapterError(f"{WEIGHTS}: {name} belongs to DoRA, but {CONFIG} does not say use_dora")
        is_tied = config.ties_weights and target.kind in OUTER  # the config names only one of the two
        named = configured if target.kind == "experts" else module
        if not is_tied and config.adapts(named, target.kind) is False:
            raise AdapterError(f"{WEIGHTS}: {name} is not one of {CONFIG}'s target_modules")
        if found.setdefault(target.module, module) != module:
            raise AdapterError(f"{WEIGHTS}: {module} is there under two names")
        if target.module not in modules:
            modules[target.module] = _read_module(config, tensors, split, products[configured], max_rank)
    if not modules:
        raise AdapterError(f"{WEIGHTS} has no tensors")
    if config.ties_weights:
        _check_tied(modules, targets)
    if {"expert", "experts"} <= {targets[name].kind for name in modules}:
        raise AdapterError(f"{WEIGHTS} has adapters of experts' modules and of {CONFIG}'s target_parameters; keep one")
    _check_complete(config, modules, targets)
    return modules


def _check_complete(
    config: AdapterConfig, modules: Mapping[str, AdapterModule], targets: Mapping[str, LoRATarget]
) -> None:
    """Raise AdapterError if a module that the config names is missing. Experts are modules only in some versions of
    transformers, so the file may lack all of them."""
    experts = {name.rpartition(".")[2] for name in modules if targets[name].kind == "expert"}
    for spelling, target in targets.items():
        if target.module in modules or not config.adapts(spelling, target.kind):
            continue
        if target.kind == "expert" and spelling.rpartition(".")[2] not in experts:
            continue
        what = "target_parameters" if target.kind == "experts" else "target_modules"
        missing = f"{PREFIX}{target.module}{_KINDS[target.kind][0]}"
        raise AdapterError(f"{WEIGHTS} lacks {missing}, which {CONFIG}'s {what} name")


def _check_tied(modules: Mapping[str, AdapterModule], targets: Mapping[str, LoRATarget]) -> None:
    """Check that, if an embedding and an LM head share their weights, the file adapts both or none."""
    outer = {target.module: target for target in targets.values() if target.kind in OUTER}
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
    config: AdapterConfig,
    tensors: Mapping[str, AdapterTensor],
    name: _TensorName,
    product: ProductConfig,
    max_rank: int,
) -> AdapterModule:
    """name: that of one of its tensors."""
    module, _, target, configured = name
    down_kind, up_kind = _KINDS[target.kind][:2]
    down = tensors.get(f"{PREFIX}{module}{down_kind}")
    up = tensors.get(f"{PREFIX}{module}{up_kind}")
    if down is None or up is None:
        raise AdapterError(f"{WEIGHTS} lacks {PREFIX}{module}{down_kind if down is None else up_kind}")
    rank, scale = product
    if rank > max_rank:
        raise AdapterError(f"{CONFIG}: the rank of {configured} is {rank}, more than --max-lora-rank {max_rank}")
    rows = rank * target.members
    shapes = [((rows, target.inputs), (target.outputs, rows)), ((rows, target.outputs), (target.inputs, rows))]
    is_swapped = target.kind == "experts" and (down.shape, up.shape) == shapes[1] != shapes[0]
    check_tensor(f"{PREFIX}{module}{down_kind}", down, shapes[is_swapped][0])
    check_tensor(f"{PREFIX}{module}{up_kind}", up, shapes[is_swapped][1])
    magnitude = tensors.get(f"{PREFIX}{module}{MAGNITUDE}")
    if magnitude is not None:
        check_tensor(f"{PREFIX}{module}{MAGNITUDE}", magnitude, (target.outputs,))
    elif config.use_dora and MAGNITUDE not in _KINDS[target.kind]:
        raise AdapterError(f"{CONFIG}: use_dora: experts take no DoRA adapters, such as {module}")
    elif config.use_dora:
        raise AdapterError(f"{WEIGHTS} lacks {PREFIX}{module}{MAGNITUDE}, which {CONFIG}'s use_dora asks for")
    return AdapterModule(down, up, scale, magnitude, target.members, is_swapped)


def _list_copies(tensors: Mapping[str, AdapterTensor], names: Mapping[str, _TensorName]) -> list[BaseCopy]:
    copies = []
    for name, (_, kind, target, _) in names.items():
        tensor = tensors[name]
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


def _find_reason(name: str, targets: Mapping[str, LoRATarget]) -> str:
    if ".experts." in name and any(target.kind == "router" for target in targets.values()):
        if not any(target.kind in ("expert", "experts") for target in targets.values()):
            return "experts that several engines share take no adapters"
        return f"there is no such expert, or {CONFIG}'s target_parameters do not name its weight"
    return "the model has no such layer that an adapter can change"
