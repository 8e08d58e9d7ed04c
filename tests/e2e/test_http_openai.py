"""The official client against the real process."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from support.daemon import Daemon

CODE = "class Stack:\n    def __init__(self):\n"
TALK = [{"role": "user", "content": "Write a Python function."}]


@pytest.fixture
def client(server: Daemon) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: OpenAI, **body: object):
    return client.completions.create(**({"model": "demo", "prompt": CODE, "max_tokens": 24, "temperature": 0} | body))


def chat(client: OpenAI, **body: object):
    return client.chat.completions.create(
        **({"model": "demo", "messages": TALK, "max_tokens": 12, "temperature": 0} | body)
    )


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1, "seed": 11, "n": 3, "extra_body": {"ignore_eos": True}}]
)
def test_streamed_text_is_the_unstreamed_text(client: OpenAI, sampling: dict[str, object]) -> None:
    sampling = sampling | {"extra_body": {"ignore_eos": True}}
    whole = complete(client, **sampling)
    texts = [""] * len(whole.choices)
    for event in complete(client, **sampling, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert all(texts) and len(set(texts)) == len(texts), "choices differ from each other"
    assert whole.usage.completion_tokens == 24 * len(texts)


def test_chat_streamed_and_not(client: OpenAI) -> None:
    whole = chat(client)
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].message.content
    events = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert events[0].choices[0].delta.role == "assistant"
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == whole.choices[0].message.content
    assert events[-1].choices == [] and events[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.prompt_tokens_details is not None


def test_a_second_time_the_prompt_is_found_in_the_cache(client: OpenAI) -> None:
    prompt = "def cached(value):\n    return value\n\n\n" * 8
    first, second = (complete(client, prompt=prompt, max_tokens=1).usage for _ in range(2))
    assert second.prompt_tokens_details.cached_tokens > 0
    assert first.prompt_tokens == second.prompt_tokens


def test_a_stop_string(client: OpenAI) -> None:
    free = complete(client).choices[0].text
    stop = free[8:11]
    stopped = complete(client, stop=stop)
    assert stopped.choices[0].text == free[: free.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens <= 24


def test_logprobs(client: OpenAI) -> None:
    found = complete(client, max_tokens=6, logprobs=3).choices[0]
    assert "".join(found.logprobs.tokens) == found.text
    for token, own, top in zip(
        found.logprobs.tokens, found.logprobs.token_logprobs, found.logprobs.top_logprobs, strict=True
    ):
        assert own <= 0 and own == top[token] == max(top.values()), "greedy takes the likeliest"
    content = chat(client, max_tokens=4, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert len(content) == 4 and all(len(token.top_logprobs) == 2 for token in content)
    assert all(token.top_logprobs[0].token == token.token for token in content)


def test_echo_scores_a_prompt_as_generation_does(client: OpenAI) -> None:
    """The request is that of lm-eval's local-completions."""
    generated = complete(client, max_tokens=8, logprobs=1, extra_body={"return_token_ids": True}).choices[0]
    ids = generated.model_extra["prompt_token_ids"] + generated.model_extra["token_ids"]
    body = {"prompt": [ids], "max_tokens": 1, "echo": True, "logprobs": 1, "seed": 1234}
    scored = complete(client, **body).choices[0].logprobs
    assert scored.token_logprobs[0] is None and len(scored.token_logprobs) == len(ids) + 1
    again = scored.token_logprobs[len(ids) - 8 : len(ids)]
    assert again == pytest.approx(generated.logprobs.token_logprobs, abs=0.05)


def test_errors(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        complete(client, model="other")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as range_:
        complete(client, temperature=-1)
    assert range_.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unknown:
        complete(client, extra_body={"temprature": 1})
    assert unknown.value.param == "temprature" and "temperature" in str(unknown.value)
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, prompt=[5] * 3000)
    assert "3000" in str(long.value) and "2048" in str(long.value)
    with pytest.raises(openai.BadRequestError) as unsupported:
        chat(client, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert unsupported.value.code == "unsupported"


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_request_frees_everything(server: Daemon, stream: bool) -> None:
    async def cancel() -> None:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            body = {"model": "demo", "prompt": CODE, "max_tokens": 1900, "stream": stream}
            body["extra_body"] = {"ignore_eos": True}
            if stream:
                events = await client.completions.create(**body)
                await anext(events)
                assert await asyncio.to_thread(running, server) == 1
                await events.close()
                return
            request = asyncio.ensure_future(client.completions.create(**body))
            while await asyncio.to_thread(running, server) == 0:
                assert not request.done()
            request.cancel()
            await asyncio.wait([request])

    aborts = aborted(server)
    asyncio.run(asyncio.wait_for(cancel(), 30))
    until_idle(server)
    assert aborted(server) == aborts + 1
    assert sample(server, "kv_cache_usage_perc") == 0


def test_thirty_two_streams_at_once_equal_one_alone(client: OpenAI, server: Daemon) -> None:
    prompts = [f"def function_{number}(value):\n" for number in range(32)]
    alone = {number: complete(client, prompt=prompts[number]).choices[0].text for number in (0, 13, 31)}

    async def one(client: AsyncOpenAI, prompt: str) -> str:
        events = await client.completions.create(model="demo", prompt=prompt, max_tokens=24, temperature=0, stream=True)
        return "".join([event.choices[0].text async for event in events])

    async def every() -> list[str]:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    texts = asyncio.run(every())
    assert {number: texts[number] for number in alone} == alone
    until_idle(server)


def test_metrics_count_what_usage_says(client: OpenAI, server: Daemon) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total")
    before = [sample(server, name) for name in names]
    usages = [complete(client, n=2, temperature=1).usage, chat(client).usage]
    counted = [sample(server, name) - start for name, start in zip(names, before, strict=True)]
    assert counted == [sum(one.prompt_tokens for one in usages), sum(one.completion_tokens for one in usages)]


def sample(server: Daemon, name: str, label: str = "") -> float:
    """Return one sample of /metrics."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f"serve_llm_{name}{{") and label in line]
    return float(line.rpartition(" ")[2])


def running(server: Daemon) -> float:
    return sample(server, "num_requests_running")


def aborted(server: Daemon) -> float:
    return sample(server, "request_success_total", 'finished_reason="abort"')


def until_idle(server: Daemon) -> None:
    """Wait until the server is idle. Each query is a round trip, so this waits without sleeping."""
    deadline = time.monotonic() + 20
    while running(server) + sample(server, "num_requests_waiting"):
        assert time.monotonic() < deadline, "requests are still open"
