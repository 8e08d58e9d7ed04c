"""What is true: `resolve` turns what the user said (`Options`) into a frozen `Config`, for one model on one device.

Arithmetic only, torch-free: whoever calls it has read config.json and knows whether there is a GPU. What is measured
later (how many blocks fit) is returned by whoever measured it and never written back here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serve_llm.engine.errors import ModelError, OptionError
from serve_llm.engine.options import Options

DEFAULT_BLOCK_SIZE = 16  # tokens
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
DEFAULT_STEP_TOKENS = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True)
class CacheRow:
    """How the KV cache stores one head's key or value of one token."""

    element_bytes: int
    scale_bytes: int = 0  # behind the numbers; as in kernels.cache_int8

    def num_bytes(self, head_dim: int) -> int:
        return head_dim * self.element_bytes + self.scale_bytes


@dataclass(frozen=True, kw_only=True)
class Config:
    """The engine's settings, all decided. Immutable."""

    directory: str  # the local checkpoint
    load_format: str  # "auto" | "dummy"
    device: str  # "cpu" | "cuda"
    dtype: str  # "bfloat16" | "float16" | "float32"
    max_model_len: int  # tokens, prompt and output together
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int  # tokens
    kv_cache_memory: int | None  # bytes; None: by gpu_memory_utilization, on a CPU a fixed share of the free memory
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    seed: int  # of dummy weights
    quantization: str = "none"  # "none" | "int8" | "fp8": of the layers' products
    kv_cache_dtype: str = "auto"  # "auto": as dtype | "int8"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    tensor_parallel_split: tuple[float, ...] | None = None  # one share per rank of a tensor-parallel group; None: even
    pipeline_parallel_layers: tuple[int, ...] | None = None  # one number per stage; None: by cost
    enable_expert_parallel: bool = False  # ranks hold whole experts
    executor_backend: str = "inprocess"  # "inprocess" | "mp" | "ray"
    step_timeout: float | None = None  # seconds; None: by the steps so far
    data_parallel_size: int = 1  # engines that share this host's memory and cores
    data_parallel_rank: int = 0  # which of them this is
    allow_unknown_config: tuple[str, ...] = ()  # keys of config.json that are passed over
    cpu_threads: int | None = None  # that each rank computes with; None: see `execute.threads`
    enforce_eager: bool = True  # no captured graphs of decode steps
    batch_invariant: bool = True  # a CPU is in any case
    all_reduce: str = "nccl"  # "nccl" | "symmetric": of the GPUs of a tensor-parallel group
    ranks_per_gpu: int = 1  # more only where a card is to show what several would do
    rope_turns_at: int | None = None  # see `ModelSpec`
    async_scheduling: bool = False  # the next step is scheduled and begun before the ids of the last one are known

    @property
    def element_bytes(self) -> int:
        """Of one weight."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def expert_engines(self) -> int:
        """Engines that share out whole experts, and so make their steps together."""
        return self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def cache_row(self) -> CacheRow:
        return CacheRow(1, scale_bytes=4) if self.kv_cache_dtype == "int8" else CacheRow(self.element_bytes)

    @property
    def types(self) -> str:
        """For people: "bfloat16", or "bfloat16 with layers in int8"."""
        if self.quantization == "fp8":
            return f"{self.dtype} with layers in fp8"
        settings = {"layers": self.quantization, "KV cache": self.kv_cache_dtype}
        small = [what for what, dtype in settings.items() if dtype == "int8"]
        return f"{self.dtype} with {' and '.join(small)} in int8" if small else self.dtype


def resolve(
    options: Options,
    directory: str,
    *,
    device: str,
    checkpoint_dtype: str,
    model_max_len: int,
    num_layers: int,
    executor_backend: str,
    stores_int8: bool = False,
    has_experts: bool = False,
    rope_turns_at: int | None = None,
    data_parallel_rank: int = 0,
) -> Config:
    """Decides everything that follows from the options, the model and the device.

    device: "cpu" or "cuda", where options.device "auto" has been decided by the caller.
    checkpoint_dtype: the weights' number type as config.json names it, such as "bfloat16".
    model_max_len: the most tokens that the model's positions allow. num_layers: of the model.
    executor_backend: "inprocess", "mp" or "ray", as `execute.choose` found.
    stores_int8: whether the checkpoint's layers are quantised to int8. has_experts: whether a layer of the model has.
    rope_turns_at: as of `ModelSpec`.
    data_parallel_rank: which of the engines this is.
    Raises OptionError when an option cannot work here, ModelError when the checkpoint's type is not served.
    """
    check(options, model_max_len, num_layers, has_experts)
    dtype = _dtype(options.dtype, checkpoint_dtype, device)
    return Config(
        directory=directory,
        load_format=options.load_format,
        device=device,
        dtype=dtype,
        max_model_len=options.max_model_len or model_max_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or DEFAULT_STEP_TOKENS[device],
        block_size=options.block_size or DEFAULT_BLOCK_SIZE,
        kv_cache_memory=options.kv_cache_memory,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enable_prefix_caching=options.enable_prefix_caching,
        seed=options.seed or 0,
        quantization=_quantization(options, stores_int8, device, dtype),
        kv_cache_dtype=_kv_cache_dtype(options.kv_cache_dtype, device),
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        tensor_parallel_split=options.tensor_parallel_split,
        pipeline_parallel_layers=options.pipeline_parallel_layers,
        enable_expert_parallel=options.enable_expert_parallel,
        executor_backend=executor_backend,
        step_timeout=options.step_timeout,
        data_parallel_size=options.data_parallel_size,
        data_parallel_rank=data_parallel_rank,
        rope_turns_at=rope_turns_at,
        allow_unknown_config=options.allow_unknown_config,
        cpu_threads=options.cpu_threads,
        enforce_eager=options.enforce_eager or device == "cpu",
        batch_invariant=options.batch_invariant or device == "cpu",
        all_reduce=_all_reduce(options, device, dtype),
        # Between stages ids travel with the next batch, and other sequences fill the time.
        async_scheduling=device == "cuda" and options.pipeline_parallel_size == 1,
    )


def checkpoint_dtype(raw: Mapping[str, object]) -> str:
    """The weights' number type as config.json (`raw`) names it."""
    return str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")


