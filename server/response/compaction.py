"""Builds the replies of POST /v1/responses/compact."""

from __future__ import annotations

import msgspec

from serve_llm.server.dialects.pieces import ContentPiece
from serve_llm.server.generate.delta import Delta, TokenCounts
from serve_llm.server.http.errors import GenerationFailed
from serve_llm.server.prompt.items import describe_items, encrypt_text
from serve_llm.server.prompt.job_results import ValidGenerateRequest
from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.response.builder import ResponseMeta, encode_json
from serve_llm.server.response.responses import describe_usage, name_status


class CompactionBuilder:
    """Builds `schema.responses.CompactionReply`."""

    def __init__(self, tokenizer: Tokenizer, parsed: ValidGenerateRequest, meta: ResponseMeta) -> None:
        self._meta = meta
        self._kept_messages = parsed.kept_messages

    def build_body(self, deltas: list[Delta], counts: TokenCounts) -> bytes:
        """deltas: one complete delta. Raises GenerationFailed."""
        (delta,) = deltas
        name_status(delta)  # raises if it was aborted
        summary = "".join(piece.text for piece in delta.ordered_pieces if isinstance(piece, ContentPiece)).strip()
        if not summary:
            raise GenerationFailed("the model wrote no summary of the conversation")
        response_id = self._meta.id.partition("-")[2]
        kept = [msgspec.Raw(item.content) for item in describe_items(self._kept_messages, response_id)]
        compaction = {"id": f"cmp_{response_id}", "type": "compaction", "encrypted_content": encrypt_text(summary)}
        return encode_json(
            {
                "id": f"resp_{response_id}",
                "object": "response.compaction",
                "created_at": self._meta.created,
                "output": [*kept, compaction],
                "usage": describe_usage(counts),
            }
        )
