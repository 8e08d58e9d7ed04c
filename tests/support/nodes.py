"""What the nodes of the tests serve, and the requests to them."""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from pathlib import Path

from support.daemon import Daemon

FAKE_HOSTS = str(Path(__file__).parent / "fakehost")
LIMIT = 120.0  # seconds; more than enough on a busy machine
PROMPTS = ["class Stack:\n    def __init__(self):\n", "def main():\n", "import os\n", "x"]
SMALL = ("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory", "32MiB", "--device", "cpu")
ONCE = ("--max-restarts", "0")


def body(model: str = "demo", **more: object) -> str:
    return json.dumps(
        {"model": model, "prompt": PROMPTS, "max_tokens": 24, "temperature": 0, "ignore_eos": True} | more
    )


def complete(url: str, model: str = "demo") -> list[str]:
    """Return greedy continuations of all prompts, requested at once."""
    request = urllib.request.Request(
        url + "/v1/completions", body(model).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        return [choice["text"] for choice in json.load(answer)["choices"]]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Hosts:
    """Nodes as processes of this machine, each of which believes that it is on a separate host."""

    def __init__(self, secret: str | None = "s3cret") -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.secret = secret

    def node(
        self, number: int, *arguments: str, nnodes: int = 2, secret: str | None = None, folder: Path | None = None
    ) -> Daemon:
        path = os.pathsep.join(filter(None, [FAKE_HOSTS, os.environ.get("PYTHONPATH")]))
        environ = {"TEST_HOST": str(number), "PYTHONPATH": path}
        if secret := secret or self.secret:
            environ["SERVE_LLM_CLUSTER_SECRET"] = secret
        rank = ("--node-rank", str(number)) if number else ()
        network = ("--nnodes", str(nnodes), *rank, "--master-addr", self.address)
        return Daemon(*arguments, *network, environ=environ, folder=folder)
