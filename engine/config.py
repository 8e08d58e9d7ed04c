"""The engine's settings. `resolve` turns options into a frozen `Config`, for one model on one device.

Arithmetic only, torch-free: the caller has read config.json and knows whether there is a GPU. Values measured later,
such as the number of KV cache blocks, are never written back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serve_llm.common.engine_placement import EnginePlacement
from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.options.default_speculation import DEFAULT_SPECULATION, explain_default_off
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.options.eplb import EPLBConfig
from serve_llm.common.options.kv_events import KVEventsConfig
from serve_llm.common.options.speculative import SpeculativeConfig
from serve_llm.common.sentence_transformers import DenseModule, PoolingType

DEFAULT_BLOCK_SIZE = 16  # tokens
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
INT4_GROUP_SIZES = {"int4": 64, "int4-g32": 32, "int4-g128": 128}  # inputs that share a scale, by --quantization
DEFAULT_STEP_TOKENS = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True)
class KVCacheFormat:
    """How the KV cache stores one head's key or value of one token."""

    element_bytes: int
    scale_bytes: int = 0  # after the values, as in kernels.cache_int8

    def num_bytes(self, head_dim: int) -> int:
        return head_dim * self.element_bytes + self.scale_bytes


@dataclass(frozen=True)
class PoolingConfig:
    """How the hidden states of a prompt become a vector, if the model's family does not determine it."""

    pooling_types: tuple[PoolingType, ...]  # their vectors are concatenated
    normalize: bool = False  # scale vectors to length 1
    dense: tuple[DenseModule, ...] = ()
    classifier_ids: tuple[int, ...] = ()  # the vector is the logits of these ids; empty: it is an embedding


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one engine, resolved."""

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
    seed: int  # seed of dummy weights
    vocab_size: int = 0  # number of logits
    tokenizer: str | None = None  # as the option; None: the checkpoint's
    download_dir: str | None = None
    quantization: str = "none"  # format of linear layers: "none" | "int8" | "fp8" | "int4" | "int4-g32" | "int4-g128"
    kv_cache_dtype: str = "auto"  # "auto": as dtype | "int8" | "fp8"
    kv_offload_dir: str | None = None  # where blocks go from host memory
    kv_offload_dir_size: int | None = None  # bytes; None: derived from the disk's free space
    kv_offload_memory: int | None = None  # bytes of each rank for evicted blocks; None: evicted blocks are dropped
    kv_events: KVEventsConfig | None = None  # None: no events are published
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    tensor_parallel_split: tuple[float, ...] | None = None  # one share per rank of a tensor-parallel group; None: even
    pipeline_parallel_layers: tuple[int, ...] | None = None  # one number per stage; None: by cost
    enable_expert_parallel: bool = False  # ranks hold whole experts
    executor_backend: str = "inprocess"  # "inprocess" | "mp" | "ray"
    step_timeout: float | None = None  # seconds; None: derived from the steps so far
    data_parallel_size: int = 1  # with --data-parallel-max, that many
    engines_by_rank: tuple[int, ...] = ()  # engines that share the memory and cores of each rank's host; empty: all
    data_parallel_rank: int = 0  # index of this engine
    allow_unknown_config: tuple[str, ...] = ()  # keys of config.json to ignore
    cpu_threads: int | None = None  # per rank; None: see `cpu_threads.choose_threads`
    enforce_eager: bool = True  # do not capture decode steps as CUDA graphs
    batch_invariant: bool = True  # always on a CPU
    attention_backend: str = "auto"  # on a GPU: "auto" | "triton" | "flash"
    all_reduce: str = "nccl"  # among the GPUs of a tensor-parallel group: "nccl" | "symmetric" | "auto"
    long_rope_threshold: int | None = None  # see `ModelSpec`
    async_scheduling: bool = False  # start a step before the ids of the previous one are known
    eplb: EPLBConfig | None = None  # rebalancing of experts between ranks; None: off
    jump_forward: bool = True  # append ids that a grammar forces without sampling them
    speculation: SpeculativeConfig | None = None  # verify drafts; None: none
    hidden_state_layers: tuple[int, ...] = ()  # layers whose inputs the draft source reads, ascending
    generates: bool = True  # the model has an LM head
    max_loras: int = 0  # adapters that a rank holds at a time; 0: adapters are off
    max_cpu_loras: int = 0  # adapters that a rank keeps in host memory, those in slots included
    max_lora_rank: int = 16
    pooling: PoolingConfig | None = None  # None: as the model's family determines, if the model takes pooling requests

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight."""
        return ELEMENT_BYTES[self.dtype]

    def engines_on_host(self, rank: int) -> int:
        """Data-parallel engines that have ranks on the host of this engine's rank."""
        return self.engines_by_rank[rank] if self.engines_by_rank else self.data_parallel_size

    @property
    def rounds_to_fp8(self) -> bool:
        """Whether `--quantization fp8` quantises activations as well, for torch's fp8 product. Its results are
        bfloat16, and its order of summation depends on the number of rows."""
        return self.device != "cpu" and self.dtype == "bfloat16" and not self.batch_invariant

    @property
    def expert_engines(self) -> int:
        """Number of engines that share experts, and therefore step together."""
        return self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts of a sequence in a step."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    @property
    def redundant_experts(self) -> int:
        """Slots of each layer for further copies of experts, over all engines."""
        return 0 if self.eplb is None else self.eplb.num_redundant_experts

    @property
    def kv_cache_format(self) -> KVCacheFormat:
        if self.kv_cache_dtype == "int8":
            return KVCacheFormat(1, scale_bytes=4)
        return KVCacheFormat(1 if self.kv_cache_dtype == "fp8" else self.element_bytes)

    @property
    def types(self) -> str:
        """Describe the dtypes for the log: "bfloat16", or "bfloat16 with layers in int8"."""
        parts: dict[str, list[str]] = {}  # by type
        for part, part_dtype in (("layers", self.quantization), ("KV cache", self.kv_cache_dtype)):
            if part_dtype not in ("none", "auto"):
                parts.setdefault(part_dtype, []).append(part)
        texts = [f"{' and '.join(names)} in {part_dtype}" for part_dtype, names in parts.items()]
        return f"{self.dtype} with {' and '.join(texts)}" if texts else self.dtype


