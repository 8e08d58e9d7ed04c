"""serve-llm chat and top with the demo model: in a pseudo terminal, in a pipe, and with a server that they start."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from support.daemon import SERVE_LLM, Daemon
from support.scripted_api import serve_script
from support.terminal import PseudoTerminal, heed_interrupts

GREEDY = ("--set", "temperature=0", "--set", "max_tokens=16")


def environ(home: Path) -> dict[str, str]:
    return os.environ | {"XDG_STATE_HOME": str(home), "TERM": "xterm"}


@pytest.mark.slow
def test_terminal(server: Daemon, tmp_path: Path) -> None:
    command = [SERVE_LLM, "chat", server.url, *GREEDY]
    with PseudoTerminal(command, environ(tmp_path)) as terminal:
        terminal.wait_for(r"demo at http://\S+; /help for commands")
        terminal.wait_for("> ")
        terminal.type("Hello!\n")
        assert "demo mod" in terminal.wait_for("\n[^\n]*> $")
        for line, shown in (
            ("/set tempratur 1", ""),
            ("again", "serve-llm chat: unknown field tempratur"),
            ("/unset tempratur", ""),
            ("/save absent/chat.json", "serve-llm chat: absent/chat.json: No such file"),
        ):
            terminal.type(line + "\n")
            terminal.wait_for(shown)
            terminal.wait_for("\n> ")  # input before the prompt may get lost
        terminal.type("/quit\n")
        assert terminal.process.wait(30) == 0
    history = (tmp_path / "serve-llm" / "chat_history").read_text()
    assert "Hello!" in history and "/quit" in history
    with PseudoTerminal(command, environ(tmp_path)) as terminal:
        terminal.wait_for("> ")
        terminal.type("\x1b[A")  # recalls the last line of the previous run
        terminal.wait_for("/quit")
        terminal.type("\n")
        assert terminal.process.wait(30) == 0


def test_ctrl_c_stops_an_answer_and_not_the_chat(server: Daemon, tmp_path: Path) -> None:
    with PseudoTerminal([SERVE_LLM, "chat", server.url, "--set", "ignore_eos=true"], environ(tmp_path)) as terminal:
        terminal.wait_for("> ")
        terminal.type("Tell me everything.\n")
        terminal.wait_for("everything[^>]*[a-z]{3}")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for(r" \.\.\.")
        terminal.wait_for("\n> ")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0


def test_terminal_shows_reasoning_dimmed_and_asks_for_results(tmp_path: Path) -> None:
    call = {"index": 0, "id": "1", "function": {"name": "look", "arguments": "{}"}}
    with serve_script([[{"reasoning": "I think"}, {"tool_calls": [call]}], [{"content": "seen"}]]) as api:
        with PseudoTerminal([SERVE_LLM, "chat", api.url], environ(tmp_path)) as terminal:
            terminal.wait_for("> ")
            terminal.type("hi\n")
            terminal.wait_for("\x1b\\[2mI think\x1b\\[0m")
            terminal.wait_for(r"look\(\{\}\)")
            terminal.wait_for("result of look> ")
            terminal.type("a cat\n")
            terminal.wait_for("seen")
            terminal.wait_for("\n> ")
            terminal.type("\x04")
            assert terminal.process.wait(30) == 0
    assert api.bodies[1]["messages"][-1] == {"role": "tool", "tool_call_id": "1", "content": "a cat"}


def test_pipe_with_a_server_of_its_own() -> None:
    command = [SERVE_LLM, "chat", "demo", *GREEDY, "--max-num-seqs", "2", "--api-key", "secret"]
    done = subprocess.run(command, input="Hello!", capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "") and "demo mod" in done.stdout
    failed = subprocess.run(
        [SERVE_LLM, "chat", "/nonexistent/model", "-p", "x"], capture_output=True, text=True, timeout=300
    )
    assert failed.returncode == 3 and failed.stderr.startswith("serve-llm: there is no directory /nonexistent/model")


@pytest.mark.slow
def test_no_server_outlives_a_chat_that_is_ended(tmp_path: Path) -> None:
    with PseudoTerminal([SERVE_LLM, "chat", "demo"], environ(tmp_path)) as terminal:
        terminal.wait_for("> ", 300)
        processes = psutil.Process(terminal.process.pid).children(recursive=True)
        assert processes
        terminal.process.kill()
        terminal.process.wait()
        _, alive = psutil.wait_procs(processes, 60)
    assert not alive


def test_top(server: Daemon) -> None:
    done = subprocess.run([SERVE_LLM, "top", server.url, "--once"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"demo at {server.url}: serving, up 0:") and lines[0].endswith("0 restarts")
    assert any(line.startswith("engine 0 ") and " tokens, 1 rank," in line for line in lines)
    command = [SERVE_LLM, "top", server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed_interrupts) as watching:
        assert watching.stdout is not None
        first = [watching.stdout.readline() for _ in lines]
        assert first[0].startswith("demo at ")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 0
