"""A newcomer's first steps: the commands of README.md and docs/quickstart.md as written, except for the port."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import START_SECONDS
from support.dashboard_panels import PROMETHEUS
from support.page_server import CHROMIUM

ROOT = Path(__file__).parent.parent.parent
ADDRESS = "http://127.0.0.1:8000"
# Commands with the reason why neither test_a_stranger_gets_there nor test_readme.py runs them.
NOT_RUN = {
    "pip install .": "installs torch; `make serve` has installed the package from the same files",
    "serve-llm <directory, Hugging Face id or GGUF file> [options]": "stands for any model",
    "make check": "is a step of .ci/run",
    "make test": "is a step of .ci/run",
    "make bench": "measures for minutes, on a quiet machine",
}
RUN = ("make serve", "curl ", ".venv/bin/serve-llm chat", ".venv/bin/serve-llm bench serve ")
RUN += (".venv/bin/serve-llm top --once", ".venv/bin/python tools/dashboard_picture.py ")


def read_commands(text: str) -> list[str]:
    """The shell commands of a page's indented blocks, each on one line and without its comment."""
    without_fences = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = re.findall(r"^ {4,}(?:\$ )?(\S(?:.*\\\n)*.*)$", without_fences, re.MULTILINE)
    return [re.sub(r"\s+#.*", "", re.sub(r"\\\n\s*", "", line)) for line in lines]


README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()


def test_every_command_is_run_or_has_a_reason() -> None:
    commands = read_commands(README) + read_commands(QUICKSTART)
    unknown = [command for command in commands if not command.startswith(RUN) and command not in NOT_RUN]
    assert unknown == [], "run them in test_a_stranger_gets_there, or say in NOT_RUN why not"
    assert NOT_RUN.keys() <= set(commands)
    assert all(any(command.startswith(start) for command in commands) for start in RUN)


def test_commands_are_read() -> None:
    page = (
        "Text:\n\n    $ curl x \\\n        -d y   # why\n    make\n\n3. List:\n\n       ls\n\n```python\n    no\n```\n"
    )
    assert read_commands(page) == ["curl x -d y", "make", "ls"]


class Checkout:
    """A folder with the files of the repository, in which a newcomer types commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path in ROOT.iterdir():
            if path.name != ".venv":
                (folder / path.name).symlink_to(path)
        (folder / ".venv").symlink_to(sys.prefix)
        self.url = ""
        self._server: subprocess.Popen[str] | None = None
        self._picture: subprocess.Popen[str] | None = None

    def type(self, command: str) -> str:
        """Run a command and return its output. One that draws a picture runs in parallel to the following ones, its
        load."""
        if command == "make serve":
            return self._serve(command)
        if command.startswith(".venv/bin/serve-llm"):
            words = 3 if " bench " in command else 2
            command = " ".join([*command.split()[:words], self.url, *command.split()[words:]])
        command = command.replace(ADDRESS, self.url).replace("curl ", "curl --silent --show-error --fail ", 1)
        if "dashboard_picture" in command:
            self._picture = subprocess.Popen(["bash", "-c", command], cwd=self.folder, text=True)
            return ""
        done = subprocess.run(
            ["bash", "-c", command], input="Hello!\n", capture_output=True, text=True, cwd=self.folder, timeout=300
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def _serve(self, command: str) -> str:
        """Serve on a free port, without installing anything again."""
        more = ["--old-file=.venv/.serving", "ARGS=--port 0"]
        self._server = subprocess.Popen(
            [*command.split(), *more], cwd=self.folder, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._server.stderr is not None
        log = []
        for line in self._server.stderr:
            log.append(line)
            if found := re.search(r"Serving demo on (http://\S+) after", line):
                self.url = found[1]
                return "".join(log)
        raise AssertionError("".join(log))

    def interrupt(self) -> str:
        """Send Ctrl-C, which make gets too, so that its exit code means nothing. Returns the rest of the log."""
        assert self._server is not None
        os.killpg(self._server.pid, signal.SIGINT)
        _, log = self._server.communicate(timeout=START_SECONDS)
        return log

    def read_picture(self) -> str:
        assert self._picture is not None and self._picture.wait(START_SECONDS) == 0
        return (self.folder / "dashboard.html").read_text()

    def close(self) -> None:
        if self._picture is not None and self._picture.poll() is None:
            self._picture.terminate()
            self._picture.wait(30)
        if self._server is not None and self._server.poll() is None:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait(30)
        if self._server is not None and self._server.stderr is not None:
            self._server.stderr.close()


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout(tmp_path)
    yield made
    made.close()


def chat_in_browser(url: str) -> str:
    """Return the answer to a message sent from the page."""
    from playwright.sync_api import expect

    from support.browsers import launch_browser

    with launch_browser() as browser:
        page = browser.new_page()
        page.goto(url)
        page.get_by_label("Message", exact=True).fill("Hello!")
        page.get_by_role("button", name="Send").click()
        answer = page.get_by_role("log", name="Conversation").locator("article.assistant")
        expect(answer.get_by_role("button", name="Regenerate")).to_be_visible()
        text: str = answer.locator(".markdown").inner_text()
        return text


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")
@pytest.mark.skipif(PROMETHEUS is None, reason="needs the program prometheus")
def test_a_stranger_gets_there(checkout: Checkout) -> None:
    pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    commands = [one for one in read_commands(README) + read_commands(QUICKSTART) if one.startswith(RUN)]
    commands = list(dict.fromkeys(commands))
    assert commands[0] == "make serve"
    commands.sort(key=lambda command: command != "make serve" and "dashboard_picture" not in command)
    printed = {command: checkout.type(command) for command in commands}

    def find(part: str) -> str:
        return next(text for command, text in printed.items() if part in command)

    browser = re.search(rf"In a browser, ({ADDRESS}) ", README)
    assert browser is not None and chat_in_browser(checkout.url)
    assert find("serve-llm chat").strip()
    answer: dict[str, Any] = json.loads(find("structured_outputs"))
    assert answer["choices"][0]["text"] in (" os", " re")
    assert "Successful requests:                   20\n" in find("bench serve")
    assert "<svg " in (checkout.folder / "bench.svg").read_text()
    assert "answers        200:" in find("top --once")
    picture = checkout.read_picture()
    assert picture.count("<path d=") > 20 and picture.count("No data") < picture.count('class="panel"') / 2
    assert "Stopped" in checkout.interrupt()
