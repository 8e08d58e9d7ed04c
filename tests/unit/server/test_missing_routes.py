"""Paths that do not exist are answered with what to use instead."""

from __future__ import annotations

import pytest

from support.asgi import fetch
from support.serving import Served


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/anthropic/v1/messages", "/v1/messages"),
        ("/openai/v1/nowhere", None),
        ("/v1/health", "/health"),
        ("/completion", "/v1/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/props", "/status"),
        ("/get_server_info", "/status"),
        ("/readyz", "/ready"),
        ("/v2/chat", "/v1/chat/completions"),
        ("/v1/nowhere", None),
        ("/v1", None),
    ],
)
def test_a_wrong_base_url_is_answered_with_the_right_path(served: Served, path: str, meant: str | None) -> None:
    message = str(served.post(path, {}).json()["error"]["message"])
    assert message.endswith(f"; did you mean {meant}?" if meant else f"POST {path}")


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat", "/api/tags"])
def test_routes_of_ollama_are_answered_with_ours(served: Served, path: str) -> None:
    reply = served.post(path, {})
    assert reply.status == 404 and "; Ollama's own routes are not served; /v1/chat" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/sleep?level=1", "stop it to free"),
        ("POST", "/wake_up", "stop it to free"),
        ("GET", "/is_sleeping", "stop it to free"),
        ("POST", "/reset_prefix_cache", "cache_salt"),
        ("POST", "/pause", "SIGTERM"),
        ("POST", "/resume", "SIGTERM"),
        ("POST", "/collective_rpc", "/status"),
        ("POST", "/inference/v1/generate", "/v1/completions"),
        ("POST", "/apply-template", "/tokenize"),
        ("POST", "/v1/chat/completions/render", "/tokenize"),
        ("POST", "/v1/completions/derender", "/detokenize"),
        ("POST", "/abort_requests", "disconnects"),
        ("POST", "/start_profile", "--otlp-traces-endpoint"),
        ("POST", "/v1/audio/transcriptions", "text only"),
        ("POST", "/v1/conversations", "previous_response_id"),
        ("POST", "/v1/complete", "/v1/messages"),
        ("POST", "/openai/deployments/demo/chat/completions?api-version=1", "/v1"),
        ("POST", "/v1beta/models/demo:generateContent", "/v1/chat/completions"),
    ],
)
def test_operations_of_others_that_are_missing_are_explained(served: Served, method: str, path: str, hint: str) -> None:
    reply = fetch(served.app, method, path)
    assert reply.status == 404 and hint in reply.json()["error"]["message"].partition("; ")[2]
