"""The page at `/` in a browser, with an engine that the test steps, or with scripted answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.browsers import find_serious, launch_browser, open_page
from support.hostile_markdown import list_attacks
from support.page_server import CHROMIUM, PageServer, serve_page, wait_until

playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")
expect = playwright.expect

HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script> **bold** "
PHONE = {"width": 360, "height": 720}
CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with serve_page() as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launch_browser() as launched:
        yield launched


@pytest.fixture
def page(server: PageServer, browser: Any) -> Iterator[Any]:
    with open_page(browser, server.url) as opened:
        yield opened


def make_up(page: Any, path: str, *answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answer the page's next requests with these events. Returns a list that collects the bodies of requests."""
    bodies: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        events = [*answers[len(bodies) - 1], {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        route.fulfill(content_type="text/event-stream", body="".join([*lines, "data: [DONE]\n\n"]))

    page.route(f"**/{path}", answer)
    return bodies


def make_delta(finish_reason: str | None = None, logprobs: object = None, **delta: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}]}


def test_a_wrong_key_and_none(server: PageServer, browser: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    page.get_by_label("API key").fill("wrong")
    page.get_by_label("API key").press("Tab")
    expect(page.locator("#health")).to_have_text("Enter an API key")
    page.get_by_label("Message", exact=True).fill("question")
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.get_by_label("API key")).to_be_focused()

    # A server without keys answers everyone, so there is nothing to enter.
    page.evaluate("sessionStorage.clear()")

    def add_key(route: Any) -> None:
        route.continue_(headers={**route.request.headers, "authorization": "Bearer key"})

    page.route("**/*", add_key)
    page.reload()
    expect(page.locator("#health")).to_have_text("Serving")
    expect(page.get_by_label("API key")).to_be_hidden()
    context.close()


def test_a_chat_streams_stops_and_goes_on(server: PageServer, page: Any) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text("serve-llm demo")
    expect(page.get_by_label("Model", exact=True)).to_have_value("demo")
    page.reload()
    expect(page.locator("#health")).to_have_text("Serving")
    assert page.evaluate("localStorage.length + document.cookie.length") == 0

    # An answer comes piece by piece, is text whatever it says, and can be stopped.
    server.answer = HOSTILE
    conversation = page.get_by_role("log", name="Conversation")
    message = page.get_by_label("Message", exact=True)
    send, stop = page.get_by_role("button", name="Send"), page.get_by_role("button", name="Stop").first
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Max tokens").fill("200")
    message.fill("first question")
    message.press("Enter")
    wait_until(lambda: server.engine.open)
    expect(send).to_be_disabled()
    server.step(100)
    expect(conversation).to_contain_text("document.title='run'")
    expect(conversation.locator("strong").first).to_have_text("bold")
    assert conversation.locator("img, script").count() == 0 and page.title() == "demo - serve-llm"
    stop.click()
    wait_until(lambda: server.engine.aborted)
    expect(conversation).to_contain_text("stopped")
    num_aborted = len(server.engine.aborted)
    page.get_by_role("button", name="Regenerate").click()
    wait_until(lambda: server.engine.open)
    server.step(100)
    message.press("Escape")
    wait_until(lambda: len(server.engine.aborted) > num_aborted)
    sampling = server.engine.submitted[-1].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.25, 200)
    assert "Be brief." in server.read_prompt()

    # The next question follows the first and its answer.
    page.get_by_label("Max tokens").fill("5")
    message.fill("second question")
    send.click()
    wait_until(lambda: server.engine.open)
    server.step(5)
    expect(conversation).to_contain_text("cut at the limit of tokens, 5 tokens")
    prompt = server.read_prompt()
    assert prompt.index("first question") < prompt.index("onerror") < prompt.index("second question")

    # Editing the first question removes what followed it and generates a new answer.
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edited message").fill("other question")
    page.get_by_role("button", name="Send again").click()
    for count in (1, 2):
        wait_until(lambda: server.engine.open)
        server.step(5)
        expect(conversation).to_contain_text("cut at the limit of tokens, 5 tokens")
        prompt = server.read_prompt()
        assert "other question" in prompt and "first" not in prompt and "second" not in prompt
        if count == 1:
            page.get_by_role("button", name="Regenerate").click()
    expect(conversation.locator("article")).to_have_count(2)

    # If the server refuses to regenerate an answer, or to answer an edited message, the conversation stays unchanged.
    page.get_by_label("Max tokens").fill("100000")
    before = conversation.inner_text()
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("alert")).to_contain_text("max_tokens")
    assert conversation.inner_text() == before
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edited message").fill("a question that is refused")
    page.get_by_role("button", name="Send again").click()
    expect(page.get_by_label("Edited message")).to_have_value("a question that is refused")
    expect(conversation.locator("article")).to_have_count(2)
    page.get_by_role("button", name="Cancel").click()
    assert conversation.inner_text() == before

    # An error is shown, and the message can be sent again.
    message.fill("third question")
    message.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("max_tokens")
    expect(message).to_have_value("third question")
    page.get_by_role("button", name="New chat").click()
    expect(conversation).to_be_empty()