def resolve(
    options: EngineOptions,
    directory: str,
    *,
    device: str,
    checkpoint_dtype: str,
    model_max_len: int,
    executor_backend: str,
    vocab_size: int = 0,
    stores_int8: bool = False,
    stores_integers: bool = False,
    long_rope_threshold: int | None = None,
    data_parallel_rank: int = 0,
    generates: bool = True,
    pooling: PoolingConfig | None = None,
    whole_prompts: bool = False,
    has_states: bool = False,
) -> Config:
    """Derive all settings from the options, the model and the device. Call `check_options` first.

    device: "cpu" or "cuda"; the caller has resolved "auto".
    checkpoint_dtype: the dtype of the weights, such as "bfloat16".
    model_max_len: most tokens that the model's positions allow.
    executor_backend: "inprocess", "mp" or "ray", as `choose_executor` decided.
    stores_int8: whether the checkpoint's layers are quantised to int8.
    stores_integers: whether the checkpoint's layers are integers with a scale per group.
    long_rope_threshold: see `ModelSpec`.
    data_parallel_rank: index of this engine.
    generates, pooling: see `Config`.
    whole_prompts: the model computes each prompt in one step.
    has_states: see `ModelSpec`.
    Raises OptionError if an option cannot work here, ModelError if the checkpoint's dtype is not supported.
    """
    dtype = _dtype(options.dtype, checkpoint_dtype, device)
    max_model_len = options.max_model_len or model_max_len
    return Config(
        directory=directory,
        load_format=options.load_format,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=_step_tokens(options, device, max_model_len if whole_prompts else 1),
        block_size=options.block_size or DEFAULT_BLOCK_SIZE,
        kv_cache_memory=options.kv_cache_memory,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enable_prefix_caching=_prefix_caching(options, has_states),
        seed=options.seed or 0,
        vocab_size=vocab_size,
        tokenizer=options.tokenizer,
        download_dir=options.download_dir,
        quantization=_quantization(options, stores_int8, stores_integers),
        kv_cache_dtype=_kv_cache_dtype(options.kv_cache_dtype, device),
        kv_offload_memory=_offload_memory(options, whole_prompts),
        kv_offload_dir=_offload_dir(options, executor_backend),
        kv_offload_dir_size=options.kv_offload_dir_size,
        kv_events=_kv_events(options, whole_prompts),
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        tensor_parallel_split=options.tensor_parallel_split,
        pipeline_parallel_layers=options.pipeline_parallel_layers,
        enable_expert_parallel=options.enable_expert_parallel,
        eplb=options.eplb,
        jump_forward=options.jump_forward,
        speculation=_speculation(options, device, generates, has_states, executor_backend),
        executor_backend=executor_backend,
        step_timeout=options.step_timeout,
        data_parallel_size=options.max_engines,
        engines_by_rank=_engines_by_rank(options, data_parallel_rank),
        data_parallel_rank=data_parallel_rank,
        long_rope_threshold=long_rope_threshold,
        allow_unknown_config=options.allow_unknown_config,
        cpu_threads=options.cpu_threads,
        enforce_eager=options.enforce_eager,
        batch_invariant=options.batch_invariant or device == "cpu",
        attention_backend=_attention_backend(options, device),
        all_reduce=_all_reduce(options, device, dtype),
        # A pipeline sends ids to its stages with the next step, and overlaps steps of different sequences instead.
        async_scheduling=device == "cuda" and options.pipeline_parallel_size == 1,
        generates=generates,
        pooling=pooling,
        max_loras=options.max_loras if options.enable_lora else 0,
        max_cpu_loras=(options.max_cpu_loras or options.max_loras) if options.enable_lora else 0,
        max_lora_rank=options.max_lora_rank,
    )


