"""LiteLLM as a proxy in front of the server; skipped unless the extra `clients` is installed. Each of LiteLLM's
providers uses another of the server's routes."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from support.daemon import Daemon
from support.nodes import free_port
from support.tools import write_files

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
START_SECONDS = 120
KEY = f"sk-{secrets.token_hex(24)}"
SCHEMA: Any = {  # in a tool's schema, LiteLLM drops additionalProperties for hosted_vllm
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
ASK: Any = {"max_tokens": 300, "messages": [{"role": "user", "content": "The weather in Oslo, please."}]}
PROVIDERS = {"hosted_vllm": "/v1", "openai": "/v1", "anthropic": ""}
each_provider = pytest.mark.parametrize("provider", PROVIDERS)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if None in (find_spec("litellm"), find_spec("apscheduler")):  # an import would fetch prices over the network
        pytest.skip("LiteLLM is not installed, or without its proxy")
    folder = tmp_path_factory.mktemp("proxy")
    template = write_files(folder)["--chat-template"]
    options = ("--chat-template", template, "--dialect", "hermes", "--runner", "generate", "--convert", "embed")
    port = free_port()
    with Daemon("demo", *options) as daemon:
        url = daemon.wait_until_serving()
        models = [
            {"model_name": name, "litellm_params": {"model": f"{name}/demo", "api_base": url + path, "api_key": "none"}}
            for name, path in PROVIDERS.items()
        ]
        config = folder / "config.yaml"
        config.write_text(json.dumps({"model_list": models}))  # JSON is YAML
        program = Path(sys.executable).with_name("litellm")
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [program, "--config", config, "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"],
                env={**os.environ, "LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
                stdout=log,
                stderr=log,
            )
        try:
            yield _wait_until_serving(process, f"http://127.0.0.1:{port}", folder / "log")
        finally:
            process.terminate()
            process.wait()


def _wait_until_serving(process: subprocess.Popen[bytes], url: str, log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as client:  # with increasing pauses
        while time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()[-4000:]
            try:
                if client.get(f"{url}/health/liveliness").is_success:
                    return url
            except httpx.ConnectError:
                continue
    pytest.fail(log.read_text()[-4000:])


@pytest.fixture
def client(proxy: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{proxy}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@each_provider
def test_chat(client: OpenAI, provider: str) -> None:
    how: Any = {"model": provider, "temperature": 0, **ASK}
    whole = client.chat.completions.create(**how)
    assert whole.choices[0].message.content and whole.usage
    events = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **how))
    assert any(event.choices and event.choices[0].delta.content for event in events)
    assert [event.usage.completion_tokens for event in events if event.usage] == [whole.usage.completion_tokens]
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
    called = client.chat.completions.create(tools=[tool], tool_choice="required", **how).choices[0].message
    assert called.tool_calls and called.tool_calls[0].type == "function"
    assert "city" in json.loads(called.tool_calls[0].function.arguments)
    form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
    typed = client.chat.completions.create(response_format=form, **how).choices[0].message.content
    assert list(json.loads(typed or "")) == ["city"]


@each_provider
def test_responses(client: OpenAI, provider: str) -> None:
    how: Any = {"model": provider, "input": "Hello", "max_output_tokens": 16}
    assert client.responses.create(**how).output_text
    kinds = [event.type for event in client.responses.create(stream=True, **how)]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")


@each_provider
def test_messages(proxy: str, provider: str) -> None:
    with Anthropic(base_url=proxy, api_key=KEY, max_retries=0) as client:
        check_messages(client, provider)


def check_messages(client: Anthropic, provider: str) -> None:
    how: Any = {"model": provider, "extra_body": {"temperature": 0}, **ASK}
    assert client.messages.create(**how).content
    tool: Any = {"name": "get_weather", "input_schema": SCHEMA}
    with client.messages.stream(tools=[tool], tool_choice={"type": "any"}, **how) as stream:
        call = stream.get_final_message().content[0]
    assert call.type == "tool_use" and "city" in call.input


def test_embeddings_and_completions(client: OpenAI) -> None:
    assert len(client.embeddings.create(model="hosted_vllm", input=["one", "two"]).data) == 2
    assert client.completions.create(model="hosted_vllm", prompt="def ", max_tokens=4).choices[0].text
