"""What the user said: every option once, with its type, default, meaning and parser.

The command line, `--help`, the environment and the YAML file (`arguments` reads these), `LLM(...)`'s keywords and
docs/options.md all come from the fields of `Options`. What the options mean for a given model and machine is
`config.resolve`'s business. Torch-free and quick to import, so that `--help` answers at once; anyone may import it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from serve_llm.engine import limits, values
from serve_llm.engine.fields import option as _option

ENVIRONMENT_PREFIX = "SERVE_LLM_"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user said. Immutable, made of plain values, fit for the wire (msgspec).

    Build it with `from_kwargs` or `arguments.parse_args`, which check each value; nothing checks it after that.
    """

    model: str = field(
        metadata={
            "parse": values.text,
            "help": "checkpoint directory, Hugging Face id, or `demo` for the bundled toy model",
        }
    )
    host: str = _option("127.0.0.1", values.text, "address to listen on; 0.0.0.0 lets other machines in")
    port: int = _option(8000, values.whole(0, 65535), "port to listen on; 0 takes a free one")
    dtype: str = _option(
        "auto",
        values.choice("auto", "bfloat16", "float16", "float32"),
        "number type of weights and activations; auto: the checkpoint's, with float16 becoming bfloat16 on a CPU",
        shown="auto|bfloat16|float16|float32",
    )
    quantization: str = _option(
        "auto",
        values.choice("auto", "int8", "fp8"),
        "auto: as the checkpoint is stored; int8 (on a CPU) or fp8 (on a GPU): the layers' weights rounded to 8 bits "
        "while loading, activations row by row as they come (head and embedding keep their type)",
        shown="auto|int8|fp8",
    )
    max_model_len: int | None = _option(
        None,
        values.positive(values.parse_count),
        "longest prompt and output together, in tokens (default: the model's)",
    )
    max_num_seqs: int = _option(256, values.positive(values.parse_count), "most sequences computed in one step")
    max_num_batched_tokens: int | None = _option(
        None,
        values.positive(values.parse_count),
        "most tokens computed in one step (default: 2048 on a CPU, 8192 on a GPU)",
    )
    gpu_memory_utilization: float = _option(
        0.9, values.share, "share of the GPU's memory that weights and KV cache may take"
    )
    enforce_eager: bool = _option(
        False, values.boolean, "on a GPU: launch every kernel by itself, without captured graphs of decode steps"
    )
    batch_invariant: bool = _option(
        False,
        values.boolean,
        "on a GPU: tokens that do not depend on what else is computed, for some speed (always so on a CPU)",
    )
    all_reduce: str = _option(
        "nccl",
        values.choice("nccl", "symmetric"),
        "how the GPUs of a tensor-parallel group add what they have: nccl, or symmetric: small sums through memory "
        "that the GPUs of one host map from each other, which has not run on hardware yet",
        shown="nccl|symmetric",
    )
    kv_cache_memory: int | None = _option(
        None,
        values.positive(values.parse_bytes),
        "size of each rank's KV cache, such as 8GiB (default: a fixed share of the free memory on a CPU, what "
        "--gpu-memory-utilization leaves on a GPU)",
        shown="BYTES",
    )
    kv_cache_dtype: str = _option(
        "auto",
        values.cache_dtype,
        "number type of the KV cache; auto: the model's; int8: 8 bits and a scale for each head and token, which holds "
        "almost twice as many tokens as bfloat16 (CPU only)",
        shown="auto|int8",
    )
    block_size: int | None = _option(
        None, values.block_size, "tokens per KV cache block: 8, 16, 32, 64, 128 or 256 (default: 16)"
    )
    enable_prefix_caching: bool = _option(
        True, values.boolean, "compute a prompt's beginning once for all requests that share it", flag="prefix_caching"
    )
    allow_unknown_config: tuple[str, ...] = _option(
        (),
        values.texts,
        "key of config.json that this program does not know, to be passed over with a warning instead of an error; of "
        "an object in it rope_scaling.KEY; may be repeated",
        shown="KEY",
    )
    seed: int | None = _option(
        None,
        values.whole(0, 2**64 - 1),
        "makes the seeds that requests without one get, and dummy weights, the same in every run "
        "(default: a random seed for each such request)",
    )
    served_model_name: tuple[str, ...] = _option(
        (),
        values.texts,
        "names that requests may call the model by, the first one used in answers (default: the model as given); "
        "on the command line, put the model before this option",
        shown="NAME",
        repeat=True,
    )
    tokenizer: str | None = _option(
        None, values.text, "directory or Hugging Face id of the tokenizer (default: the model's own)"
    )
    chat_template: str | None = _option(
        None, values.text, "file with a Jinja chat template (default: the model's own)", shown="FILE"
    )
    revision: str | None = _option(None, values.text, "branch, tag or commit of a Hugging Face model (default: main)")
    download_dir: str | None = _option(
        None, values.text, "where Hugging Face models are stored (default: Hugging Face's own cache)", shown="DIRECTORY"
    )
    load_format: str = _option(
        "auto",
        values.choice("auto", "dummy"),
        "auto: read safetensors; dummy: random weights, for tests",
        shown="auto|dummy",
    )
    model_impl: str = _option(
        "auto",
        values.choice("auto", "transformers"),
        "auto: the families that this program has code for; transformers: any decoder-only model that takes an "
        "attention implementation by name, in transformers' own code, which is slower (one rank, not in 8 bits)",
        shown="auto|transformers",
    )
    generation_config: str = _option(
        "auto",
        values.choice("auto", "none"),
        "auto: the model's generation_config.json gives the sampling defaults; none: OpenAI's defaults",
        shown="auto|none",
    )
    api_key: tuple[str, ...] = _option(
        (), values.texts, "key that every route but /health and /ready needs; may be repeated", shown="KEY", secret=True
    )
    max_queue: tuple[int, int] = _option(
        values.QUEUE,
        values.queue,
        "requests, and prompt tokens, that may wait for their first token; past it the answer is 503 "
        "(default: 2048,4M)",
        shown="REQUESTS[,TOKENS]",
    )
    request_timeout: float | None = _option(
        None,
        values.seconds,
        "seconds that a request may take, from its arrival to its end (default: no limit); a client may ask for less",
        shown="SECONDS",
    )
    drain_timeout: float = _option(
        30.0, values.seconds, "seconds for open requests to finish after the first SIGTERM or SIGINT", shown="SECONDS"
    )
    limit: tuple[str, ...] = _option(
        (),
        limits.parse,
        "another limit than the default one on what a request may hold, such as body-bytes=1MiB; may be repeated; the "
        "names are in docs/options.md",
        shown="NAME=VALUE",
    )
    trust_request_chat_template: bool = _option(
        False, values.boolean, "let requests bring a chat template of their own; it is rendered in a process apart"
    )
    ssl_keyfile: str | None = _option(
        None, values.text, "file with the private key (PEM): serve HTTPS, with --ssl-certfile", shown="FILE"
    )
    ssl_certfile: str | None = _option(
        None, values.text, "file with the certificate, and those that it is signed by (PEM)", shown="FILE"
    )
    allowed_origins: tuple[str, ...] = _option(
        (),
        values.origin,
        "origin of web pages whose scripts may call the server (CORS), such as https://chat.example.com, or * for all; "
        "may be repeated (default: none)",
        shown="ORIGIN",
    )
    log_level: str = _option(
        "info",
        values.choice("debug", "info", "warning", "error"),
        "least important message that is logged",
        shown="debug|info|warning|error",
    )
    device: str = _option(
        "auto", values.choice("auto", "cpu", "cuda"), "auto: a GPU if there is one, else the CPU", shown="auto|cpu|cuda"
    )
    cpu_threads: int | None = _option(
        None,
        values.whole(1, 1024),
        "threads that each rank computes with (default: OMP_NUM_THREADS if it is set, else the cores that this process "
        "may use by affinity and cgroup, shared out among the ranks of the host)",
        shown="THREADS",
    )
    tensor_parallel_size: int = _option(
        1,
        values.positive(values.parse_count),
        "ranks that share out every layer; any number, it need not divide the model's heads",
        short="tp",
    )
    pipeline_parallel_size: int = _option(
        1, values.positive(values.parse_count), "stages, each of which has some of the layers", short="pp"
    )
    tensor_parallel_split: tuple[float, ...] | None = _option(
        None,
        values.positive_numbers,
        "shares of the ranks of a tensor-parallel group, such as 3,1 for devices of unequal size (default: even)",
        shown="SHARE,SHARE,...",
    )
    pipeline_parallel_layers: tuple[int, ...] | None = _option(
        None,
        values.positive_counts,
        "layers of each stage, such as 9,8,7 (default: such that the dearest stage is as cheap as can be)",
        shown="LAYERS,LAYERS,...",
    )
    enable_expert_parallel: bool = _option(
        False,
        values.boolean,
        "each rank holds some of a layer's experts in whole, instead of a part of each; they are spread over all "
        "engines of --data-parallel-size, which then make their steps together; numbers need not divide",
    )
    distributed_executor_backend: str | None = _option(
        None,
        values.choice("inprocess", "mp", "ray"),
        "what runs the ranks: the engine's own process (one rank), processes of this host, or Ray "
        "(default: inprocess for one rank, else mp if this host has enough devices, else ray)",
        shown="inprocess|mp|ray",
    )
    data_parallel_size: int = _option(
        1,
        values.whole(1, 1024),
        "engines behind one front end, each with the whole model, a share of the machine and a KV cache of its own",
        short="dp",
    )
    nnodes: int = _option(
        1,
        values.positive(values.parse_count),
        "hosts that share out the ranks of one engine without Ray; the same command with another --node-rank on each",
    )
    node_rank: int = _option(
        0,
        values.whole(0, 65535),
        "number of this host; 0 serves HTTP, the others need only this, --nnodes and --master-addr",
    )
    master_addr: str | None = _option(
        None, values.address, "where node 0 listens for the other hosts; the same on all", shown="HOST:PORT"
    )
    host_ip: str | None = _option(
        None,
        values.text,
        "address by which other hosts reach this one (default: that of the interface towards --master-addr; with Ray, "
        "the node's)",
        shown="IP",
    )
    cluster_secret: str | None = _option(
        None,
        values.text,
        "text that lets a host take part and encrypts what engine and hosts say to each other; the same on all hosts, "
        "better in the environment than on the command line",
        shown="TEXT",
        secret=True,
    )
    max_restarts: int = _option(
        10,
        values.whole(0, 1_000_000),
        "how often within ten minutes an engine that died or hung is replaced, its open requests going on where they "
        "were; past that the server ends",
    )
    step_timeout: float | None = _option(
        None,
        values.seconds,
        "after so long without a result of a step the engine is taken to hang, and replaced (default: 300, or 20 times "
        "the longest step so far, if that is more)",
        shown="SECONDS",
    )
    metrics_prefix: str = _option(
        "serve_llm_", values.metric_prefix, "beginning of every metric's name; `vllm:` serves dashboards made for vLLM"
    )

    @property
    def experts_span_engines(self) -> bool:
        """Whether the data-parallel engines share out the experts, so that none can work without the others."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @classmethod
    def from_kwargs(cls, model: str, **options: object) -> Options:
        """Options given in Python, as by `LLM(model, max_model_len="32k")`; None means the default.
        Raises OptionError for an unknown name or a value that is not allowed."""
        from serve_llm.engine.given import Given, build, named

        given: Given = {"model": (model, "model")}
        for name, value in options.items():
            given |= named(name, value, name)
        return build(cls, given)


def fields() -> tuple[dataclasses.Field[object], ...]:
    """The fields of Options in the order of --help."""
    return dataclasses.fields(Options)