def _step_tokens(options: EngineOptions, device: str, least: int) -> int:
    """Maximum number of tokens in one step. least: tokens that a step must be able to hold."""
    asked = options.max_num_batched_tokens
    if asked is not None and asked < least:
        raise OptionError(
            f"--max-num-batched-tokens: an encoder computes a prompt in one step, of up to {least} tokens here; give "
            "at least that, or lower --max-model-len"
        )
    return asked or max(DEFAULT_STEP_TOKENS[device], least)


def read_config_dtype(raw: Mapping[str, object]) -> str | None:
    """Return the dtype of the weights according to config.json (`raw`); None if it names none."""
    text = raw.get("text_config")  # the decoder, in a multimodal model
    objects = (raw, text) if isinstance(text, Mapping) else (raw,)
    found = (values.get(key) for values in objects for key in ("dtype", "torch_dtype"))
    return next((str(name).removeprefix("torch.") for name in found if name), None)


def check_options(options: EngineOptions, model_max_len: int, num_layers: int, has_experts: bool) -> None:
    """Raise OptionError if an option does not fit the model, regardless of the device.

    model_max_len: most tokens that the model's positions allow. num_layers: the model's layers. has_experts: whether
    any layer has experts.
    """
    if options.max_model_len is not None and options.max_model_len > model_max_len:
        raise OptionError(
            f"--max-model-len: {options.max_model_len} is more than the {model_max_len} tokens that this model allows; "
            "lower it, or omit it"
        )
    tensor = options.tensor_parallel_size
    stages = options.pipeline_parallel_size
    split = options.tensor_parallel_split
    layers = options.pipeline_parallel_layers
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
        raise OptionError("--enable-expert-parallel: this model has no experts; omit it")
    if options.enable_expert_parallel and tensor == 1 and options.data_parallel_size == 1:
        raise OptionError(
            "--enable-expert-parallel: one rank has all experts anyway; give a --tensor-parallel-size or "
            "--data-parallel-size above 1, or omit it"
        )


def _engines_by_rank(options: EngineOptions, engine: int) -> tuple[int, ...]:
    return EnginePlacement.from_options(options).engines_by_rank(engine) if options.nnodes > 1 else ()


def _quantization(options: EngineOptions, stores_int8: bool, stores_integers: bool) -> str:
    asked = options.quantization
    if asked in ("fp8", *INT4_GROUP_SIZES) and (stores_int8 or stores_integers):
        raise OptionError(
            f"--quantization: the checkpoint is quantised already and cannot be made {asked}; omit the option"
        )
    if asked != "auto":
        return asked
    return "int8" if stores_int8 else "none"


