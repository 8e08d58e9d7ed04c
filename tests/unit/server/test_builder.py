"""Bodies and events with long lists of logprobs: for each choice, the contents of the deltas."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from serve_llm.common.types import FinishReason, Sampling, TokenLogprobs
from serve_llm.server.generate.delta import Delta, TokenCounts, TokenEntry
from serve_llm.server.prompt.job_results import ValidGenerateRequest
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.validate import TextRequest
from serve_llm.server.response.builder import ChatBuilder, CompletionBuilder, ResponseBuilder, ResponseMeta
from serve_llm.server.response.sse import SSEEncoder
from serve_llm.server.sampling_params import SamplingParams
from serve_llm.server.schema.chat import ChatCompletion, ChatEvent
from serve_llm.server.schema.completions import Completion

META = ResponseMeta(id="x", created=1, model="m", system_fingerprint="f")
SCHEMAS: dict[type[ResponseBuilder], tuple[type[BaseModel], type[BaseModel]]] = {
    CompletionBuilder: (Completion, Completion),
    ChatBuilder: (ChatCompletion, ChatEvent),
}
COUNTS = TokenCounts(prompt=1, completion=1, cached=0)


def logprobs(number: int) -> TokenLogprobs:
    return TokenLogprobs(-0.1 * number, number, list(range(number, number + 20)), [-0.01 * k for k in range(20)])


def build_delta(num_entries: int, num_prompt: int, index: int) -> Delta:
    entries = [TokenEntry(300 + at % 99, None if at == 0 else logprobs(at), 2 * at) for at in range(num_entries)]
    prompt = [logprobs(at) for at in range(1, num_prompt)] if num_prompt else None
    return Delta(index, "text", [5, 6], entries, True, FinishReason.LENGTH, None, prompt)


def create_builder(kind: type[ResponseBuilder], model: ServedModel, num_prompt: int) -> ResponseBuilder:
    params = SamplingParams(n=2, logprobs=20, prompt_logprobs=20 if num_prompt else None)
    prompt = [300 + at % 99 for at in range(num_prompt or 1)]
    request = TextRequest(prompts=[prompt], samplings=[Sampling(max_tokens=1, seed=0)], params=params)
    parsed = ValidGenerateRequest(request=request, model="m", include_usage=True, return_token_ids=True)
    return kind(model.tokenizer, parsed, META)


@pytest.mark.parametrize("kind", [CompletionBuilder, ChatBuilder])
@pytest.mark.parametrize(("num_entries", "num_prompt"), [(0, 0), (3, 3), (300, 0), (0, 300), (200, 131)])
def test_body_and_events_hold_what_the_deltas_hold(
    model: ServedModel, kind: type[ResponseBuilder], num_entries: int, num_prompt: int
) -> None:
    builder = create_builder(kind, model, num_prompt)
    deltas = [build_delta(num_entries, num_prompt, index) for index in range(2)]
    body = json.loads(builder.build_body(deltas, COUNTS))
    body_schema, event_schema = SCHEMAS[kind]
    assert body_schema.model_validate(body, strict=True).model_dump(exclude_unset=True) == body
    lines = SSEEncoder(builder).encode(deltas, None).decode().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    for event in events:
        assert event_schema.model_validate(event, strict=True).model_dump(exclude_unset=True) == event
    choices = [event["choices"][0] for event in events if "finish_reason" in event["choices"][0]]
    choices = [choice for choice in choices if choice["finish_reason"] is not None]
    assert all(event["usage"] is None for event in events) and body["usage"]["total_tokens"] == 2
    firsts = [next(one for one in events if one["choices"][0]["index"] == index) for index in range(2)]
    for index, (whole, event) in enumerate(zip(body["choices"], choices, strict=True)):
        assert whole["index"] == event["index"] == index
        for name in ("finish_reason", "logprobs", "token_ids"):
            assert whole[name] == event[name], name
        about_prompt, event_prompt = (body, firsts[index]) if kind is ChatBuilder else (whole, event)
        assert about_prompt["prompt_token_ids"] == event_prompt["prompt_token_ids"]
        assert about_prompt.get("prompt_logprobs") == event_prompt.get("prompt_logprobs")
        shown = whole["logprobs"]["content" if kind is ChatBuilder else "tokens"]
        assert len(shown) == max(0, num_entries - (kind is ChatBuilder))
        if num_prompt:
            assert about_prompt["prompt_logprobs"][0] is None and len(about_prompt["prompt_logprobs"]) == num_prompt
            assert all("300" in one or len(one) >= 20 for one in about_prompt["prompt_logprobs"][1:])
