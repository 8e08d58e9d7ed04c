"""The page at `/` in a browser, with a real daemon serving the demo model, whose engine is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from support.daemon import Daemon
from support.hostile_markdown import HTML, SCRIPT_ADDRESSES, SHAPES
from support.page_server import CHROMIUM, wait_until

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")
expect = playwright.expect

MILLISECONDS = 180_000  # enough for an engine to start on a busy machine
NUM_TOKENS = 1900  # an answer that takes some seconds
MAX_ATTACK_CHARS = 100
ATTACKS = [*HTML, *(f"[x]({address})" for address in SCRIPT_ADDRESSES), *SHAPES]
ATTACK_TEXT = "\n\n".join(one for one in ATTACKS if one.isprintable() and len(one) <= MAX_ATTACK_CHARS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from support.browsers import launch_browser  # needs playwright

    with launch_browser() as launched:
        expect.set_options(timeout=MILLISECONDS)
        yield launched


@pytest.fixture(scope="module")
def daemon(browser: Any) -> Iterator[Daemon]:
    """Started after the browser, with an engine that makes no progress yet."""
    with Daemon("demo", "--api-key", "key") as started:
        wait_until(started.engine_pids)
        os.kill(started.engine_pid(), signal.SIGSTOP)
        yield started


@pytest.fixture(scope="module")
def page(browser: Any, daemon: Daemon) -> Iterator[Any]:
    from support.browsers import open_page

    early = browser.new_page()
    early.goto(daemon.wait_until_logged(r"Listening on (\S+);")[1])
    expect(early.locator("#health")).to_have_text("Starting")
    os.kill(daemon.engine_pid(), signal.SIGCONT)
    expect(early.locator("#health")).to_have_text("Enter an API key")  # without a reload
    early.close()
    with open_page(browser, daemon.wait_until_serving()) as opened:
        yield opened


def add_to_requests(page: Any, **fields: object) -> None:
    """Add fields that the page has no inputs for to its requests, and let the server answer them."""

    def send(route: Any) -> None:
        body = route.request.post_data_json | fields
        route.continue_(post_data=json.dumps(body))

    page.unroute_all()
    page.route("**/v1/chat/completions", send)


def ask(page: Any, text: str, max_tokens: int) -> Any:
    """Send a message. Returns the location of the answer."""
    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()
    return page.get_by_role("log", name="Conversation").locator("article.assistant").last


def test_the_key_is_asked_for_once(page: Any) -> None:
    page.reload()
    expect(page.locator("#health")).to_have_text("Serving")
    expect(page.get_by_label("API key")).to_have_value("key")
    assert page.evaluate("localStorage.length + document.cookie.length") == 0


def test_a_chat_streams_and_is_aborted(page: Any) -> None:
    add_to_requests(page, ignore_eos=True)
    answer = ask(page, "def is_prime(n):", 1500)
    expect(answer.locator(".markdown")).not_to_be_empty()
    page.get_by_role("button", name="Stop").first.click()
    expect(answer).to_contain_text("stopped")
    page.get_by_role("tab", name="Status").click()
    expect(page.locator("#running")).to_have_text("0")
    row = page.get_by_role("region", name="Requests of all clients").get_by_role("row").nth(1)
    expect(row).to_contain_text("aborted")
    page.get_by_role("tab", name="Chat").click()


def test_an_answer_goes_on_when_its_engine_is_killed(daemon: Daemon, page: Any) -> None:
    add_to_requests(page, ignore_eos=True, temperature=1, seed=7)
    answer = ask(page, "def is_prime(n):", NUM_TOKENS)
    wait_until(answer.locator(".markdown").inner_text)  # `expect` looks only once a second
    os.kill(daemon.engine_pid(), signal.SIGKILL)
    expect(page.locator("#health")).to_have_text("An engine is being replaced")
    expect(answer).to_contain_text(f"{NUM_TOKENS} tokens")
    expect(page.locator("#health")).to_have_text("Serving")
    text = answer.locator(".markdown").inner_text()
    page.get_by_role("tab", name="Status").click()
    expect(page.get_by_role("region", name="Restarts")).to_contain_text("SIGKILL")
    row = page.get_by_role("region", name="Requests of all clients").get_by_role("row").nth(1)
    expect(row).to_contain_text("replays: 1")
    page.get_by_role("tab", name="Chat").click()

    page.get_by_role("button", name="Regenerate").click()
    expect(answer.get_by_role("button", name="Regenerate")).to_be_visible()
    assert answer.locator(".markdown").inner_text() == text


def test_what_the_model_writes_never_runs(page: Any) -> None:
    add_to_requests(page, structured_outputs={"choice": [ATTACK_TEXT]})
    answer = ask(page, "hello", 1900)
    expect(answer.get_by_role("button", name="Regenerate")).to_be_visible()
    expect(answer).to_contain_text("<script>window.attacked=1</script>")
    assert page.evaluate("window.attacked") is None
    assert answer.locator(".markdown").locator("img, script, iframe, svg, style, form, input").count() == 0
    assert page.title() == "demo - serve-llm"