def _prefix_caching(options: EngineOptions, has_states: bool) -> bool:
    """Also refuse options that do not fit the prefix cache of a model with states."""
    if has_states and options.kv_offload_memory is not None:
        raise OptionError(
            "--kv-offload-memory: this model has linear attention, and without the states, which stay on the device, "
            "offloaded blocks are of no use; omit it"
        )
    if has_states and options.kv_events is not None:
        raise OptionError(
            "--kv-events-config: this model has linear attention, and the events do not say for which prefixes there "
            "are states; omit it"
        )
    return options.enable_prefix_caching is not False


def _speculation(
    options: EngineOptions, device: str, generates: bool, has_states: bool, executor_backend: str
) -> SpeculativeConfig | None:
    if options.speculative_config is None:
        is_default = generates and explain_default_off(options, device, has_states, executor_backend) is None
        return DEFAULT_SPECULATION if is_default else None
    if options.speculation is not None and not generates:
        raise OptionError("--speculative-config: this model returns vectors and generates no text; omit it")
    return options.speculation


def _offload_memory(options: EngineOptions, whole_prompts: bool) -> int | None:
    if options.kv_offload_memory is not None and whole_prompts:
        raise OptionError("--kv-offload-memory: an encoder has no KV cache; omit it")
    return options.kv_offload_memory


def _kv_events(options: EngineOptions, whole_prompts: bool) -> KVEventsConfig | None:
    if options.kv_events is not None and whole_prompts:
        raise OptionError("--kv-events-config: an encoder has no KV cache; omit it")
    return options.kv_events


def _offload_dir(options: EngineOptions, executor_backend: str) -> str | None:
    if options.kv_offload_dir is not None and executor_backend == "ray":
        raise OptionError("--kv-offload-dir: the ranks of Ray do not share memory with the engine; omit it")
    return options.kv_offload_dir


def _kv_cache_dtype(asked: str, device: str) -> str:
    if asked == "int8" and device != "cpu":
        raise OptionError("--kv-cache-dtype: int8 is served on a CPU only; use fp8 or auto, or --device cpu")
    if asked == "fp8" and device == "cpu":
        raise OptionError("--kv-cache-dtype: fp8 is served on GPUs only; use int8 or auto, or --device cuda")
    return asked


def _attention_backend(options: EngineOptions, device: str) -> str:
    asked = options.attention_backend
    if asked != "auto" and device != "cuda":
        raise OptionError(f"--attention-backend: {asked} is for GPUs; omit it, or use --device cuda")
    if asked == "flash" and options.batch_invariant:
        raise OptionError(
            "--attention-backend: results of flash depend on the rest of the batch, which --batch-invariant rules out; "
            "omit one of them"
        )
    return asked


def _all_reduce(options: EngineOptions, device: str, dtype: str) -> str:
    if options.all_reduce == "symmetric":
        if device != "cuda":
            raise OptionError("--all-reduce: symmetric is for GPUs; omit it, or use --device cuda")
        if options.tensor_parallel_size == 1:
            raise OptionError(
                "--all-reduce: one rank has nothing to sum; give a --tensor-parallel-size above 1, or omit it"
            )
        if options.batch_invariant:
            raise OptionError(
                "--all-reduce: symmetric sums small tensors in another order than large ones, which --batch-invariant "
                "rules out; omit one of them"
            )
        if dtype == "float16":
            raise OptionError("--all-reduce: symmetric does not support float16; use --dtype bfloat16, or nccl")
    if options.all_reduce == "auto" and (device != "cuda" or options.batch_invariant or dtype == "float16"):
        return "nccl"
    return options.all_reduce


def _dtype(asked: str, checkpoint: str, device: str) -> str:
    """Use the checkpoint's dtype unless the user names one. On a CPU, float16 becomes bfloat16, which is far faster;
    float32 stays, because the user may want the precision."""
    if asked == "float16" and device == "cpu":
        raise OptionError("--dtype: float16 is not served on a CPU; use bfloat16 (fastest) or float32 (exact)")
    if asked != "auto":
        return asked
    if checkpoint not in ("bfloat16", "float16", "float32"):
        raise ModelError(f"the checkpoint's number type is {checkpoint}; choose one with --dtype bfloat16 or float32")
    return "bfloat16" if checkpoint == "float16" and device == "cpu" else checkpoint
