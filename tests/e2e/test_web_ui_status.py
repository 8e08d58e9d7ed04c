"""The status view of the page at `/` in a browser, on an engine that the test steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.page_server import CHROMIUM, PageServer, serve_page, wait_until

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")
expect = playwright.expect

FETCH = """(id) => {
  const headers = {"Content-Type": "application/json", "Authorization": "Bearer key", "X-Request-Id": id};
  const body = JSON.stringify({"prompt": "a secret prompt", "max_tokens": 4});
  fetch("v1/completions", {method: "POST", headers, body});
}"""


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with serve_page() as started:
        yield started


@pytest.fixture(scope="module")
def page(server: PageServer) -> Iterator[Any]:
    from support.browsers import launch_browser, open_page  # needs playwright

    with launch_browser() as browser, open_page(browser, server.url) as opened:
        opened.get_by_role("tab", name="Status").click()
        yield opened


def test_requests_of_other_clients(server: PageServer, page: Any) -> None:
    server.answer = "one two three four five six "
    timeline = page.get_by_role("region", name="Requests of all clients")
    expect(page.get_by_text("None yet.")).to_be_visible()
    for name in ("first", "second"):
        page.evaluate(FETCH, name)
        wait_until(lambda: server.engine.open)
        row = timeline.get_by_role("row", name="/v1/completions").first
        expect(row).to_contain_text("waiting")
        server.step(1)
        expect(row).to_contain_text("running")
        server.step(3)
        expect(row).to_contain_text("cut at the limit of tokens")
        assert row.get_attribute("title") == f"id {name}"
    assert "until the last token" in row.get_by_role("img").get_attribute("aria-label")
    expect(timeline.get_by_role("row")).to_have_count(3)
    expect(page.get_by_text("None yet.")).to_be_hidden()
    assert "secret" not in page.locator("body").inner_text()
