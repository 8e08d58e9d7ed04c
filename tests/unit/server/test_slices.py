"""Long lists of log-probabilities are written in slices: the same JSON, and others have their turn in between."""

from __future__ import annotations

import asyncio
import json

import pytest

from serve_llm.engine.types import FinishReason, Sampling, TokenLogprobs
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.params import SamplingParams
from serve_llm.server.prompt.validate import TextRequest
from serve_llm.server.reply.body import body
from serve_llm.server.reply.delta import Delta, TokenCounts, TokenEntry
from serve_llm.server.reply.shape import ChatShape, CompletionShape, Head
from serve_llm.server.reply.sse import Events

HEAD = Head(id="x", created=1, model="m", system_fingerprint="f")
COUNTS = TokenCounts(prompt=1, completion=1, cached=0)
AnyShape = CompletionShape | ChatShape
SHAPES = (CompletionShape, ChatShape)


def logprobs(number: int) -> TokenLogprobs:
    return TokenLogprobs(-0.1 * number, number, list(range(number, number + 20)), [-0.01 * k for k in range(20)])


def delta(num_entries: int, num_prompt: int, index: int = 0) -> Delta:
    entries = [TokenEntry(300 + at % 99, None if at == 0 else logprobs(at), 2 * at) for at in range(num_entries)]
    prompt = [logprobs(at) for at in range(1, num_prompt)] if num_prompt else None
    return Delta(index, "text", [5, 6], entries, True, FinishReason.LENGTH, None, prompt)


def shape_of(kind: type[AnyShape], model: ServedModel, num_prompt: int) -> CompletionShape | ChatShape:
    params = SamplingParams(n=2, logprobs=20, prompt_logprobs=20 if num_prompt else None)
    prompt = [300 + at % 99 for at in range(num_prompt or 1)]
    request = TextRequest(prompts=[prompt], samplings=[Sampling(max_tokens=1, seed=0)], params=params)
    return kind(model.tokenizer, request, True)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    ("num_entries", "num_prompt"), [(0, 0), (3, 3), (64, 65), (65, 66), (300, 0), (0, 300), (200, 131)]
)
def test_slices_are_the_whole(model: ServedModel, kind: type[AnyShape], num_entries: int, num_prompt: int) -> None:
    shape = shape_of(kind, model, num_prompt)
    deltas = [delta(num_entries, num_prompt, index) for index in range(2)]
    found = json.loads(asyncio.run(body(shape, HEAD, deltas, COUNTS)))
    assert found["choices"] == [json.loads(shape.choice(one).model_dump_json(exclude_unset=True)) for one in deltas]
    events = Events(shape, HEAD, include_usage=True, continuous_usage=False)
    sent = asyncio.run(events.encode([deltas[0]], None)).decode().split("\n\n")
    event = shape.event(HEAD, deltas[0])
    event.usage = None
    assert json.loads(sent[-2].removeprefix("data: ")) == json.loads(event.model_dump_json(exclude_unset=True))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("streams", [False, True])
def test_others_have_their_turn(model: ServedModel, kind: type[AnyShape], streams: bool) -> None:
    shape, turns = shape_of(kind, model, 0), 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def write() -> None:
        counting = asyncio.ensure_future(count())
        if streams:
            await Events(shape, HEAD, False, False).encode([delta(3000, 0)], None)
        else:
            await body(shape, HEAD, [delta(3000, 0)], COUNTS)
        counting.cancel()

    asyncio.run(write())
    assert turns > 10
