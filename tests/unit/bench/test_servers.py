"""Servers as processes; small scripts stand in for them."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from bench.servers import Recipe, StartError, free_port, named, peer, running

# A server with one child process that answers what a client asks a server that has just started.
SCRIPT = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.reply(b'{"data": [{"id": "m"}]}')
    def do_POST(self): self.reply(b'data: {"choices": [{"text": "a"}]}')
    def reply(self, body):
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def scripted(script: str) -> Recipe:
    port = free_port()
    return Recipe("scripted", f"http://127.0.0.1:{port}", (sys.executable, "-S", "-c", script, str(port)))


def test_a_server_is_started_paused_resumed_and_ended_with_its_children() -> None:
    with running(scripted(SCRIPT)) as server:
        tree = server.tree()
        assert len(tree) == 2 and server.start_seconds > 0
        assert server.resident_bytes() > 2e6
        server.pause()
        assert {process.status() for process in tree} == {psutil.STATUS_STOPPED}
        server.resume()
        assert psutil.STATUS_STOPPED not in {process.status() for process in tree}
        server.pause()  # a paused server can be stopped too
    assert not any(process.is_running() for process in tree)


def test_a_server_that_ends_says_what_it_last_said() -> None:
    with (
        pytest.raises(StartError, match=r"ended with code 3(.|\n)*no such model"),
        running(scripted("import sys; sys.stderr.write('no such model'); sys.exit(3)")),
    ):
        pass


def test_a_server_that_refuses_says_why() -> None:
    refusing = SCRIPT.replace("POST(self): self", "POST(self): self.send_error(422, 'no ids here') or self")
    with pytest.raises(StartError, match=r"422(.|\n)*no ids here"), running(scripted(refusing)):
        pass


def test_a_program_that_is_not_there() -> None:
    with (
        pytest.raises(StartError, match="x cannot be started"),
        running(Recipe("x", "http://127.0.0.1:9", ("/nowhere/x",))),
    ):
        pass


def test_what_a_server_is_named_by() -> None:
    assert named("a=http://host:80/", "m") == Recipe("a", "http://host:80")
    recipe = named("b=serve '{model} x' --port {port}", "m")
    assert recipe.command[:2] == ("serve", "m x") and recipe.url.endswith(recipe.command[-1])
    own = named("serve-llm", "a b")
    assert own.name == "serve-llm" and own.command[0].endswith("/serve-llm") and own.command[1] == "a b"
    assert own.command[-2:] == ("--speculative-config", "none")


def test_a_peer_runs_in_its_own_environment(tmp_path: Path) -> None:
    recipe = peer(f"llama-cpp={sys.executable},{tmp_path}", "unused", threads=3)
    words = " ".join(recipe.command)
    assert recipe.command[0] == sys.executable and f"--model {tmp_path} --port " in words and "--threads 3" in words
    labelled = peer(f"llama-cpp:q8={sys.executable},{tmp_path}", "unused", threads=3)
    assert labelled.name == "llama-cpp:q8" and labelled.command[1:4] == ("--model", str(tmp_path), "--port")
    assert "0-2" in peer(f"vllm={sys.executable}", str(tmp_path), threads=3).environ["VLLM_CPU_OMP_THREADS_BIND"]
