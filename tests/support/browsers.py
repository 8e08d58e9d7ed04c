"""Chromium, and the page at `/` in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import expect, sync_playwright

from support.manifests import ROOT
from support.page_server import CHROMIUM, SECONDS

AXE = (ROOT / "tests" / "vendor" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


@contextmanager
def launch_browser() -> Iterator[Any]:
    expect.set_options(timeout=1000 * SECONDS)
    with sync_playwright() as browsers:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]  # needed for root in a container
        launched = browsers.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=1000 * SECONDS)
        yield launched
        launched.close()


@contextmanager
def open_page(browser: Any, url: str) -> Iterator[Any]:
    """Open the page with its key, in its own tab. Fails at the end if the page had an error."""
    context = browser.new_context()
    opened = context.new_page()
    opened.set_default_timeout(1000 * SECONDS)
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda line: problems.append(line.text) if "Content Security" in line.text else None)
    opened.goto(url)
    expect(opened.get_by_role("status").first).to_have_text("Enter an API key")
    opened.get_by_label("API key").fill("key")
    opened.get_by_label("API key").press("Tab")
    expect(opened.locator("#health")).to_have_text("Serving")
    yield opened
    context.close()
    assert problems == []


def find_serious(page: Any) -> list[tuple[str, list[str]]]:
    """Return the accessibility rules that the shown page violates seriously, according to axe-core, and the
    elements."""
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(AXE)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        (one["id"], [node["html"] for node in one["nodes"]])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
