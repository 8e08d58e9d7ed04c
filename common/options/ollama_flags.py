"""Commands and options of Ollama, and vLLM's other commands, that are not commands or options here."""

from __future__ import annotations

from serve_llm.common.options.peer_flag import PeerFlag, refused, same

# First words of other command lines -> what to type here.
OLLAMA_COMMANDS = {
    "run": "Ollama's `run MODEL` is `serve-llm chat MODEL`",
    "pull": "Ollama's `pull MODEL` is not needed: `serve-llm MODEL` downloads what is missing",
    "list": "Ollama's `list` has no counterpart: a server has one model, which is given first",
    "ps": "Ollama's `ps` is `serve-llm top`",
    "create": "Ollama's `create` is not needed: `serve-llm FILE.gguf` serves a file",
    "show": "Ollama's `show MODEL` is `serve-llm plan MODEL`, which reads the model and says what it needs",
    "rm": "Ollama's `rm MODEL` has no counterpart: models are in Hugging Face's cache; `hf cache rm` removes them",
    "cp": "Ollama's `cp` has no counterpart: --served-model-name gives a model several names",
    "stop": "Ollama's `stop` has no counterpart: Ctrl-C or SIGTERM ends a server and unloads its model",
}

VLLM_COMMANDS = {
    "complete": "vLLM's `complete` has no counterpart: POST /v1/completions, or the page's view Completion; "
    "`serve-llm chat` talks to a model",
}

OLLAMA: tuple[PeerFlag, ...] = (
    same("--num-ctx", "--max-model-len"),
    refused("--num-predict", "max_tokens is a field of each request"),
    refused("--num-gpu", "not needed; a model is on the GPU as a whole, or on the CPU (--device)"),
    refused("--keep-alive --keepalive", "not needed; the model stays loaded until the server ends"),
    refused("--think --hidethinking", "reasoning_effort is a field of a request; reasoning is apart from the content"),
    refused("--modelfile", "give the model as MODEL and its template as --chat-template"),
)
