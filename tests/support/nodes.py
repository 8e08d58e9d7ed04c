"""What the nodes of the tests serve, and what they are asked."""

from __future__ import annotations

import json
import socket
import urllib.request

LIMIT = 120.0  # seconds; more than anything here takes on a busy machine
PROMPTS = ["class Stack:\n    def __init__(self):\n", "def main():\n", "import os\n", "x"]
SMALL = ("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory", "32MiB", "--device", "cpu")
ONCE = ("--max-restarts", "0")


def body(model: str = "demo", **more: object) -> str:
    return json.dumps(
        {"model": model, "prompt": PROMPTS, "max_tokens": 24, "temperature": 0, "ignore_eos": True} | more
    )


def complete(url: str, model: str = "demo") -> list[str]:
    """Greedy continuations of all prompts, at once."""
    request = urllib.request.Request(
        url + "/v1/completions", body(model).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        return [choice["text"] for choice in json.load(answer)["choices"]]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
