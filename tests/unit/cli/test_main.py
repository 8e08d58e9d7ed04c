"""The program by other names."""

import os
import subprocess
import sys

import serve_llm
from serve_llm.cli import main as program


def test_python_m_serve_llm() -> None:
    command = [sys.executable, "-P", "-m", "serve_llm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"serve-llm {serve_llm.__version__}\n"), done.stderr


def test_a_closed_pipe_ends_a_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-P", "-m", "serve_llm", "completion", "bash"]
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


def test_serve_is_the_server() -> None:
    assert program.COMMANDS["serve"] is program.serve
