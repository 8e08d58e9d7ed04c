"""Options of vLLM that are not options here under the same name."""

from __future__ import annotations

from serve_llm.common.options.peer_flag import PeerFlag, always, ignored, neutral, refused, same, switch, up_to

_CONFIG = "edit config.json in a copy of the checkpoint"
_DIALECT = "omit it; the chat template shows the format, and --dialect selects another one (docs/dialects.md)"
# Names of vLLM and SGLang for the formats of the built-in dialects.
_TOOL_PARSERS = (
    "cohere_command3|deepseek_v3|deepseek_v31|deepseek_v32|deepseek_v4|deepseekv3|deepseekv31|deepseekv32|"
    "functiongemma|gemma4|gigachat3|glm45|glm47|gpt-oss|granite|granite-20b-fc|granite4|hermes|hunyuan_a13b|internlm|"
    "jamba|kimi_k2|lfm2|llama3|llama3_json|llama4_pythonic|mimo|minimax|minimax-m2|minimax_m2|mistral|olmo3|openai|"
    "phi4_mini_json|pythonic|qwen|qwen25|qwen3_coder|qwen3_xml|seed_oss|step3p5|xlam"
)
_REASONING_PARSERS = (
    "cohere_command3|deepseek-r1|deepseek-v3|deepseek_r1|deepseek_v3|deepseek_v4|gemma4|glm45|glm47|gpt-oss|granite|"
    "hunyuan_a13b|kimi_k2|mimo|minimax|minimax_m2|mistral|nano_v3|nemotron_v3|olmo3|openai_gptoss|qwen3|qwen3-thinking|"
    "seed_oss|step3p5"
)
_NO_COMPILATION = "omit it; nothing is compiled at start; --enforce-eager switches CUDA graphs and recorded steps off"
_PROXY = "put a reverse proxy in front of the server"
_KERNELS = "omit it; the kernels are chosen by device and instruction set"
_TEXT_ONLY = "omit it; images and audio are not read, only the text part of such models"
_OFFLOAD = "weights are not offloaded; `serve-llm plan MODEL` says what would fit"
_DRAFTS = "--speculative-config says how drafts are made and how long they are"
_NO_ACCESS_LOG = "no effect; requests are logged with --enable-log-requests or --log-level debug only"
_EXPERTS = "--enable-expert-parallel needs nothing else; omit it"
_FULL_ATTENTION = "omit it; the model's layers determine the layout of the cache"

