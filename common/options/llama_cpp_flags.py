"""Options of llama.cpp's server that are neither options here nor in the tables of vLLM's and SGLang's."""

from __future__ import annotations

from serve_llm.common.options.peer_flag import PeerFlag, always, refused, same, switch

_PER_REQUEST = "a field of each request; generation_config.json of the model sets defaults"
_ROPE = "edit config.json in a copy of the checkpoint"
_CHUNKS = "--max-num-batched-tokens is the most prompt and output tokens in one step"

LLAMA_CPP: tuple[PeerFlag, ...] = (
    same("-m", "MODEL", "the model is given first, without a flag"),
    same("-hf -hfr --hf-repo", "MODEL", "REPOSITORY:Q4_K_M names one of several GGUF files"),
    refused("-hff --hf-file", "MODEL is REPOSITORY:FILE.gguf"),
    refused("-mu --model-url", "download the file and give its path as MODEL"),
    same("-a --alias", "--served-model-name"),
    refused(
        "-c --ctx-size",
        "--max-model-len is the longest request; the KV cache, which requests share, is sized by the free memory",
    ),
    same("-np --parallel", "--max-num-seqs", "slots share the KV cache, so that each may have the full length"),
    refused(
        "-ngl --gpu-layers --n-gpu-layers", "not needed; a model is on the GPU as a whole, or on the CPU (--device)"
    ),
    refused("-ts --tensor-split", "--tensor-parallel-size N uses several GPUs, --tensor-parallel-split their shares"),
    refused("-sm --split-mode", "--tensor-parallel-size splits every layer, --pipeline-parallel-size the layers"),
    refused("-mg --main-gpu -dev", "CUDA_VISIBLE_DEVICES names the GPUs"),
    same("-t --threads", "--cpu-threads"),
    refused("-tb --threads-batch --threads-http", "--cpu-threads is for all computation"),
    refused("-b --batch-size -ub --ubatch-size", _CHUNKS),
    refused("-fa --flash-attn", "not needed; attention never materialises the matrix of scores"),
    refused("--mlock --no-mmap --numa", "not needed; weights are read into memory"),
    refused("-ctk -ctv --cache-type-k --cache-type-v", "--kv-cache-dtype int8 is for keys and values"),
    always("-cb --cont-batching", "always on"),
    refused("--no-context-shift --context-shift", "not needed; a request that is too long is refused, never shifted"),
    refused("--cache-reuse --slot-prompt-similarity -sps", "not needed; every prefix of whole blocks is reused"),
    refused("-nocb --no-cont-batching", "--max-num-seqs 1 serves one request at a time"),
    always("--jinja", "always on; the model's chat template is Jinja"),
    same("--chat-template-file", "--chat-template"),
    switch("--embedding --embeddings --rerank --reranking", "--runner pooling"),
    refused("--pooling", "--pooling-type cls|mean|last"),
    always("--metrics", "always on; GET /metrics answers", may_be_off=True),
    always("--webui", "on by default; GET / is the page"),
    switch("--no-webui", "--no-page"),
    refused("--path", "omit it; the page at / is part of the program"),
    refused("--slots --props", "GET /status says what the server is doing"),
    refused("-to --timeout", "--request-timeout limits a request as a whole, --limit stall-seconds=N a slow client"),
    refused("--api-key-file", "--api-key, or the variable SERVE_LLM_API_KEY with commas between keys"),
    same("--ssl-key-file", "--ssl-keyfile"),
    same("--ssl-cert-file", "--ssl-certfile"),
    refused("-n --predict --n-predict", "max_tokens is " + _PER_REQUEST),
    refused("--temp --top-k --top-p --min-p --repeat-penalty --samplers --grammar", _PER_REQUEST),
    refused("--reasoning-format", "--reasoning-field names the field; reasoning is always separate from the content"),
    refused("--reasoning-budget", "thinking_token_budget is " + _PER_REQUEST),
    refused("--rope-freq-base --rope-freq-scale --yarn-ext-factor", _ROPE),
    refused("-v --verbose -lv --verbosity", "--log-level debug"),
    refused("-p --prompt", "`serve-llm chat MODEL` takes the prompt from the terminal or a pipe; --port is the port"),
    same("-md --model-draft", "--speculative-config", "a checkpoint directory or a Hugging Face id"),
    refused(
        "--draft-max --draft-min --spec-type", "--speculative-config says how drafts are made and how long they are"
    ),
)

LLAMA_CPP_SAME = "host port api-key".split()
