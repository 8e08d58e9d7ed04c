"""What the README shows is what happens: its curl lines and its Python run as they stand, but for the port."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.daemon import Daemon

README = (Path(__file__).parent.parent.parent / "README.md").read_text()
CURLS = re.findall(r"^    (?:\$ )?(curl (?:.*\\\n)*.*)$", README, re.MULTILINE)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_is_something_to_run() -> None:
    assert len(CURLS) >= 2 and len(PYTHON) == 3


@pytest.mark.parametrize("command", CURLS)
def test_curl(command: str, server: Daemon) -> None:
    here = command.replace("http://127.0.0.1:8000", server.url).replace(
        "curl ", "curl --silent --show-error --fail ", 1
    )
    done = subprocess.run(["bash", "-c", here], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if "/v1/" in command and "stream" not in command:
        answer = json.loads(done.stdout)
        assert answer.get("choices") or answer.get("data")


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python(number: int, server: Daemon) -> None:
    code = PYTHON[number].replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
