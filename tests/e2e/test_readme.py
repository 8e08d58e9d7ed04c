"""The README is accurate: its curl lines and its Python run as written, except for the port. So do the examples of the
API's pages, with the answers that they show."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from support.daemon import Daemon

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
CURLS = re.findall(r"^ {4,}(?:\$ )?(curl (?:.*\\\n)*.*)$", README + "\n" + QUICKSTART, re.MULTILINE)
PAGES = sorted({page.stem for page in (ROOT / "docs/api").iterdir()} - {"batches", "fields"})
NEEDS_OPTIONS = (
    "/v1/files",
    "/v1/batches",
    "/infill",
    "background",
    "previous_response_id",
    "/v1/responses/",
    "tool_choice",
)
STABLE = {
    "object",
    "type",
    "role",
    "model",
    "root",
    "owned_by",
    "max_model_len",
    "prompt_tokens",
    "input_tokens",
    "count",
}


class Example(NamedTuple):
    page: str
    line: int
    url: str
    body: str | None
    shown: str  # the answer, in which ... stands for more


def _find_examples() -> list[Example]:
    """Return the examples of the API's pages that a server without further options can answer."""
    examples = []
    for path in (ROOT / "docs/api.md", *sorted((ROOT / "docs/api").glob("*.md"))):
        text = path.read_text()
        for found in re.finditer(r"^    \$ (curl .*\n(?: {8}.*\n)*)((?:    [ {].*\n)*)", text, re.MULTILINE):
            command = shlex.split(found[1])
            if any(part in found[1] for part in NEEDS_OPTIONS):
                continue
            body = command[command.index("-d") + 1] if "-d" in command else None
            page = str(path.relative_to(ROOT))
            examples.append(Example(page, text[: found.start()].count("\n") + 1, command[1], body, found[2]))
    return examples


EXAMPLES = _find_examples()
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


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.page}:{example.line}")
def test_example_of_the_api(example: Example, server: Daemon) -> None:
    """The keys of the answer are there; so is each value that does not depend on the model's text or on the time."""
    url = example.url.replace("http://127.0.0.1:8000", server.url)
    answer = httpx.get(url) if example.body is None else httpx.post(url, json=json.loads(example.body), timeout=60)
    assert answer.status_code == 200, answer.text
    if "..." not in example.shown:
        assert answer.json() == json.loads(example.shown)
    shown = _find_members(example.shown)
    found = _find_members(answer.text.replace('\\"', '"'))
    assert shown.keys() <= found.keys()
    for key in STABLE & shown.keys():
        assert set(shown[key]) <= set(found[key]), key


def test_examples_are_found() -> None:
    assert {example.page for example in EXAMPLES} == {"docs/api.md", *(f"docs/api/{page}.md" for page in PAGES)}


def _find_members(text: str) -> dict[str, list[str]]:
    """Return the values of each key that are numbers or strings."""
    members: dict[str, list[str]] = {}
    for key, value in re.findall(r'"(\w+)":\s*("[^"]*"|[\d.]+)?', text):
        members.setdefault(key, []).append(value)
    return members


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python(number: int, server: Daemon) -> None:
    code = PYTHON[number].replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
