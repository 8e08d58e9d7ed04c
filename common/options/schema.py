"""Every option, once: its type, default, help text and parser.

`EngineOptions` is all that an engine process receives; `Options` adds what only the server uses. The command line,
`--help`, the environment, the YAML file, the keywords of `LLM(...)` and docs/options.md all follow these fields
(`sources`). Must stay quick to import, so that `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from serve_llm.common.options.fields import choice_option, option
from serve_llm.common.options.limits import Limits, parse_limits
from serve_llm.common.options.parsers import (
    DEFAULT_QUEUE,
    at_least_one,
    check_address,
    int_between,
    parse_block_size,
    parse_boolean,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_fraction,
    parse_kv_cache_dtype,
    parse_lora_modules,
    parse_metrics_prefix,
    parse_origins,
    parse_positive_floats,
    parse_positive_ints,
    parse_queue,
    parse_seconds,
    parse_text,
    parse_texts,
    parse_traces_endpoint,
)
from serve_llm.common.options.speculative import SpeculativeConfig, parse_speculative_config

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
    load_format: str = choice_option("auto", "auto|dummy", "auto: read safetensors; dummy: random weights, for tests")
    model_impl: str = choice_option(
        "auto",
        "auto|transformers",
        "auto: this program's own code for the model's family; transformers: any decoder-only model that accepts an "
        "attention implementation by name, in transformers' own code, which is slower (one rank, no 8-bit weights)",
    )
    runner: str = choice_option(
        "auto",
        "auto|generate|pooling",
        "auto: pooling for encoders, classifiers and embedding models, else generate; generate: text, and vectors as "
        "well where --convert or the checkpoint asks for them; pooling: vectors only, without the LM head",
    )
    convert: str = choice_option(
        "auto",
        "auto|none|embed|classify",
        "what the model returns for a prompt besides text; auto: what the checkpoint is made for; embed: an embedding, "
        "also from a decoder made for text; classify: the logits of --classifier-from-token",
    )
    pooling_type: str = choice_option(
        "auto",
        "auto|cls|mean|last",
        "how the hidden states of a prompt become one vector: of the first token, their mean, or of the last token "
        "(auto: as 1_Pooling/config.json says, last for decoders without it)",
    )
    classifier_from_token: tuple[str, ...] = option(
        (), parse_texts, "tokens whose logits are the classes, such as no yes", metavar="TOKEN", nargs=True
    )
    allow_unknown_config: tuple[str, ...] = option(
        (),
        parse_texts,
        "key of config.json that this program does not know, to be ignored with a warning instead of an error; "
        "rope_scaling.KEY names a key of a nested object; may be repeated",
        metavar="KEY",
    )
    dtype: str = choice_option(
        "auto",
        "auto|bfloat16|float16|float32",
        "data type of weights and activations; auto: the checkpoint's, but bfloat16 instead of float16 on a CPU",
        {"half": "float16", "float": "float32"},
    )
    quantization: str = choice_option(
        "auto",
        "auto|int8|int4|int4-g32|int4-g128|fp8",
        "auto: as the checkpoint is stored; int8 (on a CPU) or fp8 (on a GPU): quantize the layers' weights to 8 bits "
        "while loading and the activations per row while computing, with int8 the LM head too; int4 (on a CPU): "
        "quantize the layers' weights only, with a scale per 64, 32 or 128 inputs",
    )
    max_model_len: int | None = option(
        None, _positive_count, "maximum tokens of prompt and output together (default: the model's)"
    )
    max_num_seqs: int = option(256, _positive_count, "maximum sequences in one step")
    max_num_batched_tokens: int | None = option(
        None, _positive_count, "maximum tokens in one step (default: 2048 on a CPU, 8192 on a GPU)"
    )
    gpu_memory_utilization: float = option(0.9, parse_fraction, "fraction of the GPU's memory for weights and KV cache")
    enforce_eager: bool = option(
        False, parse_boolean, "on a GPU: launch every kernel separately, without CUDA graphs of decode steps"
    )
    batch_invariant: bool = option(
        False,
        parse_boolean,
        "on a GPU: compute the same tokens whatever else is in the batch, at some cost in speed (always so on a CPU)",
    )
    all_reduce: str = choice_option(
        "nccl",
        "nccl|symmetric",
        "how the GPUs of a tensor-parallel group sum their results: nccl, or symmetric: small sums through memory "
        "that the GPUs of one host map from each other, which has not run on hardware yet",
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
        "almost twice as many tokens as bfloat16 (CPU only)",
        metavar="auto|int8",
    )
    block_size: int | None = option(
        None, parse_block_size, "tokens per KV cache block: 8, 16, 32, 64, 128 or 256 (default: 16)"
    )
    enable_prefix_caching: bool = option(
        True, parse_boolean, "compute a prompt prefix once for all requests that share it", flag="prefix_caching"
    )
    jump_forward: bool = option(True, parse_boolean, "append tokens that a grammar demands at once; same output")
    speculative_config: str | None = option(
        None,
        parse_speculative_config,
        'drafts to verify, so that a step may make several tokens; same output: {"method": "ngram"} takes them from '
        "earlier text of the request; other keys: num_speculative_tokens, prompt_lookup_max, prompt_lookup_min "
        "(default: none)",
        metavar="JSON",
    )
    enable_lora: bool = option(False, parse_boolean, "serve LoRA adapters, which requests name as their model")
    max_loras: int = option(4, int_between(1, 1024), "adapters that each rank holds in memory at a time")
    max_lora_rank: int = option(16, int_between(1, 512), "highest rank of an adapter")
    seed: int | None = option(
        None,
        int_between(0, 2**64 - 1),
        "makes dummy weights, and the seeds of requests that set none, the same in every run "
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
        1, _positive_count, "ranks that split every layer; any number, it need not divide the model's heads", short="tp"
    )
    pipeline_parallel_size: int = option(
        1, _positive_count, "pipeline stages, each of which has some of the layers", short="pp"
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
        "each rank holds some of a layer's experts whole, instead of a part of each; the experts are spread over all "
        "engines of --data-parallel-size, which then step together; numbers need not divide",
    )
    distributed_executor_backend: str | None = choice_option(
        None,
        "inprocess|mp|ray",
        "what runs the ranks: the engine's own process (one rank), processes of this host, or Ray "
        "(default: inprocess for one rank, else mp if this host has enough devices, else ray)",
    )
    data_parallel_size: int = option(
        1,
        int_between(1, 1024),
        "engines behind one front end, each with the whole model, its own KV cache and a share of the machine",
        short="dp",
    )
    nnodes: int = option(
        1,
        _positive_count,
        "hosts that share the ranks of one engine without Ray; run the same command with another --node-rank on each",
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
        "how often within ten minutes an engine that died or hung is replaced while its open requests continue; "
        "beyond that the server ends",
    )
    step_timeout: float | None = option(
        None,
        parse_seconds,
        "seconds without a result of a step after which the engine counts as hung and is replaced (default: 300, or "
        "20 times the longest step so far, if that is more)",
        metavar="SECONDS",
    )
    log_level: str = choice_option("info", "debug|info|warning|error", "lowest level of messages that are logged")
    log_format: str = choice_option("text", "text|json", "text: lines for people; json: one JSON object per line")

    @property
    def experts_span_engines(self) -> bool:
        """Whether the data-parallel engines share the experts, so that no engine can step without the others."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def speculation(self) -> SpeculativeConfig | None:
        return None if self.speculative_config is None else SpeculativeConfig.parse(self.speculative_config)


