"""The hardware that `serve-llm plan` plans for: command-line options, memory of common GPUs, and derived values.

Torch-free.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from serve_llm.common.errors import OptionError
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.options.fields import option
from serve_llm.common.options.parsers import at_least_one, int_between, one_of, parse_boolean, parse_bytes
from serve_llm.engine.config import Config
from serve_llm.engine.devices import VISIBLE_DEVICES, list_gpus
from serve_llm.engine.worker import kv_cache

DEFAULT_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class GpuModel:
    """memory_gib: total device memory as CUDA reports it, slightly below the nominal size; driver versions differ in
    the second decimal. has_nvlink: whether machines with this GPU usually connect their GPUs by NVLink. has_fp8:
    whether it multiplies 8-bit floats (compute capability 8.9 or more)."""

    memory_gib: float
    has_nvlink: bool
    has_fp8: bool
    is_blackwell: bool = False  # compute capability 10.0 or more

    @property
    def takes_fp8_cache(self) -> bool:
        """See `engine.worker.memory.check_fp8_cache`."""
        return self.has_fp8 and not self.is_blackwell

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)


GPU_MODELS: dict[str, GpuModel] = {
    "b200": GpuModel(178.35, has_nvlink=True, has_fp8=True, is_blackwell=True),
    "h200": GpuModel(139.80, has_nvlink=True, has_fp8=True),
    "h100": GpuModel(79.10, has_nvlink=True, has_fp8=True),
    "h20": GpuModel(95.00, has_nvlink=True, has_fp8=True),
    "a100-80g": GpuModel(79.15, has_nvlink=True, has_fp8=False),
    "a100-40g": GpuModel(39.39, has_nvlink=True, has_fp8=False),
    "l40s": GpuModel(44.39, has_nvlink=False, has_fp8=True),
    "a6000": GpuModel(47.40, has_nvlink=False, has_fp8=False),
    "a10": GpuModel(22.00, has_nvlink=False, has_fp8=False),
    "l4": GpuModel(21.95, has_nvlink=False, has_fp8=True),
    "rtx-5090": GpuModel(31.36, has_nvlink=False, has_fp8=True, is_blackwell=True),
    "rtx-4090": GpuModel(23.52, has_nvlink=False, has_fp8=True),
    "rtx-3090": GpuModel(23.57, has_nvlink=False, has_fp8=False),
}


TOO_OLD = {"p100": "6.0", "v100": "7.0", "v100-16g": "7.0", "v100-32g": "7.0", "t4": "7.5"}  # compute capability


def _parse_gpu(value: object) -> str:
    name = str(value).lower()
    if name in TOO_OLD:
        raise ValueError(f"a {name} has compute capability {TOO_OLD[name]}, but the kernels need 8.0 or more")
    try:
        return str(one_of(*GPU_MODELS)(name))
    except ValueError as error:
        raise ValueError(f"{error} (for any other GPU, such as one of AMD, give --memory instead)") from None


@dataclass(frozen=True, kw_only=True)
class HardwareOptions:
    """The options that `serve-llm plan` adds to the server's."""

    gpu: str | None = option(None, _parse_gpu, f"GPU model: {', '.join(GPU_MODELS)}", metavar="NAME")
    gpus_per_node: int | None = option(None, int_between(1, 1024), "GPUs per machine (default: 8)")
    nodes: int = option(1, int_between(1, 1024), "number of machines")
    nvlink: bool = option(
        True,
        parse_boolean,
        "whether NVLink connects the GPUs of a machine; ignored for GPU models that have none",
    )
    memory: int | None = option(
        None,
        at_least_one(parse_bytes),
        "memory of one GPU, instead of --gpu; with --device cpu, of one machine (default: the free memory of this one)",
        metavar="BYTES",
    )


@dataclass(frozen=True)
class Hardware:
    """The machines, with every default applied."""

    gpu: str  # GPU model; "" for CPU ranks
    memory: int  # bytes of one GPU, or of one machine for CPU ranks
    ranks_per_node: int
    nodes: int
    has_nvlink: bool


def choose_device(options: EngineOptions, hardware: HardwareOptions) -> str:
    """ "cpu" or "cuda", by the server's rule, but from the hardware options instead of this machine."""
    describes_gpu = bool(hardware.gpu or hardware.memory)
    if hardware.gpu and hardware.memory:
        raise OptionError("--gpu and --memory both say how much memory there is; give one of them")
    if options.device == "cuda" and not describes_gpu:
        raise OptionError("--device cuda: say which GPU by --gpu or --memory")
    if options.device == "cuda" or (options.device == "auto" and describes_gpu):
        return "cuda"
    if hardware.gpu:
        raise OptionError("--gpu and --device cpu exclude each other; give --memory for a machine without GPUs")
    if hardware.gpus_per_node:
        raise OptionError("--gpus-per-node: say which GPUs by --gpu or --memory")
    if options.device == "auto" and list_gpus(os.environ.get(VISIBLE_DEVICES)):
        raise OptionError("this machine has GPUs, which the server would use: name them by --gpu, or use --device cpu")
    return "cpu"


def resolve_hardware(options: HardwareOptions, device: str, config: Config) -> Hardware:
    model = GPU_MODELS.get(options.gpu or "")
    if model is not None and not model.has_fp8 and config.quantization == "fp8" and config.rounds_to_fp8:
        what = f"--quantization: a {options.gpu} does not multiply 8-bit floats"
        raise OptionError(f"{what} (needed: compute capability 8.9 or more); use int8, or omit the option")
    if model is not None and not model.takes_fp8_cache and config.kv_cache_dtype == "fp8":
        what = f"--kv-cache-dtype: fp8 is not served on a {options.gpu}"
        raise OptionError(f"{what} (needed: compute capability 8.9 or 9.0); use auto, or omit the option")
    memory = options.memory or (model.memory_bytes if model else kv_cache.find_free_memory())
    if device == "cpu":
        return Hardware(gpu="", memory=memory, ranks_per_node=1, nodes=options.nodes, has_nvlink=False)
    return Hardware(
        gpu=options.gpu or "GPUs",
        memory=memory,
        ranks_per_node=options.gpus_per_node or DEFAULT_GPUS_PER_NODE,
        nodes=options.nodes,
        has_nvlink=options.nvlink and (model is None or model.has_nvlink),
    )
