"""LangChain's standard tests of chat models and embeddings, run against the server at CLIENTS_URL. A separate pytest
runs them (tests/e2e/test_clients.py), because they need plugins that the other tests do not have.

The demo model calls tools when forced to, but with wrong arguments and more than once; tests of these are skipped."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

NEED_SENSE = {
    "test_agent_loop",
    "test_bind_runnables_as_tools",
    "test_structured_output_pydantic_2_v1",
    "test_tool_calling",
    "test_tool_calling_async",
    "test_tool_calling_with_no_arguments",
    "test_tool_choice",
    "test_unicode_tool_call_integration",
}
URL = os.environ["CLIENTS_URL"]
MODEL = {"api_key": "none", "model": "demo", "max_tokens": 300, "temperature": 0}
OPENAI = {**MODEL, "base_url": f"{URL}/v1", "stream_usage": True}


@pytest.fixture(autouse=True)
def skip_what_needs_sense(request: pytest.FixtureRequest) -> None:
    if request.node.originalname in NEED_SENSE:
        pytest.skip("the demo model makes no sense")


class TestChat(ChatModelIntegrationTests):
    chat_model_class = ChatOpenAI
    chat_model_params: ClassVar[dict[str, Any]] = OPENAI
    supports_json_mode = False


class TestResponses(TestChat):
    chat_model_params: ClassVar[dict[str, Any]] = {**OPENAI, "use_responses_api": True}


class TestMessages(TestChat):
    chat_model_class = ChatAnthropic
    chat_model_params: ClassVar[dict[str, Any]] = {**MODEL, "base_url": URL}


class TestEmbeddings(EmbeddingsIntegrationTests):
    embeddings_class = OpenAIEmbeddings
    embedding_model_params: ClassVar[dict[str, Any]] = {
        "api_key": "none",
        "base_url": f"{URL}/v1",
        "check_embedding_ctx_length": False,
        "model": "demo",
    }
