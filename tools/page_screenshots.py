"""Take the screenshots of docs/commands.md: the web page at `/` of a real server with the demo model, in Chromium.

python tools/page_screenshots.py        needs the extra `dev` and the program chromium
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import expect, sync_playwright

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SIZE = {"width": 1100, "height": 760}
OPTIONS = ["demo", "--port", "0", "-tp", "2", "-dp", "2"]
SERVING = re.compile(r"Serving demo on (\S+) after")
LOAD_SECONDS = 45.0
QUESTION = "def is_prime(n):"


def wait_for_address(server: subprocess.Popen[str]) -> str:
    """Return the URL from the server's log once it is serving."""
    assert server.stderr is not None
    for line in server.stderr:
        found = SERVING.search(line)
        if found is not None:
            return found[1]
    raise SystemExit("the server ended")


def ask(page: Any, question: str) -> None:
    page.get_by_label("Message", exact=True).fill(question)
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("button", name="Regenerate").last).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def take(page: Any) -> None:
    expect(page.locator("#health")).to_have_text("Serving")
    page.get_by_label("Max tokens").fill("48")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Token probabilities").check()
    ask(page, QUESTION)
    page.get_by_role("log", name="Conversation").get_by_text("Token probabilities").click()
    page.get_by_role("option").nth(3).click()
    page.screenshot(path=IMAGES / "page-chat.png")
    page.get_by_label("Max tokens").fill("400")
    began = time.monotonic()
    while time.monotonic() - began < LOAD_SECONDS:  # long enough to have something to plot
        ask(page, f"{QUESTION} # {time.monotonic()}")
        page.get_by_role("button", name="New chat").click()
    page.get_by_role("tab", name="Status").click()
    expect(page.locator("#timeline tr").nth(6)).to_be_visible()
    page.emulate_media(color_scheme="dark")
    page.evaluate("scrollTo(0, 0)")
    page.set_viewport_size({"width": SIZE["width"], "height": 1330})
    page.screenshot(path=IMAGES / "page-status.png")


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "serve_llm", *OPTIONS]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        address = wait_for_address(server)
        with sync_playwright() as browsers:
            expect.set_options(timeout=120_000)
            browser = browsers.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport=SIZE, color_scheme="light")
            page.goto(address)
            take(page)
            browser.close()
    finally:
        server.terminate()
        server.communicate()


if __name__ == "__main__":
    main()
