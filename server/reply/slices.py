"""Long lists of log-probabilities as JSON, a slice at a time, so that other streams have their turn in between.

A request may ask for millions of them, and the event loop stands still while they are written. Knows the shapes' fields
that may be long, not the transport.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from pydantic import BaseModel

from serve_llm.server.reply.delta import Delta

POSITIONS = 64  # of a slice: with 20 log-probabilities each, about 2 ms
TURN_SECONDS = 0.002

Fields = dict[str, Any]


class Turns:
    """Lets others run every now and then: `await turns.pause()`."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def pause(self) -> None:
        if time.perf_counter() - self._began > TURN_SECONDS:
            await asyncio.sleep(0)
            self._began = time.perf_counter()


def is_long(delta: Delta) -> bool:
    return len(delta.entries) > POSITIONS or len(delta.prompt_logprobs or ()) > POSITIONS


async def choice_fields(make: Callable[[Delta], BaseModel], delta: Delta, turns: Turns) -> Fields:
    """One choice, as `make` shapes it, for msgspec to write; its long lists are JSON already."""
    whole: Fields = {}
    pieces: dict[tuple[str, ...], list[msgspec.Raw]] = {}
    for part in _slices(delta):
        fields = make(part).model_dump(exclude_unset=True)
        for path, values in _long_lists(fields):
            found = pieces.setdefault(path, [])
            if values:
                found.append(msgspec.Raw(msgspec.json.encode(values)[1:-1]))
        whole = whole or fields
        await turns.pause()
    for (*holders, name), found in pieces.items():
        holder = whole
        for key in holders:
            holder = holder[key]
        holder[name] = found  # the encoder puts brackets around them, and commas between
    return whole


def _slices(delta: Delta) -> Iterator[Delta]:
    """The same in several deltas; all but log-probabilities stands in the first."""
    prompt = delta.prompt_logprobs
    yield msgspec.structs.replace(
        delta, entries=delta.entries[:POSITIONS], prompt_logprobs=None if prompt is None else prompt[:POSITIONS]
    )
    empty = msgspec.structs.replace(delta, text="", token_ids=[], first=False)
    for start in range(POSITIONS, max(len(delta.entries), len(prompt or ())), POSITIONS):
        span = slice(start, start + POSITIONS)
        yield msgspec.structs.replace(
            empty,
            entries=delta.entries[span],
            prompt_logprobs=None if prompt is None else prompt[span],
            prompt_start=delta.prompt_start + start,
        )


def _long_lists(fields: Fields) -> Iterator[tuple[tuple[str, ...], list[object]]]:
    """(path, values) of each list that is as long as the tokens whose log-probabilities were asked for."""
    logprobs = fields.get("logprobs")
    for name, values in logprobs.items() if logprobs else ():
        yield ("logprobs", name), values
    if fields.get("prompt_logprobs") is not None:
        yield ("prompt_logprobs",), fields["prompt_logprobs"]
