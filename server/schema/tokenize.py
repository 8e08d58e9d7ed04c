"""POST /tokenize and /detokenize, GET /tokenizer_info: requests and replies."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from serve_llm.common.options.limits import Limits
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.prompt.chat_turn import ChatTurn
from serve_llm.server.sampling_params import SamplingParams
from serve_llm.server.schema.chat import Messages, TemplateBody
from serve_llm.server.schema.common import Ids, RequestBody


class TokenizeRequest(TemplateBody):
    """Either a prompt or chat messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(default=None, description="True for a prompt, false for messages.")
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("exactly one of prompt and messages is required", "prompt")

    def to_turn(self, limits: Limits) -> ChatTurn:
        """Build the turn for the messages. Raises InvalidRequest, Unsupported."""
        return self.build_turn(self.messages or [], SamplingParams(), limits)


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(description="The tokens as the vocabulary writes them, if asked for.")


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: Ids


class DetokenizeReply(BaseModel):
    prompt: str


class TokenizerInfo(BaseModel):
    """The named tokens of tokenizer_config.json (bos_token, eos_token, ...) are additional fields."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    tokenizer_class: str | None
    chat_template: str | None
    model_max_length: int = Field(description="The context length that the server was started with.")
    added_tokens: dict[str, int] = Field(description="Ids of the tokens beside the vocabulary.")
