"""The page at `/` in a browser, on an engine that the test steps."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from serve_llm.common.hub import resolve_model
from serve_llm.common.options.sources import make_options
from serve_llm.server.app import create_app
from serve_llm.server.daemon import listen
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.http.connection import HttpServer
from serve_llm.server.prompt.model import ServedModel
from support.fakes import ScriptedEngine

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")

HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script> **b** "
SECONDS = 60.0


class PageServer:
    """The app on a scripted engine, in a thread. Its engine makes a step when the test says so."""

    engine: ScriptedEngine

    def __init__(self) -> None:
        self.options = make_options("demo", api_key="key")
        self.model = ServedModel.load(resolve_model("demo"), self.options)
        self.listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/"
        self.loop = asyncio.new_event_loop()
        self.http_server: HttpServer | None = None

    async def serve(self) -> None:
        ids = self.model.tokenizer.encode(HOSTILE, add_special_tokens=False)
        self.engine = ScriptedEngine(lambda request: ids, automatic=False)
        app, _, prompts, storage, _ = create_app(Replicas([self.engine]), self.model, self.options)
        self.http_server = HttpServer(app, self.options.limits, None, None)
        await self.http_server.serve(sockets=[self.listener])
        prompts.close()
        storage.close()

    def stop(self) -> None:
        assert self.http_server is not None
        self.http_server.should_exit = True

    def step(self, count: int) -> None:
        async def make_steps() -> None:
            for _ in range(count):
                self.engine.step()

        asyncio.run_coroutine_threadsafe(make_steps(), self.loop).result(SECONDS)

    def read_prompt(self) -> str:
        """The newest one."""
        return self.model.tokenizer.decode(self.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


@contextmanager
def serve_page() -> Iterator[PageServer]:
    server = PageServer()
    thread = threading.Thread(target=server.loop.run_until_complete, args=(server.serve(),))
    thread.start()
    try:
        wait_until(lambda: server.http_server is not None and server.http_server.started)
        yield server
    finally:
        server.stop()
        thread.join(SECONDS)
        server.loop.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_chat_in_the_browser() -> None:
    expect = playwright.expect
    expect.set_options(timeout=1000 * SECONDS)
    with serve_page() as server, playwright.sync_playwright() as browsers:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]  # for root, in a container
        browser = browsers.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=1000 * SECONDS)
        page = browser.new_page()
        page.set_default_timeout(1000 * SECONDS)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: problems.append(line.text) if "Content Security" in line.text else None)
        page.goto(server.url)

        # The key is asked for, and kept by the tab only.
        expect(page.get_by_role("status")).to_have_text("Enter an API key")
        page.get_by_label("API key").fill("key")
        page.get_by_label("API key").press("Tab")
        expect(page.get_by_role("status")).to_have_text("Serving")
        expect(page.get_by_role("heading", level=1)).to_have_text("serve-llm demo")
        expect(page.get_by_label("Model", exact=True)).to_have_value("demo")
        page.reload()
        expect(page.get_by_role("status")).to_have_text("Serving")
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        other = browser.new_page()
        other.goto(server.url)
        expect(other.get_by_role("status")).to_have_text("Enter an API key")
        other.close()

        # An answer comes piece by piece, is text whatever it says, and can be stopped.
        conversation = page.get_by_role("log")
        message = page.get_by_label("Message")
        send, stop = page.get_by_role("button", name="Send"), page.get_by_role("button", name="Stop")
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Temperature").fill("0.25")
        page.get_by_label("Max tokens").fill("200")
        message.fill("first question")
        message.press("Enter")
        wait_until(lambda: server.engine.open)
        expect(send).to_be_disabled()
        expect(page.locator("#running")).to_have_text("1")
        server.step(100)
        expect(conversation).to_contain_text(HOSTILE)
        assert conversation.locator("img, script").count() == 0 and page.title() == "demo - serve-llm"
        stop.click()
        wait_until(lambda: server.engine.aborted)
        expect(conversation).to_contain_text("stopped")
        expect(stop).to_be_disabled()
        sampling = server.engine.submitted[-1].sampling
        assert (sampling.temperature, sampling.max_tokens) == (0.25, 200)
        assert "Be brief." in server.read_prompt()

        # The next question comes after the first and its answer, and uses another number of tokens.
        page.get_by_label("Max tokens").fill("5")
        message.fill("second question")
        send.click()
        wait_until(lambda: server.engine.open)
        server.step(5)
        expect(conversation).to_contain_text("cut at the limit of tokens, 5 tokens")
        prompt = server.read_prompt()
        assert prompt.index("first question") < prompt.index("onerror") < prompt.index("second question")

        # An error is shown, and the message can be sent again.
        page.get_by_label("Max tokens").fill("100000")
        message.fill("third question")
        message.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("max_tokens")
        expect(message).to_have_value("third question")
        page.get_by_role("button", name="New chat").click()
        expect(conversation).to_be_empty()
        assert problems == []
        browser.close()
