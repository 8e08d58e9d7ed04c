"""What the jobs of requests that generate text return."""

from __future__ import annotations

import msgspec

from serve_llm.server.prompt.items import StoredItem, ToolItem
from serve_llm.server.prompt.validate import TextRequest


class ValidGenerateRequest(msgspec.Struct, kw_only=True):
    """A valid request for generated text, of any route, and what its response needs."""

    request: TextRequest
    model: str  # name for the reply
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_metrics: bool = False
    request_id: str = ""  # for the response's id
    opening_text: str = ""  # put before the content of every choice
    ignored_fields: list[str] = []  # parts of the body without effect
    echo: dict[str, object] = {}  # fields of a response that repeat the request
    tool_items: dict[str, ToolItem] = {}  # by the name that the model calls; in chat, custom tools only
    encrypts_reasoning: bool = False  # reasoning items hold an opaque copy of their text
    omits_thinking: bool = False  # thinking blocks hold their text in their signature alone
    is_cut_by_context: bool = False  # the context has no room for as many tokens as the client wants
    background: bool = False  # the client does not wait for the response
    stored_items: list[StoredItem] | None = None  # the input, where the response is to be stored
    is_compaction: bool = False  # the text is a summary of the conversation
    kept_messages: list[dict[str, object]] = []  # items that stay beside the summary
    previous_id: str | None = None  # the stored response that this one continues


class TokenCount(msgspec.Struct):
    count: int
    ignored_fields: list[str] = []
