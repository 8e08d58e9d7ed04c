"""The reply without streaming: the fold of a generation's deltas as one JSON object."""

from __future__ import annotations

from serve_llm.server.reply.delta import Delta, TokenCounts
from serve_llm.server.reply.shape import Head, Shape, usage_of


def body(shape: Shape, head: Head, deltas: list[Delta], counts: TokenCounts) -> bytes:
    """`deltas`: one per choice, each with everything."""
    return shape.reply(head, deltas, usage_of(counts)).model_dump_json(exclude_unset=True).encode()