def check(options: Options, model_max_len: int, num_layers: int, has_experts: bool) -> None:
    """Raises OptionError where an option does not fit to the model, whatever the device. See `resolve`."""
    if options.max_model_len is not None and options.max_model_len > model_max_len:
        raise OptionError(
            f"--max-model-len: {options.max_model_len} is more than the {model_max_len} tokens that this model allows; "
            "give less, or leave it away"
        )
    tensor, stages = options.tensor_parallel_size, options.pipeline_parallel_size
    split, layers = options.tensor_parallel_split, options.pipeline_parallel_layers
    if split is not None and len(split) != tensor:
        raise OptionError(f"--tensor-parallel-split: {len(split)} shares, but --tensor-parallel-size is {tensor}")
    if stages > num_layers:
        raise OptionError(
            f"--pipeline-parallel-size: {stages} stages, but the model has only {num_layers} layers; give fewer"
        )
    if layers is not None and len(layers) != stages:
        raise OptionError(
            f"--pipeline-parallel-layers: {len(layers)} numbers, but --pipeline-parallel-size is {stages}"
        )
    if layers is not None and sum(layers) != num_layers:
        raise OptionError(
            f"--pipeline-parallel-layers: {sum(layers)} layers in all, but the model has {num_layers} layers"
        )
    if options.enable_expert_parallel and not has_experts:
        raise OptionError("--enable-expert-parallel: this model has no experts; leave it away")
    if options.enable_expert_parallel and tensor == 1 and options.data_parallel_size == 1:
        raise OptionError(
            "--enable-expert-parallel: one rank has all experts anyway; give a --tensor-parallel-size or "
            "--data-parallel-size above 1, or leave it away"
        )
    if options.experts_span_engines and stages > 1:
        raise OptionError(
            "--enable-expert-parallel: several engines (--data-parallel-size) share out experts only where each has "
            "one stage; leave --pipeline-parallel-size away"
        )


def _quantization(options: Options, stores_int8: bool, device: str, dtype: str) -> str:
    asked = options.quantization
    if asked == "fp8":
        if device != "cuda":
            raise OptionError("--quantization: fp8 is served on a GPU only; on a CPU take int8")
        if stores_int8:
            raise OptionError("--quantization: the checkpoint is int8 and cannot be made fp8; take one in bfloat16")
        if dtype != "bfloat16":
            raise OptionError(
                f"--quantization: fp8 needs --dtype bfloat16, not {dtype}: its products give no other type"
            )
        if options.batch_invariant:
            raise OptionError(
                "--batch-invariant: the products of --quantization fp8 are torch's, which add otherwise for another "
                "number of rows; leave one of them away"
            )
        return "fp8"
    if not stores_int8 and asked != "int8":
        return "none"
    if device != "cpu":
        why = "int8" if asked == "int8" else "auto, and the checkpoint is int8: that"
        raise OptionError(f"--quantization: {why} is served on a CPU only; use --device cpu")
    return "int8"


def _kv_cache_dtype(asked: str, device: str) -> str:
    if asked == "int8" and device != "cpu":
        raise OptionError("--kv-cache-dtype: int8 is served on a CPU only; take auto, or --device cpu")
    return asked


def _all_reduce(options: Options, device: str, dtype: str) -> str:
    if options.all_reduce == "symmetric":
        if device != "cuda":
            raise OptionError("--all-reduce: symmetric is for GPUs; leave it away, or use --device cuda")
        if options.tensor_parallel_size == 1:
            raise OptionError(
                "--all-reduce: one rank has nothing to sum; give a --tensor-parallel-size above 1, or leave it away"
            )
        if options.batch_invariant:
            raise OptionError(
                "--all-reduce: symmetric adds small tensors otherwise than large ones, and --batch-invariant wants all "
                "alike; leave one of them away"
            )
        if dtype == "float16":
            raise OptionError("--all-reduce: symmetric adds no float16; use --dtype bfloat16, or take nccl")
    return options.all_reduce


def _dtype(asked: str, checkpoint: str, device: str) -> str:
    """The checkpoint's own type where the user leaves it open, except that float16 becomes bfloat16 on a CPU, which is
    far slower in float16. float32 stays float32: its owner may want the precision."""
    if asked == "float16" and device == "cpu":
        raise OptionError(
            "--dtype: float16 is not served on a CPU; use bfloat16 (as fast as it gets) or float32 (exact)"
        )
    if asked != "auto":
        return asked
    if checkpoint not in ("bfloat16", "float16", "float32"):
        raise ModelError(f"the checkpoint's number type is {checkpoint}; choose one with --dtype bfloat16 or float32")
    return "bfloat16" if checkpoint == "float16" and device == "cpu" else checkpoint
