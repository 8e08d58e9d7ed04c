"""What to use instead of a path that does not exist here."""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.routing import Match

_NO_FLUSH = "the prefix cache cannot be emptied; the field cache_salt of a request keeps its prefix apart from others"
_NO_ABORT = "a request ends when its client disconnects; a background response, with /v1/responses/{id}/cancel"
_NO_PROFILE = "--otlp-traces-endpoint sends traces of requests; /metrics and /requests have their times"
_NO_RENDERING = "/tokenize with messages returns the ids of the rendered prompt, and /detokenize their text"
_NO_SLEEP = "the server does not sleep; stop it to free its memory, it starts in seconds"
_NO_PAUSE = "the server cannot be paused; SIGTERM ends it after the open requests"
# Prefixes of paths that an option adds, or that belong to another engine.
_ROUTE_HINTS = {
    "/api/": "Ollama's own routes are not served; /v1/chat/completions, /v1/completions and /v1/models are",
    "/openai/deployments/": "Azure's paths are not served; set the base URL of OpenAI's client to this server's /v1",
    "/v1beta/": "Google's own API is not served; /v1/chat/completions is",
    "/v1/responses/": "it may need the option --responses-store",
    "/v1/files": "it may need the option --batches-dir",
    "/v1/batches": "it may need the option --batches-dir",
    "/v1/messages/batches": "use /v1/files and /v1/batches, with the url /v1/messages in each line",
    "/v1/load_lora_adapter": "it may need the option --enable-lora",
    "/v1/unload_lora_adapter": "it may need the option --enable-lora",
    "/scale": "it may need the option --data-parallel-max; vLLM's /scale_elastic_ep is POST /scale here",
    "/sleep": _NO_SLEEP,
    "/wake_up": _NO_SLEEP,
    "/is_sleeping": _NO_SLEEP,
    "/reset_prefix_cache": _NO_FLUSH,
    "/flush_cache": _NO_FLUSH,
    "/pause": _NO_PAUSE,
    "/resume": _NO_PAUSE,
    "/is_paused": _NO_PAUSE,
    "/abort": _NO_ABORT,
    "/v1/requests/cancel": _NO_ABORT,
    "/apply-template": _NO_RENDERING,
    "/v1/chat/completions/render": _NO_RENDERING,
    "/v1/completions/render": "/tokenize with prompt returns the ids",
    "/v1/chat/completions/derender": "/detokenize returns the text of ids",
    "/v1/completions/derender": "/detokenize returns the text of ids",
    "/v1/chat/completions/batch": "send one request per conversation, or a file of them to /v1/batches",
    "/start_profile": _NO_PROFILE,
    "/stop_profile": _NO_PROFILE,
    "/v1/audio/": "this server works with text only",
    "/v1/images/": "this server works with text only",
    "/v1/videos": "this server works with text only",
    "/v1/realtime": "use /v1/responses with stream: true",
    "/v1/conversations": "/v1/responses continues a stored response with previous_response_id",
    "/v1/uploads": "send the whole file to /v1/files",
    "/v1/vector_stores": "/v1/embeddings makes the vectors; the server stores none",
    "/v1/moderations": "/classify returns the classes of a model that has some",
    "/v1/complete": "/v1/messages is Anthropic's current API; /v1/completions is OpenAI's",
    "/collective_rpc": "clients cannot call methods of the workers; /status and /metrics say what the engines do",
    "/inference/v1/generate": "use /v1/completions with token ids in prompt, and return_token_ids",
}
# Paths of other engines, and common misspellings -> our equivalent.
_OTHER_PATHS = {
    "/chat": "/v1/chat/completions",
    "/completion": "/v1/completions",
    "/embed": "/v1/embeddings",
    "/embed_all": "/v1/embeddings",
    "/embedding": "/v1/embeddings",
    "/encode": "/v1/embeddings",
    "/generate": "/v1/completions",
    "/get_model_info": "/v1/models",
    "/get_server_info": "/status",
    "/healthz": "/health",
    "/info": "/v1/models",
    "/is_ready": "/ready",
    "/livez": "/health",
    "/model_info": "/v1/models",
    "/predict": "/classify",
    "/props": "/status",
    "/readyz": "/ready",
    "/reranking": "/v1/rerank",
    "/server_info": "/status",
    "/slots": "/status",
    "/v1/chat/completion": "/v1/chat/completions",
    "/v1/completion": "/v1/completions",
    "/v1/embed": "/v2/embed",
    "/v1/embedding": "/v1/embeddings",
    "/v1/reranking": "/v1/rerank",
    "/v1/response": "/v1/responses",
    "/v1/server_info": "/status",
    "/v2/chat": "/v1/chat/completions",
}


def explain_missing(request: Request) -> str:
    """Return the end of the error message, which may be empty."""
    path = request.url.path
    hints = [f"; {hint}" for prefix, hint in _ROUTE_HINTS.items() if path.startswith(prefix)]
    return "".join(hints) or _suggest_route(request)


def _suggest_route(request: Request) -> str:
    """Suggest a route. Most wrong paths come from a base URL with a missing or surplus /v1, or with a prefix before it,
    such as /openai."""
    path = request.url.path
    inner = re.sub(r"^(/v1)*(?=/)", "", path)
    for candidate in (f"/v1{inner}", inner, path[max(path.rfind("/v1/"), 0) :]):
        scope = {**request.scope, "path": candidate}
        if candidate != path and any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes):
            return f"; did you mean {candidate}?"
    return f"; did you mean {_OTHER_PATHS[path]}?" if path in _OTHER_PATHS else ""
