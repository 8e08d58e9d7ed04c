"""The reply without streaming: the fold of a generation's deltas as one JSON object."""

from __future__ import annotations

import msgspec

from serve_llm.server.reply.delta import Delta, TokenCounts
from serve_llm.server.reply.shape import Head, Shape, usage_of
from serve_llm.server.reply.slices import Turns, choice_fields


async def body(shape: Shape, head: Head, deltas: list[Delta], counts: TokenCounts) -> bytes:
    """`deltas`: one per choice, each with everything."""
    turns = Turns()
    reply = shape.reply(head, usage_of(counts)).model_dump(exclude_unset=True)
    reply["choices"] = [await choice_fields(shape.choice, delta, turns) for delta in deltas]
    return msgspec.json.encode(reply)