@dataclass(frozen=True, kw_only=True)
class Options(EngineOptions):
    """All options of the daemon: the engine's, and those of HTTP, text and admission. Immutable, made of plain values.

    Build it with `sources.parse_args` or `sources.make_options`, which check every value.
    """

    host: str = option("127.0.0.1", parse_text, "address to listen on; 0.0.0.0 accepts other machines")
    port: int = option(8000, int_between(0, 65535), "port to listen on; 0 takes a free one")
    ssl_keyfile: str | None = option(
        None, parse_text, "file with the private key (PEM): serve HTTPS, with --ssl-certfile", metavar="FILE"
    )
    ssl_certfile: str | None = option(None, parse_text, "file with the certificate and its chain (PEM)", metavar="FILE")
    api_key: tuple[str, ...] = option(
        (),
        parse_texts,
        "key that every route but /health, /ready and the page at / requires; may be repeated; one that begins with "
        "admin: may also load and unload adapters (--enable-lora)",
        metavar="KEY",
        secret=True,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        parse_origins,
        "origin of web pages whose scripts may call the server (CORS), such as https://chat.example.com, or * for all; "
        "may be repeated (default: none)",
        metavar="ORIGIN",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        parse_texts,
        "names by which requests may call the model, the first one used in answers (default: the model as given); "
        "on the command line, put the model before this option",
        metavar="NAME",
        nargs=True,
    )
    lora_modules: tuple[str, ...] = option(
        (),
        parse_lora_modules,
        "adapter to serve, as NAME=DIRECTORY; may be repeated",
        metavar="NAME=DIRECTORY",
        nargs=True,
    )
    chat_template: str | None = option(
        None, parse_text, "file with a Jinja chat template (default: the model's own)", metavar="FILE"
    )
    trust_request_chat_template: bool = option(
        False, parse_boolean, "allow chat templates in requests; they are rendered in a separate process"
    )
    reasoning_field: str = choice_option(
        "reasoning",
        "reasoning|reasoning_content",
        "name of the reasoning in chat completions; some clients read only reasoning_content",
    )
    dialect: str | None = option(
        None,
        parse_text,
        "how the model writes reasoning and tool calls: a name or a JSON file (docs/dialects.md), or none (default: "
        "the model's response_template, else found by its chat template)",
        metavar="NAME|FILE",
    )
    generation_config: str = choice_option(
        "auto",
        "auto|none",
        "auto: the model's generation_config.json gives the sampling defaults; none: OpenAI's defaults",
    )
    max_queue: tuple[int, int] = option(
        DEFAULT_QUEUE,
        parse_queue,
        "requests, and prompt tokens, that may wait for their first token; beyond it the answer is 503 "
        "(default: 2048,4M)",
        metavar="REQUESTS[,TOKENS]",
    )
    request_timeout: float | None = option(
        None,
        parse_seconds,
        "seconds that a request may take, from its arrival to its end (default: no limit); a client may ask for less",
        metavar="SECONDS",
    )
    responses_store: str = option(
        "off",
        parse_text,
        "where /v1/responses keeps responses: off, memory, or an SQLite file, which survives a restart",
        metavar="off|memory|FILE",
    )
    batches_dir: str | None = option(
        None,
        parse_text,
        "directory with the files and batches of /v1/files and /v1/batches (default: there are none)",
        metavar="DIRECTORY",
    )
    unknown_fields: str = choice_option(
        "refuse",
        "refuse|ignore",
        "what happens to unknown fields of completions and chat completions; ignore: the header x-ignored-fields names "
        "them, as on the other routes",
    )
    limit: tuple[str, ...] = option(
        (),
        parse_limits,
        "limit on one request or on what is stored, such as body-bytes=1MiB, instead of its default; may be repeated; "
        "docs/options.md lists the names",
        metavar="NAME=VALUE",
    )
    drain_timeout: float = option(
        30.0, parse_duration, "seconds for open requests to finish after SIGTERM or SIGINT; 0: none", metavar="SECONDS"
    )
    metrics_prefix: str = option(
        "serve_llm_", parse_metrics_prefix, "prefix of all metric names; `vllm:` serves dashboards made for vLLM"
    )
    otlp_traces_endpoint: str | None = option(
        None,
        parse_traces_endpoint,
        "URL to which OpenTelemetry traces of requests are sent, by OTLP over HTTP (default: there are none)",
        metavar="URL",
    )

    @property
    def limits(self) -> Limits:
        return Limits.parse(self.limit)

    def for_engine(self) -> EngineOptions:
        """The engine's part, which is all that an engine process receives."""
        return EngineOptions(**{field.name: getattr(self, field.name) for field in dataclasses.fields(EngineOptions)})


OPTION_FIELDS: tuple[dataclasses.Field[object], ...] = dataclasses.fields(Options)
"""The fields of Options in the order of --help."""
