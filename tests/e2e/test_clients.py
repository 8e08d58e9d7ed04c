"""Agent clients and frameworks, each with the calls of its quickstart; those that are not installed are skipped.

The extra `clients` installs them all, with uv in seconds. The demo model does not know tools, so calls are required.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict, Field

from support.daemon import Daemon
from support.tools import write_files

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # from the clients
SUITES = Path(__file__).parents[1] / "support" / "langchain_suites.py"
QUESTION = "The weather in Oslo, please."


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=7)


class OpenWeather(Weather):
    """Weather with properties of any name in addition to the known ones."""

    model_config = ConfigDict(extra="ignore")


class Sky(BaseModel):
    """The weather without limits on lengths and numbers, which Anthropic's client removes from a schema."""

    sky: Literal["rain", "sun"]
    city: Literal["Oslo", "Rome"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    template = write_files(tmp_path_factory.mktemp("tools"))["--chat-template"]
    options = ("--chat-template", template, "--dialect", "hermes", "--runner", "generate", "--convert", "embed")
    with Daemon("demo", *options) as daemon:
        yield daemon.wait_until_serving() + "/v1"


@pytest.mark.parametrize("route", ["chat", "responses"])
def test_openai_agents(url: str, route: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none")
    kind = agents.OpenAIChatCompletionsModel if route == "chat" else agents.OpenAIResponsesModel
    asked: list[str] = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "rain"

    agent = agents.Agent(
        name="forecaster",
        instructions="Answer briefly.",
        model=kind("demo", openai_client=client),
        tools=[agents.function_tool(get_weather)],
        tool_use_behavior="stop_on_first_tool",
        model_settings=agents.ModelSettings(tool_choice="required", max_tokens=600, parallel_tool_calls=False),
    )
    assert agents.Runner.run_sync(agent, QUESTION).final_output == "rain" and asked

    async def stream() -> list[str]:
        running = agents.Runner.run_streamed(agent, QUESTION)
        return [event.type async for event in running.stream_events()]

    assert "run_item_stream_event" in asyncio.run(stream())
    typed = agents.Agent(name="typed", model=kind("demo", openai_client=client), output_type=Weather)
    assert isinstance(agents.Runner.run_sync(typed, QUESTION).final_output, Weather)


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain_openai(url: str, use_responses_api: bool) -> None:
    langchain = pytest.importorskip("langchain_openai")
    # At temperature 0, because one in seven sampled replies in JSON without a schema does not end within the limit.
    model = langchain.ChatOpenAI(
        base_url=url, api_key="none", model="demo", max_tokens=400, temperature=0, use_responses_api=use_responses_api
    )
    assert model.invoke("Hello").content and list(model.stream("Hello"))
    forced = model.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)
    (call,) = forced.invoke(QUESTION).tool_calls
    Weather.model_validate(call["args"])
    whole = None
    for chunk in forced.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    Weather.model_validate(whole.tool_calls[0]["args"])
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Weather, method=method).invoke(QUESTION), Weather)
    found = model.with_structured_output(None, method="json_mode", include_raw=True).invoke("JSON, please.")
    assert found["parsed"] is None or isinstance(found["parsed"], dict)


