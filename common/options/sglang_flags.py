"""Options of SGLang that are neither options here nor in the table of vLLM's."""

from __future__ import annotations

from serve_llm.common.options.peer_flag import PeerFlag, always, refused, same, switch

_CHOSEN = "omit it; the kernels are chosen by device and instruction set"
_CHUNKS = "--max-num-batched-tokens is the most prompt and output tokens in one step"

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
    refused("--cuda-graph-max-bs --cuda-graph-bs --enable-torch-compile", "omit it; nothing is compiled at start"),
    refused("--attention-backend --sampling-backend --mm-attention-backend", _CHOSEN),
    refused("--grammar-backend", "omit it; llguidance enforces schemas and grammars"),
    same("--speculative-draft-model-path", "--speculative-config"),
    refused(
        "--speculative-algorithm --speculative-num-draft-tokens --speculative-num-steps",
        "--speculative-config says how drafts are made and how long they are",
    ),
    same("--random-seed", "--seed"),
    same("--watchdog-timeout", "--step-timeout", "a hung engine is replaced and its requests continue"),
    always("--enable-metrics", "always on; GET /metrics answers", may_be_off=True),
    always("--enable-cache-report", "always on, in usage.prompt_tokens_details", may_be_off=True),
    refused("--log-requests --log-requests-level", "--log-level debug logs a line per request, without the prompt"),
    refused("--enable-trace", "--otlp-traces-endpoint URL alone turns traces on"),
    refused("--stream-interval", "omit it; every step's tokens are sent at once"),
    same("--max-loras-per-batch", "--max-loras"),
    refused("--lora-paths", "--enable-lora --lora-modules NAME=DIRECTORY"),
    refused("--admin-api-key", "--api-key may be repeated; a key that begins with admin: may load adapters"),
    refused("--warmups --skip-server-warmup", "omit it; the server is ready when /ready says so"),
    refused("--file-storage-path", "--batches-dir keeps the files of /v1/files"),
    refused("--disaggregation-mode", "prefill and decode run in the same engine; omit it"),
)

SGLANG_SAME = (
    "host port api-key served-model-name revision load-format dtype quantization kv-cache-dtype chat-template "
    "nnodes node-rank download-dir log-level device tensor-parallel-size pipeline-parallel-size data-parallel-size"
).split()
