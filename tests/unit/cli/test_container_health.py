"""The image's health check asks the server that the container runs, at its own address, and no other program."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from serve_llm.cli import container_health
from serve_llm.cli.container_health import find_url, main

PYTHON = ["/opt/serve-llm/bin/python", "/opt/serve-llm/bin/serve-llm"]


@pytest.mark.parametrize(
    ("command_line", "environ", "url"),
    [
        ([*PYTHON, "demo"], {"SERVE_LLM_HOST": "0.0.0.0"}, "http://127.0.0.1:8000/ready"),
        ([*PYTHON, "serve", "demo", "--port", "9000"], {}, "http://127.0.0.1:9000/ready"),
        (["/sbin/docker-init", "--", "serve-llm", "demo", "--host", "::"], {}, "http://[::1]:8000/ready"),
        ([*PYTHON], {"SERVE_LLM_MODEL": "demo", "SERVE_LLM_PORT": "81"}, "http://127.0.0.1:81/ready"),
        (
            [*PYTHON, "demo", "--host", "10.0.0.7", "--ssl-certfile", "c", "--ssl-keyfile", "k"],
            {},
            "https://10.0.0.7:8000/ready",
        ),
        ([*PYTHON, "run-batch", "demo", "-i", "a", "-o", "b"], {}, None),
        (["python", "-P", "-m", "serve_llm.engine.distributed.multihost.follower", "--node-rank", "1"], {}, None),
        (["ray", "start", "--head"], {}, None),
    ],
)
def test_where_it_asks(command_line: list[str], environ: dict[str, str], url: str | None) -> None:
    assert find_url(command_line, environ) == url


class Server(BaseHTTPRequestHandler):
    """A server that is ready, or not."""

    status = 200

    def do_GET(self) -> None:
        assert self.path == "/ready"
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_it_says_what_it_finds(
    port: int, status: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command_line = tmp_path / "cmdline"
    command_line.write_text("\0".join([*PYTHON, "demo", "--port", str(port), ""]))
    monkeypatch.setattr(container_health, "COMMAND_LINE", command_line)
    monkeypatch.setattr(Server, "status", status)
    assert main() == code


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command_line = tmp_path / "cmdline"
    command_line.write_text("\0".join([*PYTHON, "demo", "--port", "9", ""]))
    monkeypatch.setattr(container_health, "COMMAND_LINE", command_line)
    assert main() == 1
    assert capsys.readouterr().err.startswith("not healthy: ")
