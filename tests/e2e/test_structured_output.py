"""Structured output through whole processes: the official client, the offline class, several engines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from serve_llm import LLM, SamplingParams, StructuredOutputs
from serve_llm.server.http.errors import InvalidRequest
from support.daemon import Daemon
from support.grammars import SCHEMA
from support.matrix import mostly_slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "structured_output.py"
TALK = [{"role": "user", "content": "Tell me."}]


class Step(BaseModel):
    what: str = Field(max_length=12)
    minutes: int = Field(ge=1, le=60)


class Plan(BaseModel):
    title: str = Field(max_length=12)
    steps: list[Step] = Field(max_length=2)
    note: str | None = Field(max_length=5)


def test_official_client(server: Daemon) -> None:
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        how = {"model": "demo", "messages": TALK, "seed": 3}
        parsed = client.chat.completions.parse(response_format=Plan, **how).choices[0]
        assert parsed.finish_reason == "stop" and isinstance(parsed.message.parsed, Plan)
        with client.chat.completions.stream(response_format=Plan, **how) as stream:
            for _ in stream:
                pass
            assert stream.get_final_completion().choices[0].message.parsed == parsed.message.parsed
        whole = client.chat.completions.create(response_format={"type": "json_object"}, max_tokens=600, n=2, **how)
        for choice in whole.choices:
            if choice.finish_reason == "stop":
                assert isinstance(json.loads(choice.message.content), dict)
        with pytest.raises(openai.BadRequestError) as caught:
            schema = {"name": "x", "schema": {"properties": {"a": {"not": {"format": "date"}}}}}
            client.chat.completions.create(response_format={"type": "json_schema", "json_schema": schema}, **how)
        assert caught.value.param == "response_format.json_schema.schema" and "#/properties/a: not" in str(caught.value)
        with pytest.raises(openai.APIError, match="no token is left"):
            body = {"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [5]}
            client.chat.completions.create(extra_body=body, **how)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_stop_strings(server: Daemon, stream: bool) -> None:
    word = {"structured_outputs": {"regex": "[a-z]{6}END[a-z]{6}"}}
    how = {"model": "demo", "prompt": "def f(", "seed": 5, "logprobs": 1, "stream": stream, "extra_body": word}
    with OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

        def complete(**more: Any) -> tuple[str, str, list[str]]:
            found = client.completions.create(**how, **more)
            choices = [answer.choices[0] for answer in (found if stream else [found]) if answer.choices]
            tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
            return "".join(choice.text for choice in choices), choices[-1].finish_reason, tokens

        whole, reason, tokens = complete(max_tokens=99)
        assert re.fullmatch("[a-z]{6}END[a-z]{6}", whole) and reason == "stop" and "".join(tokens) == whole
        text, reason, tokens = complete(max_tokens=99, echo=True)
        assert (text, reason, "".join(tokens)) == ("def f(" + whole, "stop", text)
        assert complete(max_tokens=99, stop=["END"])[:2] == (whole[:6], "stop")
        assert complete(max_tokens=99, stop=["END"], echo=True)[:2] == ("def f(" + whole[:6], "stop")
        assert complete(max_tokens=2)[1] == "length"


def test_example(server: Daemon) -> None:
    command = [sys.executable, "-P", str(EXAMPLE), server.url + "/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"takes \d+ minutes and is (easy|medium|hard)", done.stdout)
    assert re.search(r"-> (yes|no)\n", done.stdout) and re.search(r"-> \d{4}-\d{2}-\d{2}\n", done.stdout)


@pytest.mark.slow
@pytest.mark.pairs("grammar + n", "grammar + DP", "int4 + DP", "DP + embeddings")
def test_offline_over_two_engines() -> None:
    params = [
        SamplingParams(
            structured_outputs=StructuredOutputs(json=SCHEMA), max_tokens=300, temperature=1.5, seed=number, n=2
        )
        for number in range(100)
    ]
    prompts = [f"# {number}\nimport os\n" for number in range(100)]
    embeds = {"runner": "generate", "convert": "embed"}
    with LLM("demo", kv_cache_memory="64MiB", data_parallel_size=2, quantization="int4", **embeds) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        vectors = [output.outputs.embedding for output in llm.embed(["def f():"] * 4, use_tqdm=False)]
        assert vectors == [vectors[0]] * 4
        with pytest.raises(InvalidRequest, match="uniqueItems"):
            llm.generate("x", SamplingParams(structured_outputs=StructuredOutputs(json={"uniqueItems": True})))
        message = [{"role": "user", "content": "x"}]
        chosen = SamplingParams(structured_outputs=StructuredOutputs(choice=["left", "right"]))
        assert llm.chat(message, chosen, use_tqdm=False)[0].outputs[0].text in ("left", "right")
    choices = [choice for output in outputs for choice in output.outputs]
    complete = [choice for choice in choices if choice.finish_reason == "stop"]
    assert len(complete) > 180
    for choice in complete:
        jsonschema.validate(json.loads(choice.text), SCHEMA)


@pytest.mark.pairs("grammar + TP")
@pytest.mark.pairs("grammar + PP", "PP + DP", slow=True)
@pytest.mark.parametrize(
    "how",
    mostly_slow(
        [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "data_parallel_size": 2}],
        [{"tensor_parallel_size": 2}],
    ),
    ids=str,
)
def test_ranks_in_processes(how: dict[str, int]) -> None:
    schema = StructuredOutputs(json=SCHEMA)
    params = [SamplingParams(structured_outputs=schema, max_tokens=300, seed=number) for number in range(24)]
    with LLM("demo", kv_cache_memory="64MiB", **how) as llm:
        outputs = llm.generate(["import os\n"] * 24, params, use_tqdm=False)
    complete = [output.outputs[0].text for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert len(complete) > 20
    for text in complete:
        jsonschema.validate(json.loads(text), SCHEMA)
