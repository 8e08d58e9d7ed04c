"""Options of vLLM that are not options here under the same name."""

from __future__ import annotations

from serve_llm.common.options.peer_flag import PeerFlag, always, neutral, refused, same, switch

_CONFIG = "edit config.json in a copy of the checkpoint"
_DIALECT = "the format is found by the chat template; --dialect names another one (docs/dialects.md)"
_NO_COMPILATION = "nothing is compiled at start; --enforce-eager switches CUDA graphs off"
_PROXY = "put a reverse proxy in front of the server"

VLLM: tuple[PeerFlag, ...] = (
    # the model
    same("--model", "MODEL", "the model is given first, without a flag"),
    always(
        "--trust-remote-code",
        "not needed, no code of a checkpoint is ever executed (docs/models.md lists the families)",
        may_be_off=True,
    ),
    neutral("--tokenizer-mode", "auto|hf", "omit it; the tokenizer is always the fast one of tokenizer.json"),
    neutral("--config-format", "auto|hf", "omit it; config.json is read"),
    refused("--tokenizer-revision", "--revision is that of the model and its tokenizer"),
    refused("--hf-overrides --override-generation-config --rope-scaling --rope-theta", _CONFIG),
    refused("--hf-token", "export HF_TOKEN, which ps does not show"),
    refused("--hf-config-path", _CONFIG),
    refused("--code-revision", "omit it; no code of a checkpoint is ever executed"),
    refused("--task", "--runner generate|pooling and --convert embed|classify say what the model returns"),
    refused("--pooler-config --override-pooler-config", "--pooling-type says how a prompt becomes one vector"),
    refused("--max-parallel-loading-workers", "omit it; ranks read their own parts of the files at the same time"),
    refused("--model-loader-extra-config", "omit it; safetensors are read by every rank, its own part only"),
    # memory and scheduling
    switch("--enable-prefix-caching", "--prefix-caching"),
    switch("--no-enable-prefix-caching", "--no-prefix-caching"),
    always("--enable-chunked-prefill", "always on; --max-num-batched-tokens is the most in one step"),
    refused("--no-enable-chunked-prefill", "long prompts are always computed in chunks; omit it"),
    always("--async-scheduling", "always so; the next step is prepared while one is computed"),
    refused("--no-async-scheduling", "the next step is always prepared while one is computed; omit it"),
    same("--kv-cache-memory-bytes", "--kv-cache-memory"),
    refused(
        "--kv-offloading-size --kv-offloading-backend",
        "--kv-offload-memory SIZE is the host memory of each rank, with a unit; --kv-offload-dir adds a directory",
    ),
    neutral("--swap-space", "0|0.0", "omit it; a preempted request is computed again instead of swapped"),
    neutral("--cpu-offload-gb", "0|0.0", "weights are not offloaded; `serve-llm plan MODEL` says what would fit"),
    neutral("--scheduling-policy", "fcfs|priority", "omit it; the field `priority` of a request is always honoured"),
    refused("--num-gpu-blocks-override", "--kv-cache-memory sets the size of the KV cache"),
    refused("--calculate-kv-scales", "omit it; --kv-cache-dtype int8 computes its scales while serving"),
    refused(
        "--long-prefill-token-threshold --max-num-partial-prefills --max-long-partial-prefills",
        "--max-num-batched-tokens limits the prompt tokens in a step; omit the others",
    ),
    refused("--prefix-caching-hash-algo", "omit it; blocks are found by a hash that cannot be forged"),
    refused("--preemption-mode --num-scheduler-steps --use-v2-block-manager", "omit it, as in current vLLM"),
    refused("--kv-transfer-config", "prefill and decode run in the same engine; omit it"),
    refused("--enable-sleep-mode", "stop the server instead; it starts in seconds"),
    # computation
    same("--speculative-model", "--speculative-config"),
    refused("--compilation-config -O --cuda-graph-sizes --max-seq-len-to-capture", _NO_COMPILATION),
    refused("--attention-backend", "omit it; the kernels are chosen by device and instruction set"),
    switch("--disable-custom-all-reduce", "--all-reduce nccl"),
    refused("--limit-mm-per-prompt", "omit it; images and audio are not read, only the text part of such models"),
    neutral("--logprobs-mode", "raw_logprobs", "omit it; log-probabilities are those before temperature"),
    refused("--max-logprobs", "top_logprobs is at most 20, as in OpenAI's API; --limit logprobs=N is per request"),
    neutral("--guided-decoding-backend", "auto|guidance", "omit it; llguidance enforces schemas and grammars"),
    refused("--structured-outputs-config", "omit it; llguidance enforces schemas and grammars"),
    refused("--max-cpu-loras", "--max-loras is the number in memory; others are read from their files again"),
    refused("--fully-sharded-loras", "omit it; each rank holds its part of an adapter"),
    # parallelism
    refused("--data-parallel-size-local -dpl", "--data-parallel-split on node 0 gives the engines of each of --nnodes"),
    refused("--data-parallel-address --data-parallel-rpc-port", "--master-addr takes both, as HOST:PORT"),
    refused("--data-parallel-start-rank --data-parallel-rank", "omit it; node 0 tells each --node-rank its engines"),
    refused("--data-parallel-backend", "--distributed-executor-backend ray; without it engines are on --nnodes hosts"),
    refused(
        "--data-parallel-hybrid-lb --data-parallel-external-lb",
        "omit it; node 0 serves HTTP for the engines of all hosts",
    ),
    refused("--headless", "--node-rank N with --nnodes and --master-addr makes a host that serves no HTTP"),
    refused("--master-port", "--master-addr takes both, as HOST:PORT"),
    refused("--enable-eplb --eplb-config --all2all-backend", "--enable-expert-parallel needs nothing else; omit it"),
    refused("--worker-cls --worker-extension-cls --scheduler-cls", "classes cannot be replaced by an option"),
    # HTTP
    same("--api-server-count -asc", "--front-ends"),
    refused("--disable-frontend-multiprocessing", "engines always run in processes of their own; omit it"),
    always("--enable-auto-tool-choice", "always on; tools work when a request has them", may_be_off=True),
    refused("--tool-call-parser --reasoning-parser --tool-parser-plugin", _DIALECT),
    always("--enable-reasoning", "always on; reasoning is recognised by the model's format", may_be_off=True),
    neutral("--response-role", "assistant", "omit it; the role of answers is assistant"),
    neutral("--chat-template-content-format", "auto", "omit it; templates that read parts get parts"),
    refused("--default-chat-template-kwargs", "the field `chat_template_kwargs` of a request"),
    always("--enable-prompt-tokens-details", "always on, in `usage`", may_be_off=True),
    always("--enable-server-load-tracking", "always on; GET /load answers", may_be_off=True),
    always("--enable-request-id-headers", "always on; every answer has X-Request-Id", may_be_off=True),
    always("--enable-tokenizer-info-endpoint", "always on; GET /tokenizer_info answers", may_be_off=True),
    refused("--enable-force-include-usage", "a client asks by stream_options.include_usage"),
    refused("--return-tokens-as-token-ids", "the field `return_tokens_as_token_ids` of a request"),
    refused("--root-path --uds --middleware --allow-credentials --allowed-methods --allowed-headers", _PROXY),
    refused("--ssl-ca-certs --ssl-cert-reqs --enable-ssl-refresh", "client certificates: " + _PROXY),
    refused("--disable-fastapi-docs", "GET /openapi.json needs a key like every route, with --api-key"),
    # logs
    always("--disable-log-requests --no-enable-log-requests", "always so; prompts are never logged", may_be_off=True),
    refused("--enable-log-requests", "--log-level debug logs a line per request, without the prompt"),
    refused("--disable-log-stats", "--log-level warning hides the statistics, /metrics keeps them"),
    refused("--max-log-len", "omit it; prompts are never logged"),
    refused("--uvicorn-log-level", "--log-level is for all messages"),
    refused("--disable-uvicorn-access-log", "omit it; served requests are logged at --log-level debug only"),
    refused("--log-config-file", "--log-level and --log-format"),
    refused("--collect-detailed-traces", "omit it; --otlp-traces-endpoint sends all spans that there are"),
    refused("--show-hidden-metrics-for-version", "omit it; docs/metrics.md lists all metrics"),
    refused("--served-model-names", "here it is --served-model-name NAME [NAME ...]"),
)

VLLM_SAME = (
    "served-model-name tokenizer revision download-dir load-format model-impl runner convert dtype quantization "
    "max-model-len max-num-seqs max-num-batched-tokens gpu-memory-utilization enforce-eager kv-cache-dtype block-size "
    "seed tensor-parallel-size pipeline-parallel-size data-parallel-size enable-expert-parallel nnodes node-rank "
    "distributed-executor-backend host port api-key allowed-origins ssl-keyfile ssl-certfile chat-template "
    "trust-request-chat-template generation-config config enable-lora lora-modules max-loras max-lora-rank "
    "otlp-traces-endpoint kv-events-config"
).split()
