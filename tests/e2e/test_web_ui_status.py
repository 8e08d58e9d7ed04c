"""The status view of the page at `/` in a browser, with an engine that the test steps."""

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


def test_engines_queue_and_front_ends(page: Any) -> None:
    from support.browsers import find_serious

    answers: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        status = route.fetch().json()
        (engine,) = status["engines"]
        cache = engine["kv_cache"]
        status["engines"] = [
            engine | {"num_running": 3, "num_waiting": 2, "kv_cache": cache | {"usage": 0.25}},
            engine | {"ready": False, "draining": True, "num_running": 1, "kv_cache": cache | {"usage": 0.5}},
            engine | {"ready": False, "num_running": 0},
        ]
        status["queue"] |= {"waiting_requests": 5, "max_requests": 64}
        status["queue"] |= {"waiting_prompt_tokens": 70, "max_prompt_tokens": 900}
        status["front_ends"] = [
            {"pid": 41, "host": None, "phase": "serving", "num_open": 4},
            {"pid": 42, "host": "other", "phase": "spare", "num_open": 0},
        ]
        answers.append(status)
        route.fulfill(json=status)

    front_ends = page.get_by_role("region", name="Front ends")
    expect(front_ends).to_be_hidden()
    page.route("**/status", answer)
    engines = page.get_by_role("region", name="Engines and ranks").locator(".engine")
    expect(engines).to_have_count(3)
    for number, (state, load, usage) in enumerate(
        (
            ("ready", "3 running, 2 waiting, KV cache 25 %", 0.25),
            ("draining", "1 running, 0 waiting, KV cache 50 %", 0.5),
            ("being replaced", "0 running, 0 waiting, KV cache 0 %", 0),
        )
    ):
        expect(engines.nth(number).locator("caption")).to_have_text(f"Engine {number}: {state}")
        expect(engines.nth(number)).to_contain_text(load)
        meter = engines.nth(number).get_by_role("meter", name=f"KV cache of engine {number} in use")
        assert meter.evaluate("element => element.value") == usage
    expect(page.locator("#num-engines")).to_have_text("1 of 3 ready")
    expect(page.locator("#queue")).to_have_text("5 of 64")
    expect(page.locator("#queue-tokens")).to_have_text("70 of 900 tokens")
    expect(front_ends.get_by_role("row")).to_contain_text(["Phase", "the server's", "other"])
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert find_serious(page) == [], scheme

    # Only parts that change are redrawn.
    page.evaluate("document.querySelector('#engines .engine').dataset.seen = 'yes'")
    drawn = len(answers)

    def has_polled_twice() -> bool:
        page.evaluate("0")  # lets the routes above be called
        return len(answers) >= drawn + 2

    wait_until(has_polled_twice)
    assert engines.first.get_attribute("data-seen") == "yes"
    page.unroute("**/status")
    expect(engines).to_have_count(1)
    expect(front_ends).to_be_hidden()