VLLM: tuple[PeerFlag, ...] = (
    # the model
    same("--model", "MODEL", "the model is given first, without a flag"),
    always(
        "--trust-remote-code",
        "not needed, no code of a checkpoint is ever executed (docs/models.md lists the families)",
        may_be_off=True,
    ),
    neutral("--tokenizer-mode", "auto|hf", "omit it; the tokenizer is always that of tokenizer.json"),
    neutral("--config-format", "auto|hf", "omit it; config.json is read"),
    refused("--tokenizer-revision", "--revision is that of the model and its tokenizer"),
    refused("--hf-overrides --rope-scaling --rope-theta", _CONFIG),
    refused("--hf-token", "set the variable HF_TOKEN, which ps does not show"),
    refused("--hf-config-path", _CONFIG),
    refused("--code-revision", "omit it; no code of a checkpoint is ever executed"),
    refused("--task", "--runner generate|pooling and --convert embed|classify say what the model returns"),
    refused("--pooler-config --override-pooler-config", "--pooling-type says how a prompt becomes one vector"),
    refused("--max-parallel-loading-workers", "omit it; ranks read their own parts of the files at the same time"),
    same("-q", "--quantization"),
    always("--no-trust-remote-code", "always so; no code of a checkpoint is ever executed", may_be_off=True),
    refused(
        "--quantization-config --allow-deprecated-quantization", "--quantization; a checkpoint's own needs no option"
    ),
    refused(
        "--override-attention-dtype --override-neuron-config --additional-config", "--dtype is for all computation"
    ),
    refused("--skip-tokenizer-init", "prompts may be token ids (`prompt: [1, 2, 3]`); the tokenizer is always loaded"),
    refused("--enable-prompt-embeds", "prompts are text or token ids"),
    refused(
        "--logits-processors --logits-processor-pattern", "logit_bias, bad_words and allowed_token_ids of a request"
    ),
    refused("--io-processor-plugin", "there are no plugins"),
    refused(
        "--safetensors-load-strategy --ignore-patterns --pt-load-map-location",
        "omit it; --load-format reads safetensors",
    ),
    always("--use-tqdm-on-load", "a bar is shown on a terminal"),
    refused("--no-use-tqdm-on-load", "the bar appears only on a terminal; omit it"),
    refused("--model-loader-extra-config", "omit it; each rank reads its own part of the safetensors"),
    # memory and scheduling
    switch("--enable-prefix-caching", "--prefix-caching"),
    switch("--no-enable-prefix-caching", "--no-prefix-caching"),
    always("--enable-chunked-prefill", "always on; --max-num-batched-tokens is the maximum in one step"),
    refused("--no-enable-chunked-prefill", "long prompts are always computed in chunks; omit it"),
    always("--async-scheduling", "always so; the next step is prepared while one is computed"),
    refused("--no-async-scheduling", "the next step is always prepared while one is computed; omit it"),
    same("--kv-cache-memory-bytes", "--kv-cache-memory"),
    refused(
        "--kv-offloading-size --kv-offloading-backend",
        "--kv-offload-memory SIZE is the host memory of each rank, with a unit; --kv-offload-dir adds a directory",
    ),
    ignored("--swap-space", "no effect; a preempted request is computed again instead of swapped", takes_value=True),
    neutral("--cpu-offload-gb", "0|0.0", _OFFLOAD),
    refused("--cpu-offload-params --offload-*", _OFFLOAD),
    refused("--disable-sliding-window --*disable-hybrid-kv-cache-manager --mamba-* --gdn-*", _FULL_ATTENTION),
    refused("--kv-cache-dtype-skip-layers", "--kv-cache-dtype is for all layers"),
    refused(
        "--external-parameters --watermark --kv-sharing-fast-prefill --num-lookahead-slots --scheduler-*",
        "omit it; steps are planned without settings",
    ),
    neutral("--stream-interval", "1", "omit it; every step's tokens are sent at once"),
    neutral("--scheduling-policy", "fcfs|priority", "omit it; the field `priority` of a request is always honoured"),
    refused("--num-gpu-blocks-override", "--kv-cache-memory sets the size of the KV cache"),
    refused("--calculate-kv-scales", "omit it; --kv-cache-dtype int8 computes its scales while serving"),
    refused(
        "--long-prefill-token-threshold --max-num-partial-prefills --max-long-partial-prefills",
        "--max-num-batched-tokens limits the prompt tokens in a step; omit the others",
    ),
    refused("--prefix-caching-hash-algo", "omit it; blocks are found by a hash that cannot be forged"),
    refused(
        "--preemption-mode --num-scheduler-steps --use-v2-block-manager --multi-step-* --disable-async-output-proc",
        "omit it, as in current vLLM",
    ),
    refused("--kv-transfer-config", "prefill and decode run in the same engine; omit it"),
    refused("--ec-transfer-config --weight-transfer-config", "engines exchange nothing with other programs; omit it"),
    refused("--enable-sleep-mode", "stop the server instead; it starts in seconds"),
    # computation
    same("--speculative-model --spec-model -sc", "--speculative-config"),
    refused("--num-speculative-tokens --spec-* --ngram-* --speculative-*", _DRAFTS),
    refused(
        "--compilation-config -cc -O* --optimization-level --*cuda*graph-* --max-seq-len-to-capture", _NO_COMPILATION
    ),
    refused("--performance-mode", "omit it; there is one mode"),
    refused("--attention-config -ac --disable-cascade-attn --kernel-config", _KERNELS),
    refused("--moe-backend --linear-backend --ir-op-priority --*enable-flashinfer-autotune", _KERNELS),
    switch("--disable-custom-all-reduce", "--all-reduce nccl"),
    always("--language-model-only --skip-mm-profiling", "always so; only the text part of such models is served"),
    refused("--limit-mm-per-prompt --mm-* --*-mm-* --media-io-kwargs --interleave-mm-strings", _TEXT_ONLY),
    refused("--allowed-local-media-path --allowed-media-domains --video-* --enable-multimodal-*", _TEXT_ONLY),
    neutral("--logprobs-mode", "raw_logprobs", "omit it; log-probabilities are those before temperature"),
    up_to("--max-logprobs", 20, "top_logprobs is at most 20, as in OpenAI's API; --limit logprobs=N is per request"),
    neutral("--guided-decoding-backend", "auto|guidance", "omit it; llguidance enforces schemas and grammars"),
    refused("--guided-decoding-*", "omit it; llguidance enforces schemas and grammars"),
    refused("--structured-outputs-config", "omit it; llguidance enforces schemas and grammars"),
    refused(
        "--lora-dtype --lora-extra-vocab-size --lora-target-modules --long-lora-* --qlora-* --enable-lora-bias "
        "--enable-tower-connector-lora --specialize-active-lora",
        "omit it; an adapter's files say what it needs",
    ),
    refused("--*prompt-adapter*", "adapters are LoRA: --enable-lora --lora-modules NAME=DIRECTORY"),
    refused("--fully-sharded-loras", "omit it; each rank holds its part of an adapter"),
    # parallelism
    refused("--data-parallel-size-local -dpl", "--data-parallel-split on node 0 gives the engines of each of --nnodes"),
    switch("-ep", "--enable-expert-parallel"),
    refused("-r", "--node-rank; what ends an answer, as llama.cpp's -r, is the field `stop` of a request"),
    refused(
        "-dcp -pcp --*-context-parallel-size --cp-* --dcp-*",
        "--tensor-parallel-size spreads heads; contexts are not split",
    ),
    refused("--data-parallel-address -dpa --data-parallel-rpc-port -dpp", "--master-addr takes both, as HOST:PORT"),
    refused(
        "--data-parallel-start-rank -dpr --data-parallel-rank -dpn",
        "omit it; node 0 tells each --node-rank its engines",
    ),
    neutral(
        "--data-parallel-backend -dpb",
        "mp",
        "--distributed-executor-backend ray; without it engines are on --nnodes hosts",
    ),
    refused(
        "--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe --data-parallel-supervisor-port --dp-*",
        "omit it; node 0 serves HTTP for the engines of all hosts",
    ),
    refused("--headless", "--node-rank N with --nnodes and --master-addr makes a host that serves no HTTP"),
    refused("--master-port", "--master-addr takes both, as HOST:PORT"),
    refused("--num-redundant-experts --eplb-*", "--eplb-config takes step_interval and num_redundant_experts, as JSON"),
    refused("--all2all-backend --enable-dbo --dbo-*", _EXPERTS),
    refused("--expert-placement-strategy --enable-ep-* --enable-elastic-ep", _EXPERTS),
    refused("--disable-nccl-for-dp-synchronization", "omit it; engines agree on their steps without NCCL"),
    refused("--*fault-tolerance*", "omit it; an engine that dies is replaced, and its requests continue"),
    refused(
        "--ray-workers-use-nsight --profiler-config --enable-layerwise-nvtx-tracing", "omit it; attach the profiler"
    ),
    refused("--worker-cls --worker-extension-cls --scheduler-cls", "classes cannot be replaced by an option"),
    # HTTP
    same("--api-server-count -asc", "--front-ends"),
    refused("--renderer-num-workers --tokenizer-pool-*", "--front-ends N divides the work on text among processes"),
    refused("--disable-frontend-multiprocessing", "engines always run in processes of their own; omit it"),
    always("--enable-auto-tool-choice", "always on; tools work when a request has them", may_be_off=True),
    neutral("--tool-call-parser", _TOOL_PARSERS, _DIALECT),
    neutral("--reasoning-parser", _REASONING_PARSERS, _DIALECT),
    refused("--tool-parser-plugin --reasoning-parser-plugin", _DIALECT),
    always("--enable-reasoning", "always on; reasoning is recognised by the model's format", may_be_off=True),
    neutral("--response-role", "assistant", "omit it; the role of answers is assistant"),
    neutral("--chat-template-content-format", "auto", "omit it; templates that read parts get parts"),
    always("--enable-prompt-tokens-details", "always on, in `usage`", may_be_off=True),
    always("--enable-server-load-tracking", "always on; GET /load answers", may_be_off=True),
    always("--enable-request-id-headers", "always on; every answer has X-Request-Id", may_be_off=True),
    always("--enable-tokenizer-info-endpoint", "always on; GET /tokenizer_info answers", may_be_off=True),
    refused("--enable-force-include-usage", "a client asks by stream_options.include_usage"),
    refused("--return-tokens-as-token-ids", "the field `return_tokens_as_token_ids` of a request"),
    refused("--exclude-tools-when-tool-choice-none", "leave `tools` out of requests that must not call them"),
    refused("--reasoning-config", "thinking_token_budget is a field of each request"),
    refused("--tool-server", "tools run in the client; answers contain the calls"),
    refused("--tokens-only --grpc --cohere-*", "omit it; docs/api.md lists the routes, POST /tokenize is one"),
    refused(
        "--enable-per-request-metrics",
        "GET /metrics has the times of all requests, --otlp-traces-endpoint those of each",
    ),
    refused(
        "--fingerprint-mode --fingerprint-value",
        "omit it; system_fingerprint changes with the code, the model and its dtype",
    ),
    refused("--h11-*", "--limit sets sizes and numbers"),
    always("--enable-offline-docs", "always so; the page at / lists the routes"),
    refused("--enable-flash-late-interaction", "omit it; docs/embeddings.md says how scores are made"),
    same("--shutdown-timeout", "--drain-timeout", "the default is 30 s"),
    refused("--fail-on-environ-validation", "always so; an unknown SERVE_LLM_ variable is an error"),
    refused("--root-path", "omit it; let the proxy remove the prefix, since no answer contains a path of the server"),
    refused("--uds --middleware --allow-credentials", _PROXY),
    neutral(
        "--allowed-methods --allowed-headers",
        """["*"]|['*']|*""",
        "omit it; --allowed-origins allows all methods of the API and all headers",
    ),
    refused("--ssl-ciphers --ssl-keyfile-password", "TLS with other settings: " + _PROXY),
    refused("--ssl-ca-certs --ssl-cert-reqs", "client certificates: " + _PROXY),
    always("--enable-ssl-refresh", "always so; a renewed certificate is used for new connections"),
    refused("--disable-fastapi-docs", "GET /openapi.json needs a key like every route, with --api-key"),
    # logs
    switch("--disable-log-requests", "--no-enable-log-requests"),
    refused("--enable-log-outputs --enable-log-deltas --no-enable-log-deltas", "answers are never logged; omit it"),
    refused("--log-error-stack", "an error of the program is logged with its stack; omit it"),
    refused("--aggregate-engine-logging", "always so; one line is for all engines"),
    refused("--enable-logging-iteration-details", "--log-level debug"),
    refused("--kv-cache-metrics* --enable-mfu-metrics", "omit it; docs/metrics.md lists all metrics"),
    ignored("--disable-log-stats", "no effect; --log-level warning hides the statistics, /metrics keeps them"),
    switch("--no-disable-log-requests", "--enable-log-requests"),
    ignored("--uvicorn-log-level", "no effect; --log-level is for all messages", takes_value=True),
    ignored("--disable-uvicorn-access-log", _NO_ACCESS_LOG),
    ignored("--disable-access-log-for-endpoints", _NO_ACCESS_LOG, takes_value=True),
    refused("--log-config-file", "--log-level and --log-format"),
    refused("--collect-detailed-traces", "omit it; --otlp-traces-endpoint sends all spans that there are"),
    refused("--show-hidden-metrics-for-version", "omit it; docs/metrics.md lists all metrics"),
    refused("--served-model-names", "here it is --served-model-name NAME [NAME ...]"),
)

VLLM_SAME = (
    "served-model-name tokenizer revision download-dir load-format model-impl runner convert dtype quantization "
    "max-model-len max-num-seqs max-num-batched-tokens gpu-memory-utilization enforce-eager kv-cache-dtype block-size "
    "seed tensor-parallel-size pipeline-parallel-size data-parallel-size enable-expert-parallel enable-eplb nnodes "
    "node-rank distributed-executor-backend host port api-key allowed-origins ssl-keyfile ssl-certfile chat-template "
    "default-chat-template-kwargs trust-request-chat-template generation-config override-generation-config config "
    "enable-lora lora-modules max-loras max-cpu-loras max-lora-rank otlp-traces-endpoint kv-events-config "
    "enable-log-requests"
).split()