def test_an_answer_survives_the_crash_of_its_engine(server: PageServer, page: Any) -> None:
    server.answer = "one two three four five six "
    page.get_by_label("Max tokens").fill("12")
    page.get_by_label("Message", exact=True).fill("count")
    page.get_by_role("button", name="Send").click()
    wait_until(lambda: server.engine.open)
    server.step(4)
    server.lose_engine("killed by signal 9")
    expect(page.locator("#health")).to_have_text("An engine is being replaced")
    server.replace_engine()
    expect(page.locator("#health")).to_have_text("Serving")
    server.step(8)
    expect(page.get_by_role("log", name="Conversation")).to_contain_text("12 tokens")

    # The state of the server shows the error, and where the ranks are.
    page.get_by_role("tab", name="Status").click()
    expect(page.get_by_role("region", name="Restarts")).to_contain_text("killed by signal 9")
    engines = page.get_by_role("region", name="Engines and ranks")
    expect(engines.get_by_role("row")).to_have_count(2)
    expect(engines).to_contain_text("rank 3host-b")
    expect(page.get_by_role("img", name="Tokens: output")).to_be_visible()
    row = page.get_by_role("region", name="Requests of all clients").get_by_role("row").nth(1)
    expect(row).to_contain_text("cut at the limit of tokens, replays: 1")
    assert "until the first token" in row.get_by_role("img").get_attribute("aria-label")


def test_no_answer_becomes_code(page: Any) -> None:
    """Try every attack, at once and as growing text. Only known elements, attributes and addresses may appear."""
    found = page.evaluate(
        """async (attacks) => {
          const { MarkdownView } = await import("./web_ui/markdown.js");
          const place = document.createElement("div");
          document.body.append(place);
          const tags = new Set("DIV SPAN P H3 H4 H5 H6 UL OL LI BLOCKQUOTE EM STRONG S TABLE THEAD TBODY TR TH TD CODE "
            .concat("PRE BR HR A BUTTON").split(" "));
          const names = new Set("href target rel class tabindex type start aria-label".split(" "));
          const bad = [];
          for (const attack of attacks) {
            for (const isWhole of [true, false]) {
              place.replaceChildren();
              const view = new MarkdownView(place);
              for (let end = isWhole ? attack.length : 1; end <= Math.min(attack.length, 300); end += 7) {
                view.update(attack.slice(0, end));
              }
              view.update(attack, true);
              for (const element of place.querySelectorAll("*")) {
                const attributes = element.getAttributeNames();
                if (!tags.has(element.tagName) || attributes.some((name) => !names.has(name))) {
                  bad.push([attack, element.tagName, attributes]);
                }
                if (element.href && !/^(https?|mailto):/.test(element.href)) {
                  bad.push([attack, element.href]);
                }
                if (element.href && new URL(element.href).host === location.host) {
                  bad.push([attack, element.href]);
                }
              }
              for (const element of place.querySelectorAll("a, button")) {
                element.addEventListener("click", (event) => event.preventDefault());
                element.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
              }
            }
          }
          place.remove();
          return { bad, attacked: typeof window.attacked === "number" };
        }""",
        list_attacks(),
    )
    assert found == {"bad": [], "attacked": False}


