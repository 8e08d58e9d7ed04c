"""Options of llama.cpp's server that are neither options here nor in the tables of vLLM's and SGLang's."""

from __future__ import annotations

from serve_llm.common.options.peer_flag import PeerFlag, always, refused, same, switch

_PER_REQUEST = "a field of each request; generation_config.json of the model sets defaults"
_ROPE = "edit config.json in a copy of the checkpoint"
_THREADS = "--cpu-threads is their number; taskset and nice choose cores and priority"
_OFFLOAD = "weights are not offloaded; `serve-llm plan MODEL` says what would fit"
_TEXT_ONLY = "omit it; images and audio are not read, only the text part of such models"
_ONE_MODEL = "a server has one model; start one for each"
_TOOLS = "omit it; tools run in the client, answers contain the calls"
_DRAFTS = "--speculative-config says how drafts are made and how long they are"
_MEMORY = "not needed; weights are read into memory"
_CHUNKS = "--max-num-batched-tokens is the maximum number of prompt and output tokens in one step"

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
    refused("-C* --cpu-mask* --cpu-range* --cpu-strict* --prio* --poll* -td -tbd --threads-*draft", _THREADS),
    refused("-tb --threads-batch --threads-http", "--cpu-threads is for all computation"),
    refused("-b --batch-size -ub --ubatch-size", _CHUNKS),
    refused("-fa --flash-attn", "not needed; attention never materialises the matrix of scores"),
    refused("--mlock --mmap --no-mmap --numa -lm --load-mode -lzm --lazy-mode --no-host --*repack -nr", _MEMORY),
    refused("-ot* --override-tensor* -*cmoe* --*cpu-moe* -ncffn --n-cpu-ffn --moe-cache-mib --*op-offload", _OFFLOAD),
    refused("-kvo -nkvo --kv-offload --no-kv-offload", "the KV cache is where the model is; omit it"),
    refused("-fit* --fit*", "`serve-llm plan MODEL` says what would fit; what does not fit is refused at start"),
    refused(
        "-dt --defrag-thold --keep --swa-full --swa-checkpoints -ctxcp --ctx-checkpoints -cms --checkpoint-min-step",
        "omit it; the cache is in blocks",
    ),
    refused("-cram --cache-ram --*cache-idle-slots", "--kv-offload-memory is host memory for blocks of the KV cache"),
    always("-kvu --kv-unified", "always so; requests share the KV cache"),
    refused(
        "-no-kvu --no-kv-unified --kv-unified-per-slot", "requests share the KV cache; --max-model-len is the longest"
    ),
    switch("--cache-prompt", "--prefix-caching"),
    switch("--no-cache-prompt", "--no-prefix-caching"),
    refused("--slot-save-path", "--kv-offload-dir keeps blocks of the KV cache on a disk"),
    refused("--rpc", "--nnodes with --master-addr uses several hosts"),
    refused("--list-devices", "`serve-llm collect-env` lists them"),
    refused("--override-kv --check-tensors", "omit it; a file is checked as it is read, and used as it is"),
    refused("--lora --lora-scaled --lora-init-without-apply", "--enable-lora --lora-modules NAME=DIRECTORY"),
    refused("--control-vector*", "there are no control vectors"),
    refused("-mm* --*mmproj* --image-* --video-* --mtmd-* --media-path", _TEXT_ONLY),
    refused("-dr --docker-repo", "MODEL is a directory, a GGUF file or a Hugging Face id"),
    refused("--embd-gemma-default --fim-* --gpt-oss-* --vision-*", "give the model's Hugging Face id as MODEL"),
    refused("--models-* --no-models-autoload", _ONE_MODEL),
    refused("--tags", "--served-model-name gives a model several names"),
    refused("-hft", "set the variable HF_TOKEN, which ps does not show"),
    refused("--offline", "export HF_HUB_OFFLINE=1"),
    refused("-cl --cache-list", "`hf cache ls` lists what is downloaded"),
    refused("--completion-bash", "`serve-llm completion bash` prints the script"),
    refused("--usage", "--help"),
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
    always("--webui --ui", "on by default; GET / is the page"),
    switch("--no-webui --no-ui", "--no-page"),
    refused("--ui-* --webui-* --no-ui-* --no-webui-*", "omit it; the page at / has no settings of the server"),
    refused("--tools* --mcp-* -ag --agent -no-ag --no-agent", _TOOLS),
    refused("--cors-origins", "--allowed-origins ORIGIN, once for each"),
    refused("--cors-* --no-cors-* --api-prefix", "put a reverse proxy in front of the server"),
    refused("--reuse-port", "--front-ends N shares the port among processes of one server"),
    refused("--sse-ping-interval", "omit it; streams of /v1/messages and /v1/responses have pings"),
    refused("--sleep-idle-seconds", "the model stays loaded"),
    always("--warmup", "always so"),
    refused("--no-warmup --no-perf --perf --no-slots", "omit it"),
    refused("--path", "omit it; the page at / is part of the program"),
    refused("--slots --props", "GET /status says what the server is doing"),
    refused("-to --timeout", "--request-timeout limits a request as a whole, --limit stall-seconds=N a slow client"),
    refused("--api-key-file", "--api-key, or the variable SERVE_LLM_API_KEY with commas between keys"),
    same("--ssl-key-file", "--ssl-keyfile"),
    same("--ssl-cert-file", "--ssl-certfile"),
    refused("-n --predict --n-predict", "max_tokens is " + _PER_REQUEST),
    refused(
        "--temp --temperature --top-* --min-p --*-penalty --repeat-last-n --samplers --ignore-eos -l --logit-bias",
        _PER_REQUEST,
    ),
    refused("-j* --json-schema* --grammar*", "response_format or structured_outputs, " + _PER_REQUEST),
    refused(
        "--xtc-* --typical* --dry-base --dry-multiplier --dry-allowed-length --dry-penalty-last-n "
        "--dry-sequence-breaker --adaptive-* --dynatemp-* --mirostat* --sampl*-seq",
        "there is no such sampler",
    ),
    refused("-bs --backend-sampling", "always so; ids are sampled where the model is"),
    refused("--reverse-prompt", "the field `stop` of a request"),
    refused("-sp --special", "skip_special_tokens is a field of each request"),
    refused("--spm-infill", "omit it; POST /infill orders the parts as the model's tokens ask"),
    refused("--embd-normalize", "omit it; vectors are normalised as the checkpoint says"),
    refused("-e --escape --no-escape", "omit it; prompts are used as they are"),
    same("-s", "--seed"),
    refused(
        "--no-jinja --skip-chat-parsing --no-skip-chat-parsing", "omit it; docs/dialects.md says how answers are read"
    ),
    same("--chat-template-kwargs", "--default-chat-template-kwargs"),
    refused("--prefill-assistant --no-prefill-assistant", "the field `continue_final_message` of a request"),
    refused(
        "-rea --reasoning --reasoning-effort --*reasoning-preserve",
        "reasoning_effort and chat_template_kwargs of a request",
    ),
    refused("--reasoning-budget-message", "omit it; the model's own closing token is forced"),
    refused("--reasoning-format", "--reasoning-field names the field; reasoning is always separate from the content"),
    refused("--reasoning-budget", "thinking_token_budget is " + _PER_REQUEST),
    refused("--rope-* --yarn-*", _ROPE),
    refused("-v --verbose --log-verbose -lv --verbosity --log-verbosity", "--log-level debug"),
    switch("--log-jsonl", "--log-format json"),
    refused("--log-file", "messages go to stderr: add 2> FILE"),
    refused("--log-disable", "--log-level error"),
    refused("--log-prompts-dir", "--enable-log-requests --max-log-len N logs the beginnings of prompts"),
    refused(
        "--log-colors --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --no-log-jsonl",
        "--log-level and --log-format",
    ),
    refused("-p --prompt", "`serve-llm chat MODEL` takes the prompt from the terminal or a pipe; --port is the port"),
    same("-md --model-draft --spec-draft-model", "--speculative-config", "a checkpoint directory or a Hugging Face id"),
    refused("--draft* --spec-* --*-draft -hfd -hfrd -devd -ngld -ctkd -ctvd --lookup-* -lcs -lcd", _DRAFTS),
)

LLAMA_CPP_SAME = "host port api-key".split()