def test_langchain_suites(url: str) -> None:
    for name in ("langchain_tests", "langchain_openai", "langchain_anthropic"):
        pytest.importorskip(name)
    options = ["-c", os.devnull, "-p", "no:cacheprovider", "--import-mode=importlib", "-o", "asyncio_mode=auto"]
    for kind in ("test", "fixture"):
        options += ["-o", f"asyncio_default_{kind}_loop_scope=session"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-q", SUITES],
        env={**os.environ, "CLIENTS_URL": url.removesuffix("/v1")},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor(url: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(OpenAI(base_url=url, api_key="none"), mode=instructor.Mode[mode])
    how: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 400}
    assert isinstance(client.chat.completions.create(response_model=Weather, **how), Weather)
    *_, last = client.chat.completions.create_partial(response_model=Weather, **how)
    Weather.model_validate(last.model_dump())


def test_pydantic_ai(url: str) -> None:
    ai = pytest.importorskip("pydantic_ai")
    models = pytest.importorskip("pydantic_ai.models.openai")
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=url, api_key="none")
    for kind in (models.OpenAIChatModel, models.OpenAIResponsesModel):
        model = kind("demo", provider=provider)
        assert ai.Agent(model).run_sync(QUESTION, model_settings={"max_tokens": 20}).output
        for output in (Weather, ai.NativeOutput(Weather)):
            result = ai.Agent(model, output_type=output).run_sync(QUESTION, model_settings={"max_tokens": 400})
            assert isinstance(result.output, Weather)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(url: str, provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    # To servers other than OpenAI's, LiteLLM sends schemas without `additionalProperties`. At temperature 0, because
    # one in seven sampled replies to such a schema does not end within the limit.
    weather = Weather if provider == "openai" else OpenWeather
    how: dict[str, Any] = {
        "model": f"{provider}/demo",
        "api_base": url,
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 400,
        "temperature": 0,
    }
    assert litellm.completion(**how).choices[0].message.content
    assert list(litellm.completion(stream=True, **how))
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": Weather.model_json_schema()}}
    forced = {"tools": [tool], "tool_choice": "required"}
    called = litellm.completion(**forced, **how).choices[0].message.tool_calls
    weather.model_validate_json(called[0].function.arguments)
    events = list(litellm.completion(stream=True, **forced, **how))
    whole = litellm.stream_chunk_builder(events).choices[0].message.tool_calls
    weather.model_validate_json(whole[0].function.arguments)
    typed = litellm.completion(response_format=Weather, **how).choices[0].message.content
    weather.model_validate_json(typed)


def test_langchain_anthropic(url: str) -> None:
    langchain = pytest.importorskip("langchain_anthropic")
    model = langchain.ChatAnthropic(base_url=url.removesuffix("/v1"), api_key="none", model="demo", max_tokens=400)
    assert model.invoke("Hello").content and list(model.stream("Hello"))
    forced = model.bind_tools([Weather], tool_choice="any")
    Weather.model_validate(forced.invoke(QUESTION).tool_calls[0]["args"])
    whole = None
    for chunk in forced.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    Weather.model_validate(whole.tool_calls[0]["args"])
    assert isinstance(model.with_structured_output(Weather, method="function_calling").invoke(QUESTION), Weather)
    assert isinstance(model.with_structured_output(Sky, method="json_schema").invoke(QUESTION), Sky)


def test_llama_index(url: str) -> None:
    llms = pytest.importorskip("llama_index.core.llms")
    tools = pytest.importorskip("llama_index.core.tools")
    like = pytest.importorskip("llama_index.llms.openai_like")
    model = like.OpenAILike(
        model="demo",
        api_base=url,
        api_key="none",
        max_tokens=400,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    talk = [llms.ChatMessage(role="user", content=QUESTION)]
    assert model.chat(talk).message.content and list(model.stream_chat(talk))

    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    tool = tools.FunctionTool.from_defaults(fn=get_weather)
    answer = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    calls = model.get_tool_calls_from_response(answer)
    assert calls and all(tool.fn(**call.tool_kwargs) for call in calls)
    assert isinstance(model.as_structured_llm(Weather).chat(talk).raw, Weather)


def test_openai_responses(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    how: dict[str, Any] = {"model": "demo", "input": QUESTION, "max_output_tokens": 400, "temperature": 0}
    parsed = client.responses.parse(text_format=Weather, **how)
    assert isinstance(parsed.output_parsed, Weather)
    with client.responses.stream(text_format=Weather, **how) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    schema = {"type": "json_schema", "name": "weather", "schema": Weather.model_json_schema()}
    written = client.responses.create(text={"format": schema}, **how)
    assert Weather.model_validate_json(written.output_text) == parsed.output_parsed
    tool: Any = pydantic_function_tool(Weather, name="get_weather")["function"]
    forced: dict[str, Any] = {"tools": [{"type": "function", **tool}], "tool_choice": "required"}
    called = client.responses.create(parallel_tool_calls=False, **forced, **how)
    (call,) = [item for item in called.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)
    events = list(client.responses.create(parallel_tool_calls=False, stream=True, **forced, **how))
    last: Any = events[-1]
    assert [item.type for item in last.response.output] == [item.type for item in called.output]
    answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    talk: Any = [{"role": "user", "content": QUESTION}, *called.output, answer]
    assert client.responses.create(**{**how, "input": talk, "max_output_tokens": 20}).output_text


def test_langchain_embeddings(url: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.OpenAIEmbeddings(base_url=url, api_key="none", model="demo", check_embedding_ctx_length=False)
    one, other = model.embed_documents(["a text", "another"])
    assert model.embed_query("a text") == pytest.approx(one, abs=1e-4) and one != other


def test_llama_index_embeddings(url: str) -> None:
    like = pytest.importorskip("llama_index.embeddings.openai_like")
    model = like.OpenAILikeEmbedding(model_name="demo", api_base=url, api_key="none")
    one, other = model.get_text_embedding_batch(["a text", "another"])
    assert model.get_text_embedding("a text") == pytest.approx(one, abs=1e-4) and one != other


def test_cohere_reranks(url: str) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(base_url=url.removesuffix("/v1"), api_key="none")
    found = client.rerank(model="demo", query="import os", documents=["x = 1", "import os"], top_n=1)
    assert [result.index for result in found.results] == [1]


def test_cohere_embeds(url: str) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(base_url=url.removesuffix("/v1"), api_key="none")
    types = ["float", "ubinary"]
    found = client.embed(model="demo", texts=["a", "b"], input_type="search_document", embedding_types=types)
    assert len(found.embeddings.float_) == len(found.embeddings.ubinary) == 2 and found.texts == ["a", "b"]


def test_litellm_takes_claude_codes_requests(url: str) -> None:
    litellm = pytest.importorskip("litellm")
    tool = {"name": "get_weather", "description": "Weather.", "input_schema": Weather.model_json_schema()}
    body: dict[str, Any] = {
        "model": "hosted_vllm/demo",
        "api_base": url,
        "api_key": "none",
        "max_tokens": 400,
        "messages": [{"role": "user", "content": QUESTION}],
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "thinking": {"type": "adaptive", "display": "summarized"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user"},
        "temperature": 0,
    }
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    assert asyncio.run(litellm.anthropic_messages(**body, tools=[tool]))["content"]
    for choice in ({"type": "tool", "name": "web_search"}, {"type": "auto"}):
        assert asyncio.run(litellm.anthropic_messages(**body, tools=[search], tool_choice=choice))["content"]
    format = {"type": "json_schema", "schema": Sky.model_json_schema() | {"additionalProperties": False}}
    typed = asyncio.run(litellm.anthropic_messages(**{**body, "output_config": {"format": format}}))
    Sky.model_validate_json(typed["content"][-1]["text"])