def test_markdown_becomes_elements(page: Any) -> None:
    text = (
        "# Title\n\n1. *one*\n2. two\n\n```python\nx < 1\n```\n\n| a | b |\n|:-|-:|\n| 1 | 2 |\n\n<https://example.com>"
    )
    found = page.evaluate(
        """async (text) => {
          const { MarkdownView } = await import("./web_ui/markdown.js");
          const place = document.createElement("div");
          const view = new MarkdownView(place);
          view.update(text.slice(0, 20));
          const first = place.firstChild;
          view.update(text);
          const wanted = ["h3", "ol > li > span > em", "li > span", "pre > code", "th.left", "td.right"];
          return {
            missing: wanted.filter((selector) => !place.querySelector(selector)),
            kept: place.firstChild === first,
            code: place.querySelector("pre").textContent,
            link: place.querySelector("a").outerHTML,
          };
        }""",
        text,
    )
    link = '<a href="https://example.com/" target="_blank" rel="noopener noreferrer nofollow">https://example.com</a>'
    assert found == {"missing": [], "kept": True, "code": "x < 1", "link": link}


def test_adapters_come_and_go(page: Any) -> None:
    ids = ["demo", "one"]

    def answer(route: Any) -> None:
        route.fulfill(json={"object": "list", "data": [{"id": name, "object": "model"} for name in ids]})

    page.route("**/v1/models", answer)
    options = page.get_by_label("Model", exact=True).locator("option")
    expect(options).to_have_text(["demo", "one"])
    page.get_by_label("Model", exact=True).select_option("one")
    ids[:] = ["demo", "two", "one"]
    expect(options).to_have_text(["demo", "two", "one"])
    expect(page.get_by_label("Model", exact=True)).to_have_value("one")
    ids.remove("one")
    expect(page.get_by_label("Model", exact=True)).to_have_value("demo")


@pytest.mark.parametrize("prefix", ["serve_llm_", "vllm:", "my_", ""])
def test_metrics_with_any_prefix(page: Any, prefix: str) -> None:
    text = f'{prefix}num_requests_running{{engine="0"}} 2\n{prefix}generation_tokens_total{{engine="0"}} 7\n'
    read = "import('./web_ui/metrics.js').then(({ Scrape }) => new Scrape(text).sum('generation_tokens_total'))"
    assert page.evaluate(f"(text) => {read}", text) == 7


