"""What the README shows is what happens: its curl lines and its Python run as they stand, but for the port. So do the
curl lines with which the pages of the API begin."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from support.daemon import Daemon

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
CURLS = re.findall(r"^ {4,}(?:\$ )?(curl (?:.*\\\n)*.*)$", README + "\n" + QUICKSTART, re.MULTILINE)
PAGES = sorted({page.stem for page in (ROOT / "docs/api").iterdir()} - {"batches", "fields"})
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_is_something_to_run() -> None:
    assert len(CURLS) >= 3 and len(PYTHON) == 3


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


@pytest.mark.parametrize("page", PAGES)
def test_page_of_the_api(page: str, server: Daemon) -> None:
    """The first request of the page, and the keys of its answer."""
    text = (ROOT / f"docs/api/{page}.md").read_text()
    found = re.search(
        r"^    \$ curl (?P<url>\S+)(?P<rest>[^{\n]*\n?[^{\n]*(?:-d '(?P<body>.*?)')?)$", text, re.M | re.S
    )
    assert found is not None
    url = found["url"].replace("http://127.0.0.1:8000", server.url)
    body = None if found["body"] is None else json.loads(found["body"])
    answer = httpx.get(url) if body is None else httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    shown = text[found.end() :].partition("\n\n")[0]
    keys = set(re.findall(r'"(\w+)":', shown))
    assert len(keys) > 3 and keys <= set(re.findall(r'"(\w+)":', answer.text.replace('\\"', '"')))


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python(number: int, server: Daemon) -> None:
    code = PYTHON[number].replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
