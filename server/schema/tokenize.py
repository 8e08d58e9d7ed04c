"""POST /tokenize and /detokenize: the shapes of requests and replies."""

from __future__ import annotations

from pydantic import BaseModel, Field

from serve_llm.engine.limits import Limits
from serve_llm.server.errors import InvalidRequest
from serve_llm.server.schema.chat import Messages, TemplateBody, check_number
from serve_llm.server.schema.common import Ids, RequestBody


class TokenizeRequest(TemplateBody):
    """Either a prompt or chat messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(default=None, description="True for a prompt, false for messages.")
    return_token_strs: bool | None = None

    def check(self, limits: Limits) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is required", "prompt")
        check_number(self.messages or [], limits)


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: Ids


class DetokenizeReply(BaseModel):
    prompt: str
