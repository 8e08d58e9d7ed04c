"""The options of the engine: each one's type, default, help text and parser. All that an engine process receives.

Must stay quick to import, so that `--help` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_llm.common.options.eplb import EPLBConfig, parse_eplb_config
from serve_llm.common.options.fields import choice_option, option
from serve_llm.common.options.kv_events import KVEventsConfig, parse_kv_events_config
from serve_llm.common.options.parsers import (
    QUANTIZATIONS,
    at_least_one,
    check_address,
    int_between,
    parse_block_size,
    parse_boolean,
    parse_bytes,
    parse_context_length,
    parse_count,
    parse_fraction,
    parse_kv_cache_dtype,
    parse_load_format,
    parse_positive_floats,
    parse_positive_ints,
    parse_quantization,
    parse_seconds,
    parse_text,
    parse_texts,
    parse_whole_numbers,
)
from serve_llm.common.options.speculative import NO_DRAFTS, SpeculativeConfig, parse_speculative_config

_positive_count = at_least_one(parse_count)
_positive_bytes = at_least_one(parse_bytes)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the engine: the model, its computation, the devices and the hosts."""

    model: str = field(
        metadata={
            "parse": parse_text,
            "help": "checkpoint directory, Hugging Face id, or `demo` for the bundled toy model",
        }
    )
    revision: str | None = option(None, parse_text, "branch, tag or commit of a Hugging Face model (default: main)")
    download_dir: str | None = option(
        None,
        parse_text,
        "where Hugging Face models are stored (default: Hugging Face's own cache)",
        metavar="DIRECTORY",
    )
    tokenizer: str | None = option(
        None, parse_text, "directory or Hugging Face id of the tokenizer (default: the model's own)"
    )
    load_format: str = option(
        "auto",
        parse_load_format,
        "auto: read safetensors or GGUF; dummy: random weights, for tests",
        metavar="auto|dummy",
    )
    model_impl: str = choice_option(
        "auto",
        "auto|transformers",
        "auto: serve-llm's own code for the model's family; transformers: any decoder-only model that accepts an "
        "attention implementation by name, with transformers' code, which is slower (one rank, no 8-bit weights)",
        synonyms={"vllm": "auto", "sglang": "auto"},
    )
    runner: str = choice_option(
        "auto",
        "auto|generate|pooling",
        "auto: pooling for encoders, classifiers and embedding models, else generate; generate: text, and vectors as "
        "well if --convert or the checkpoint asks for them; pooling: vectors only, without the LM head",
    )
    convert: str = choice_option(
        "auto",
        "auto|none|embed|classify",
        "what the model returns for a prompt besides text; auto: as the checkpoint is meant; embed: an embedding, "
        "also from a decoder trained for text; classify: the logits of --classifier-from-token",
    )
    pooling_type: str = choice_option(
        "auto",
        "auto|cls|mean|last",
        "how the hidden states of a prompt become one vector: the first token's, their mean, or the last token's "
        "(auto: as 1_Pooling/config.json says, last for decoders without it)",
    )
    classifier_from_token: tuple[str, ...] = option(
        (), parse_texts, "tokens whose logits are the classes, such as no yes", metavar="TOKEN", nargs=True
    )
    allow_unknown_config: tuple[str, ...] = option(
        (),
        parse_texts,
        "unknown key of config.json to ignore with a warning instead of an error; "
        "rope_scaling.KEY names a key of a nested object; may be repeated",
        metavar="KEY",
    )
    dtype: str = choice_option(
        "auto",
        "auto|bfloat16|float16|float32",
        "data type of weights and activations; auto: the checkpoint's, but bfloat16 instead of float16 on a CPU",
        {"half": "float16", "float": "float32"},
    )
    quantization: str = option(
        "auto",
        parse_quantization,
        "auto: as the checkpoint is stored; int8, fp8: quantize the layers' weights to 8 bits while loading, with int8 "
        "the LM head too, and the activations per row while computing (int8 on a CPU, fp8 on a GPU in bfloat16); int4: "
        "quantize the layers' weights to 4 bits with a scale per 64, 32 or 128 inputs, and on a CPU in bfloat16 the LM "
        "head too (elsewhere to 8 bits); "
        "the name of the format that the checkpoint is stored in, such as awq, means auto",
        metavar="|".join(QUANTIZATIONS),
    )
    max_model_len: int | None = option(
        None, parse_context_length, "maximum number of tokens of prompt and output together (default: the model's)"
    )
    max_num_seqs: int = option(256, _positive_count, "maximum number of sequences in one step")
    max_num_batched_tokens: int | None = option(
        None, _positive_count, "maximum number of tokens in one step (default: 2048 on a CPU, 8192 on a GPU)"
    )
    gpu_memory_utilization: float = option(0.9, parse_fraction, "fraction of the GPU's memory for weights and KV cache")
    enforce_eager: bool = option(
        False,
        parse_boolean,
        "launch every kernel of a step separately, without CUDA graphs or, on a CPU, recorded steps of a few tokens",
    )
    batch_invariant: bool = option(
        False,
        parse_boolean,
        "on a GPU: compute the same tokens whatever else is in the batch, at some cost in speed (always so on a CPU)",
    )
    attention_backend: str = choice_option(
        "auto",
        "auto|triton|flash",
        "attention kernels on a GPU: triton, those of this project, or flash, FlashAttention-3 (H100 and "
        "H200, with the extra serve-llm[cuda]); auto takes flash where it can be used",
        synonyms={
            "triton_attn": "triton",
            "triton_mla": "triton",
            "flash_attn": "flash",
            "flash_attn_mla": "flash",
            "fa3": "flash",
        },
    )
    all_reduce: str = choice_option(
        "nccl",
        "nccl|symmetric|auto",
        "how the GPUs of a tensor-parallel group sum their results: nccl, or symmetric: small sums through memory "
        "that the GPUs of one host map from each other, which has not run on hardware yet; auto tries symmetric at "
        "start and uses it if its sums are exact and faster",
    )
    kv_cache_memory: int | None = option(
        None,
        _positive_bytes,
        "size of each rank's KV cache, such as 8GiB (default: a fixed fraction of the free memory on a CPU, what "
        "--gpu-memory-utilization leaves on a GPU)",
        metavar="BYTES",
    )
    kv_cache_dtype: str = option(
        "auto",
        parse_kv_cache_dtype,
        "data type of the KV cache; auto: the model's; int8: 8 bits and one scale per head and token, which holds "
        "almost twice as many tokens as bfloat16 (CPU only); fp8: float8_e4m3fn, which holds twice as "
        "many (GPUs of compute capability 8.9 and 9.0; on an H200, only its attention kernels have been tried)",
        metavar="auto|int8|fp8",
    )
    block_size: int | None = option(
        None, parse_block_size, "tokens per KV cache block: 8, 16, 32, 64, 128 or 256 (default: 16)"
    )
    enable_prefix_caching: bool | None = option(
        None,
        parse_boolean,
        "compute a prompt prefix once for all requests that share it (default: on)",
        flag="prefix_caching",
    )
    kv_offload_memory: int | None = option(
        None,
        _positive_bytes,
        "host memory of each rank for blocks that are evicted from the KV cache, such as 16GiB; they are copied "
        "back instead of computed again (default: none)",
        metavar="BYTES",
    )
    kv_offload_dir: str | None = option(
        None,
        parse_text,
        "directory on a local disk for blocks evicted from --kv-offload-memory; they are read back if that is faster "
        "than computing them; the engines of this host share it, also after a restart (default: none)",
        metavar="DIRECTORY",
    )
    kv_offload_dir_size: int | None = option(
        None,
        _positive_bytes,
        "maximum size of the blocks in --kv-offload-dir (default: half of the disk's free space at the start)",
        metavar="BYTES",
    )
    kv_events_config: str | None = option(
        None,
        parse_kv_events_config,
        "publish which blocks the prefix cache stores and removes, for external routers (docs/kv-events.md): "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}; other keys: publisher, replay_endpoint, '
        "buffer_steps, hwm, max_queue_size, topic (default: none)",
        metavar="JSON",
    )
    jump_forward: bool = option(True, parse_boolean, "append tokens at once if a grammar allows no others; same output")
    speculative_config: str | None = option(
        None,
        parse_speculative_config,
        'verify drafts, so that a step may yield several tokens; same output: {"method": "ngram"} takes drafts from '
        'earlier text of the request, {"method": "draft_model", "model": MODEL}, or MODEL alone, from a small model '
        'with the same tokenizer, {"method": "eagle3", "model": HEAD} from an EAGLE-3 head, {"method": "mtp"} '
        "from the checkpoint's MTP layer, none verifies no drafts; other keys: num_speculative_tokens, "
        "draft_tensor_parallel_size, prompt_lookup_max, prompt_lookup_min, disable_by_batch_size (default: on CPUs "
        "ngram with at most 2 requests at a time, otherwise none)",
        metavar="JSON",
    )
    enable_lora: bool = option(False, parse_boolean, "serve LoRA adapters, which requests name as their model")
    max_loras: int = option(4, int_between(1, 1024), "adapters that each rank holds in memory at a time")
    max_cpu_loras: int | None = option(
        None,
        int_between(1, 65536),
        "adapters that each rank keeps in host memory, so that they need not be read from files again "
        "(default: --max-loras)",
    )
    max_lora_rank: int = option(16, int_between(1, 512), "highest rank of an adapter")
    seed: int | None = option(
        None,
        int_between(0, 2**64 - 1),
        "make dummy weights, and the seeds of requests that set none, the same in every run "
        "(default: a random seed for each such request)",
    )
    device: str = choice_option("auto", "auto|cpu|cuda", "auto: a GPU if there is one, else the CPU")
    cpu_threads: int | None = option(
        None,
        int_between(1, 1024),
        "compute threads per rank (default: OMP_NUM_THREADS if it is set, else the cores that affinity and cgroup "
        "allow this process, divided among the ranks of the host)",
        metavar="THREADS",
    )
    tensor_parallel_size: int = option(
        1, _positive_count, "ranks that split every layer; need not divide the model's number of heads", short="tp"
    )
    pipeline_parallel_size: int = option(
        1, _positive_count, "pipeline stages, each of which holds some of the layers", short="pp"
    )
    tensor_parallel_split: tuple[float, ...] | None = option(
        None,
        parse_positive_floats,
        "shares of the ranks of a tensor-parallel group, such as 3,1 for devices of unequal size (default: even)",
        metavar="SHARE,SHARE,...",
    )
    pipeline_parallel_layers: tuple[int, ...] | None = option(
        None,
        parse_positive_ints,
        "layers of each stage, such as 9,8,7 (default: balanced by cost)",
        metavar="LAYERS,LAYERS,...",
    )
    enable_expert_parallel: bool = option(
        False,
        parse_boolean,
        "each rank holds whole experts of a layer, instead of a part of every expert; the experts are spread over all "
        "engines of --data-parallel-size, which then step together; the number of experts need not divide",
    )
    enable_eplb: bool = option(
        False,
        parse_boolean,
        "move experts between the engines that share them, so that all ranks compute about as many rows; the output "
        "stays the same (on a GPU with --batch-invariant)",
    )
    eplb_config: str | None = option(
        None,
        parse_eplb_config,
        'for --enable-eplb: {"step_interval": 3000, "num_redundant_experts": 0}: steps between two placements, and '
        "further copies of each layer's busiest experts, over all engines",
        metavar="JSON",
    )
    distributed_executor_backend: str | None = choice_option(
        None,
        "inprocess|mp|ray",
        "what runs the ranks: the engine's own process (one rank), processes of this host, or Ray "
        "(default: inprocess for one rank, else mp if this host has enough devices, else ray)",
        synonyms={"uni": "inprocess"},
    )
    data_parallel_size: int = option(
        1,
        int_between(1, 1024),
        "engines behind one front end, each with the whole model, its own KV cache and a share of the machine",
        short="dp",
    )
    data_parallel_min: int | None = option(
        None,
        int_between(1, 1024),
        "minimum number of engines that `serve-llm scale` may leave (default: 1 with --data-parallel-max)",
        metavar="ENGINES",
    )
    data_parallel_max: int | None = option(
        None,
        int_between(1, 1024),
        "maximum number of engines that `serve-llm scale` may start while requests are served; each gets a share "
        "of the machine for that many (default: --data-parallel-size)",
        metavar="ENGINES",
    )
    nnodes: int = option(
        1,
        _positive_count,
        "hosts that share the ranks of all engines without Ray; run the same command with another --node-rank on each",
    )
    data_parallel_split: tuple[int, ...] | None = option(
        None,
        parse_whole_numbers,
        "engines of each host of --nnodes, such as 3,1 for hosts of unequal size; 0 for a node 0 that only serves HTTP "
        "(default: even)",
        metavar="ENGINES,ENGINES,...",
    )
    node_rank: int = option(
        0,
        int_between(0, 65535),
        "number of this host; 0 serves HTTP, the others need only this, --nnodes and --master-addr",
    )
    master_addr: str | None = option(
        None, check_address, "where node 0 listens for the other hosts; the same on all", metavar="HOST:PORT"
    )
    host_ip: str | None = option(
        None,
        parse_text,
        "address by which other hosts reach this one (default: that of the interface towards --master-addr; with Ray, "
        "the node's)",
        metavar="IP",
    )
    cluster_secret: str | None = option(
        None,
        parse_text,
        "secret that admits a host and encrypts the traffic between the engine and the hosts; the same on all hosts; "
        "set it in the environment rather than on the command line",
        metavar="TEXT",
        secret=True,
    )
    max_restarts: int = option(
        10,
        int_between(0, 1_000_000),
        "how often an engine that died or hung is replaced within ten minutes while its open requests continue; "
        "after that the server exits",
    )
    step_timeout: float | None = option(
        None,
        parse_seconds,
        "seconds that a step may take before the engine counts as hung and is replaced (default: 300, or "
        "20 times the longest step so far, if that is more)",
        metavar="SECONDS",
    )
    log_level: str = choice_option("info", "debug|info|warning|error", "lowest level of messages to log")
    log_format: str = choice_option("text", "text|json", "text: lines for people; json: one JSON object per line")

    @property
    def experts_span_engines(self) -> bool:
        """Whether the data-parallel engines share the experts, so that no engine can step without the others."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def is_scalable(self) -> bool:
        """Whether engines are added and removed while requests are served."""
        return self.data_parallel_min is not None or self.data_parallel_max is not None

    @property
    def max_engines(self) -> int:
        """Most data-parallel engines at a time. Engines have the indices below."""
        return self.data_parallel_max or self.data_parallel_size

    @property
    def min_engines(self) -> int:
        """Fewest data-parallel engines."""
        return self.data_parallel_min or (1 if self.is_scalable else self.data_parallel_size)

    @property
    def eplb(self) -> EPLBConfig | None:
        """None if experts stay where they are."""
        if not self.enable_eplb:
            return None
        return EPLBConfig() if self.eplb_config is None else EPLBConfig.parse(self.eplb_config)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """None if no events are published."""
        config = None if self.kv_events_config is None else KVEventsConfig.parse(self.kv_events_config)
        return config if config is not None and config.is_enabled else None

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """How drafts are made according to the option; None: there are none, or the default (`Config.speculation`)."""
        if self.speculative_config in (None, NO_DRAFTS):
            return None
        return SpeculativeConfig.parse(self.speculative_config)