def test_reasoning_tool_calls_and_probabilities(page: Any) -> None:
    top = [{"token": "3", "logprob": -0.1}, {"token": "4", "logprob": -2.5}]
    pairs = (("3", -0.1), ("!", 0.0))
    logprobs = {"content": [{"token": text, "logprob": p, "top_logprobs": top} for text, p in pairs]}
    bodies = make_up(
        page,
        "v1/chat/completions",
        [
            make_delta(reasoning="I need to "),
            make_delta(reasoning="add."),
            make_delta(tool_calls=[{"index": 0, **CALL}]),
            make_delta("tool_calls"),
        ],
        [make_delta(content="3!", logprobs=logprobs), make_delta("stop")],
    )
    page.get_by_text("More", exact=True).click()
    page.get_by_label("Tools of the chat").fill("[")
    page.get_by_label("Message", exact=True).fill("What is 1 + 2?")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert")).to_contain_text("Tools of the chat is not JSON")
    tools = [{"type": "function", "function": {"name": "add"}}]
    page.get_by_label("Tools of the chat").fill(json.dumps(tools))
    page.get_by_label("JSON schema of the answer").fill('{"type": "integer"}')
    page.get_by_label("Token probabilities").check()
    page.get_by_role("button", name="Send").click()

    conversation = page.get_by_role("log", name="Conversation")
    expect(conversation.get_by_role("heading", name="Call of add")).to_be_visible()
    expect(conversation).to_contain_text('"b": 2')
    page.get_by_label("Result of add").fill("three")
    page.get_by_role("button", name="Send results").click()
    expect(conversation.locator("article").last).to_contain_text("3")
    conversation.get_by_text("Token probabilities").click()
    page.get_by_role("option", name="3").click()
    expect(conversation.get_by_role("table")).to_contain_text("8.2 %")
    page.keyboard.press("ArrowRight")
    expect(conversation.get_by_role("table")).to_contain_text("100 %")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    conversation.get_by_role("button", name="Copy the answer").last.click()
    expect(conversation.get_by_text("Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "3!"

    first, second = bodies
    schema = {"name": "answer", "schema": {"type": "integer"}, "strict": True}
    assert first["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert first["tools"] == tools and (first["logprobs"], first["top_logprobs"]) == (True, 5)
    assert second["messages"][1:] == [
        {"role": "assistant", "content": None, "reasoning": "I need to add.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call-1", "content": "three"},
    ]
    with_calls = conversation.locator("details").first
    assert with_calls.get_attribute("open") is None, "reasoning is folded"


def test_a_completion_can_be_appended_and_continued(server: PageServer, page: Any) -> None:
    server.answer = " = 1\ny = 2\n"
    page.get_by_role("tab", name="Chat").press("ArrowRight")
    page.get_by_label("Max tokens").fill("6")
    page.get_by_label("Token probabilities").check()
    prompt = page.get_by_label("Text", exact=True)
    for _ in range(2):
        asked = prompt.input_value() or "x"
        prompt.fill(asked)
        prompt.press("Control+Enter")
        wait_until(lambda: server.engine.open)
        assert server.read_prompt().endswith(asked)
        server.step(6)
        expect(page.locator("#completion-note")).to_contain_text("6 tokens")
        page.locator("#continuation-tokens summary").click()
        expect(page.locator("#continuation-tokens").get_by_role("option")).to_have_count(6)
        page.get_by_role("button", name="Append to the text").click()
    assert prompt.input_value().startswith("x = 1\n")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everyone_can_use_it(server: PageServer, page: Any, scheme: str) -> None:
    """axe-core finds nothing serious in any view, and a phone's width needs no horizontal scrolling."""
    page.emulate_media(color_scheme=scheme)
    answer = "## Head\n\n- `code` and [a link](https://example.com)\n\n```python\nx = 1\n```\n\n| a |\n|---|\n| b |\n"
    top = [{"token": "a", "logprob": -0.1}]
    logprobs = {"content": [{"token": one, "logprob": -3.0, "top_logprobs": top} for one in ("a", "b", "c")]}
    call = make_delta(tool_calls=[{"index": 0, **CALL}])
    make_up(page, "v1/chat/completions", [make_delta(content=answer, reasoning="hm", logprobs=logprobs), call])
    page.get_by_label("Message", exact=True).fill("hello")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    for summary in page.locator("summary").all():
        summary.click()
    page.get_by_role("option").first.click()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Max tokens").fill("100000")
    page.unroute_all()
    page.get_by_label("Message", exact=True).fill("refused")
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.get_by_role("alert")).to_be_visible()
    expect(page.get_by_label("API key")).to_be_visible()
    for name in ("Chat", "Completion", "Status", "API"):
        page.get_by_role("tab", name=name).click()
        expect(page.get_by_role("tabpanel", name=name)).to_be_visible()
        if name == "API":
            page.get_by_text("POST /v1/chat/completions", exact=True).click()
            expect(page.get_by_role("table", name="Fields of the body")).to_contain_text("temperature")
        for size in (PHONE, {"width": 1280, "height": 800}):
            page.set_viewport_size(size)
            assert page.evaluate("document.scrollingElement.scrollWidth") <= size["width"], (name, size)
            assert find_serious(page) == [], (name, size)


def test_serious_issues_are_found(page: Any) -> None:
    page.evaluate("document.getElementById('message-help').style.color = '#eee'")
    page.evaluate("document.querySelector('label[for=message]').remove()")
    assert {rule for rule, _ in find_serious(page)} >= {"color-contrast", "label"}
