"""Options of SGLang that are neither options here nor in the table of vLLM's."""

from __future__ import annotations

from serve_llm.common.options.peer_flag import PeerFlag, always, neutral, refused, same, switch

_CHOSEN = "omit it; the kernels are chosen by device and instruction set"
_DRAFTS = "--speculative-config says how drafts are made and how long they are"
_OFFLOAD = "weights are not offloaded; `serve-llm plan MODEL` says what would fit"
_HOST_CACHE = "--kv-offload-memory is host memory for blocks of the KV cache, --kv-offload-dir a directory for more"
_TEXT_ONLY = "omit it; images and audio are not read, only the text part of such models"
_TOGETHER = "prefill and decode run in the same engine; omit it"
_EXPERTS = "--enable-expert-parallel needs nothing else; omit it"
_METRICS = "omit it; docs/metrics.md lists all metrics"
_BUILT_IN = "omit it; the server does not need this setting"
_CHUNKS = "--max-num-batched-tokens is the maximum number of prompt and output tokens in one step"

SGLANG: tuple[PeerFlag, ...] = (
    same("--model-path", "MODEL", "the model is given first, without a flag"),
    same("--tokenizer-path", "--tokenizer"),
    same("--context-length", "--max-model-len"),
    switch("--is-embedding", "--runner pooling"),
    refused("--json-model-override-args", "edit config.json in a copy of the checkpoint"),
    refused("--skip-tokenizer-init", "prompts may be token ids (`prompt: [1, 2, 3]`); the tokenizer is always loaded"),
    same("--tp --tp-size", "--tensor-parallel-size"),
    same("--pp --pp-size", "--pipeline-parallel-size"),
    same("--dp --dp-size", "--data-parallel-size", "each engine has the whole model"),
    refused("--ep --ep-size --expert-parallel-size", "--enable-expert-parallel spreads experts over all ranks"),
    refused("--enable-dp-attention", "--data-parallel-size with --enable-expert-parallel shares the experts"),
    refused("--load-balance-method", "omit it; a prompt goes to the engine that has its prefix, unless it is busy"),
    same("--dist-init-addr --nccl-init-addr", "--master-addr"),
    same("--mem-fraction-static", "--gpu-memory-utilization"),
    same("--max-running-requests", "--max-num-seqs"),
    same("--max-queued-requests", "--max-queue", "beyond it the answer is 503"),
    refused("--max-total-tokens", "--kv-cache-memory sets the size of the KV cache"),
    refused("--chunked-prefill-size --max-prefill-tokens", _CHUNKS),
    same("--page-size", "--block-size"),
    switch("--disable-radix-cache", "--no-prefix-caching"),
    refused("--schedule-policy --schedule-conservativeness", "omit it; requests are served in order of `priority`"),
    switch("--disable-cuda-graph", "--enforce-eager"),
    switch("--disable-decode-cuda-graph", "--enforce-eager"),
    refused(
        "--cuda-graph-* --*-torch-compile* --torch-compile-* --enable-profile-cuda-graph",
        "omit it; nothing is compiled at start",
    ),
    refused("--sampling-backend --*-backend --*-attention-backend --triton-attention-*", _CHOSEN),
    refused("--grammar-backend", "omit it; llguidance enforces schemas and grammars"),
    same("--speculative-draft-model-path", "--speculative-config"),
    refused("--speculative-* --spec-trace-dir --decoupled-spec-* --dllm-* --enable-multi-layer-eagle", _DRAFTS),
    same("--random-seed", "--seed"),
    same("--watchdog-timeout", "--step-timeout", "a hung engine is replaced and its requests continue"),
    always("--enable-metrics", "always on; GET /metrics answers", may_be_off=True),
    always("--enable-cache-report", "always on, in usage.prompt_tokens_details", may_be_off=True),
    switch("--log-requests", "--enable-log-requests"),
    neutral("--log-requests-level", "0|1", "--max-log-len N logs the beginnings of prompts too, nothing logs answers"),
    refused("--enable-trace", "--otlp-traces-endpoint URL alone turns traces on"),
    refused("--stream-interval", "omit it; every step's tokens are sent at once"),
    same("--max-loras-per-batch", "--max-loras"),
    refused("--lora-paths", "--enable-lora --lora-modules NAME=DIRECTORY"),
    refused("--admin-api-key", "--api-key may be repeated; a key that begins with admin: may load adapters"),
    refused("--warmups --skip-server-warmup", "omit it; the server is ready when /ready says so"),
    refused("--file-storage-path", "--batches-dir keeps the files of /v1/files"),
    refused("--disaggregation-* --encoder-* --enable-pd* --pdmux-* --sm-group-num --prefill-*", _TOGETHER),
    refused("--hicache-* --enable-hi* --hi*sparse* --*flexkv* --*lmcache* --*unified-cache-* --radix-*", _HOST_CACHE),
    refused("--kt-* --*paged-experts* --ple-offload-* --*weights-cpu-backup --enable-memory-saver", _OFFLOAD),
    refused("--ep-num-redundant-experts", "--eplb-config takes num_redundant_experts, as JSON"),
    refused(
        "--*deepep-* --*expert* --*moe-* --*megamoe* --elastic-ep-* --ep-* --max-ep-size --enable-*-batch-overlap",
        _EXPERTS,
    ),
    refused(
        "--media-* --image-* --asr-* --language-only --*-mm-* --mm-* --limit-mm-* --enable-multimodal --*image-*",
        _TEXT_ONLY,
    ),
    refused(
        "--bucket-* --*-buckets --*-metrics* --*metric-* --*balancedness* --load-*publish-* --show-time-cost", _METRICS
    ),
    refused(
        "--*-cp --cp-strategy --*attn-* --attention-*-parallel-size --*dp-* --*dwdp-* --enable-layernorm-sp",
        "--tensor-parallel-size is that of all layers; contexts are not split",
    ),
    refused("--base-gpu-id --gpu-id-step --numa-node", "CUDA_VISIBLE_DEVICES names the GPUs"),
    refused("--*tokenizer-worker-num --*tokenizer-batch-*", "--front-ends N divides the work on text among processes"),
    refused("--detokenizer-* --tokenizer-*", "--front-ends N divides the work on text among processes"),
    refused("--constrained-json-*", "the grammar of a request's schema says where whitespace may be; omit it"),
    refused("--*priority*", "omit it; the field `priority` of a request is always honoured"),
    refused("--enable-deterministic-inference --rl-on-policy-target", "--batch-invariant; on a CPU it is always so"),
    refused("--sampling-defaults --preferred-sampling-params", "--generation-config says whose defaults are used"),
    refused(
        "--completion-template --hf-chat-template-name", "--chat-template names a file; POST /infill has no template"
    ),
    refused("--sleep-on-idle --scheduler-recv-interval --num-continuous-decode-steps --pp-*", _BUILT_IN),
    refused("--gc-* --enable-cudagraph-gc --enable-tf32-matmul --*canary* --debug-* --crash-dump-folder", _BUILT_IN),
    refused("--log-level-http --uvicorn-access-log-*", "--log-level is for all messages"),
    refused("--log-requests-* --decode-log-interval", "--enable-log-requests logs a line per request, to stderr"),
    refused(
        "--fastapi-root-path --enable-http2 --http2-* --grpc-* --smg-* --sidecar*",
        "put a reverse proxy in front of the server",
    ),
    refused("--stream-response-default-include-usage", "a client asks by stream_options.include_usage"),
    refused("--allow-auto-truncate", "truncate_prompt_tokens is a field of a request"),
    refused(
        "--max-loaded-loras --max-lora-chunk-size --lora-eviction-policy --lora-backend --experts-shared-outer-loras",
        "--max-cpu-loras is the number in host memory; others are read from their files again",
    ),
    refused("--enable-response-store", "--responses-store keeps what /v1/responses answered"),
    refused("--otlp-service-name --trace-modules", "export OTEL_SERVICE_NAME; --otlp-traces-endpoint sends all spans"),
    refused(
        "--model-checksum --weight-* --*-weight-load* --custom-weight-loader --modelopt-* --delete-ckpt-*",
        "omit it; --load-format reads safetensors",
    ),
    refused(
        "--remote-instance-* --modelexpress-* --checkpoint-engine-* --engine-info-*",
        "weights are read from files; omit it",
    ),
    refused(
        "--soft-watchdog-timeout --dist-timeout", "--step-timeout; a hung engine is replaced and its requests continue"
    ),
    refused("--disable-overlap-schedule", "the next step is always prepared while one is computed; omit it"),
    refused(
        "--enable-mixed-chunk --enable-dynamic-chunking", "omit it; prompts and outputs are computed in the same steps"
    ),
    refused(
        "--return-* --enable-return-* --enable-custom-logit-processor", "docs/api.md lists what requests may ask for"
    ),
    refused("--json-* --decrypted-* --model-config-parser", "edit config.json in a copy of the checkpoint"),
    refused("--quantize-and-serve --quantization-param-path --rl-quant-profile", "--quantization"),
    refused("--use-ray", "--distributed-executor-backend ray"),
    refused(
        "--dsa-* --dsv4-* --swa-* --linear-* --int8-mamba-* --flashinfer-* --fp?-* --bf16-* --*able-*fus*",
        _CHOSEN,
    ),
    refused("--*-symm-mem --enable-mscclpp --enable-nccl-nvls --*nccl* --enable-p2p-check", "--all-reduce"),
    refused(
        "--enable-lora-* --lora-drain-* --lora-strict-loading --uno-lora-path", "--enable-lora needs no more; omit it"
    ),
    refused(
        "--enable-*-swa-* --disable-hybrid-* --*mamba-* --enable-linear-* --*layout --enable-unified-memory", _BUILT_IN
    ),
    refused(
        "--enable-fp32-lm-head --enable-*-megakernel --enable-*-monokernel --*-indexer* --enable-scattered-*", _CHOSEN
    ),
    refused("--disable-chunked-prefix-cache --enable-session-radix-cache --strip-thinking-cache", "--prefix-caching"),
    refused(
        "--enable-streaming-session --incremental-streaming-output", "omit it; every step's tokens are sent at once"
    ),
    refused(
        "--retraction-policy --num-reserved-decode-tokens --*-delay* --optimistic-*",
        "omit it; preempted requests are computed again",
    ),
    refused(
        "--*-nvtx-* --forward-* --msprobe-* --enable-request-time-stats-logging",
        "omit it; --otlp-traces-endpoint sends the times of requests",
    ),
    refused("--*watermark*", "texts are not marked"),
    refused(
        "--enable-waterfill --fuseep-mode --tbo-* --batch-notify-size --disable-outlines-* --disable-flashinfer-*",
        _BUILT_IN,
    ),
)

SGLANG_SAME = (
    "host port api-key served-model-name revision load-format dtype quantization kv-cache-dtype chat-template "
    "nnodes node-rank download-dir log-level device tensor-parallel-size pipeline-parallel-size data-parallel-size"
).split()
