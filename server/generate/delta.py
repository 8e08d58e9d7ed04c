"""What is new in one choice: the unit of streaming. A response without streaming is one delta per choice."""

from __future__ import annotations

import msgspec

from serve_llm.common.types import FinishReason, TokenLogprobs
from serve_llm.server.dialects.pieces import ArgumentsPiece, CallBegin, ContentPiece, Piece, ReasoningPiece
from serve_llm.server.prompt.validate import ReplyFormat


class TokenEntry(msgspec.Struct):
    """One token with its log-probabilities (None for the first token of a prompt)."""

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int  # characters of the choice's text, echoed prompt included, before this token
    is_content: bool = True  # False if the token ends the text, or is not content to the parser


class ToolCall(msgspec.Struct):
    """A complete tool call. `arguments` is JSON text, incomplete if the text was truncated."""

    id: str
    name: str
    arguments: str


class Delta(msgspec.Struct, gc=False):
    """Part of no reference cycle, so that the garbage collector need not follow one per token."""

    index: int  # the choice's index: prompt * n + k
    text: str  # content: what is neither reasoning nor a tool call
    token_ids: list[int]  # generated ids, including the one that ended the text
    entries: list[TokenEntry]  # empty unless logprobs were requested
    first: bool  # the first delta of its choice
    finish_reason: FinishReason | None = None  # set in the choice's last delta
    stop_reason: int | str | None = None  # the stop id or stop string that ended the text, if any
    prompt_logprobs: list[TokenLogprobs] | None = None  # in the first delta, if requested; none for the first token
    vector: bytes | None = None  # in the only delta of a pooling request; see `EngineCoreOutput.vector`
    pieces: list[Piece] = []  # reasoning, content and calls in the order of the text; empty if everything is in `text`
    num_calls: int = 0  # tool calls begun so far in this choice

    @property
    def is_plain(self) -> bool:
        """Whether it contains only text and its ids."""
        return not (self.first or self.entries or self.pieces) and self.finish_reason is None

    @property
    def reasoning(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, ReasoningPiece))

    @property
    def ordered_pieces(self) -> list[Piece]:
        """The pieces in order; `text` as a single piece if `pieces` is empty."""
        if self.pieces or not self.text:
            return self.pieces
        return [ContentPiece(self.text)]

    @property
    def ends_with_calls(self) -> bool:
        """Whether the model ended its turn by itself after calling tools."""
        return self.finish_reason is FinishReason.STOP and self.stop_reason is None and self.num_calls > 0

    def name_finish_reason(self, reply: ReplyFormat | None) -> str | None:
        """OpenAI's name: `tool_calls`, but `stop` if the request names the function to call."""
        if self.ends_with_calls and reply is not None and not reply.has_named_tool:
            return "tool_calls"
        return None if self.finish_reason is None else self.finish_reason.value

    def collect_calls(self) -> list[ToolCall]:
        """The calls of a complete delta."""
        calls: list[ToolCall] = []
        for piece in self.pieces:
            if isinstance(piece, CallBegin):
                calls.append(ToolCall(piece.id, piece.name, ""))
            elif isinstance(piece, ArgumentsPiece):
                calls[-1].arguments += piece.text
        return calls


class RequestTimes(msgspec.Struct, frozen=True):
    """Clock times of one HTTP request, over the choices that have produced a token."""

    num_choices: int
    submitted: float
    scheduled: float  # the first choice's
    first_token: float
    last_token: float
    decode_seconds: float  # from first to last token, summed over choices


class TokenCounts(msgspec.Struct, frozen=True):
    """Token counts and times of one HTTP request. A prompt counts once, however many choices it has."""

    prompt: int
    completion: int
    cached: int  # prompt tokens that the first choice of each prompt found in the prefix cache
    reasoning: int | None = None  # part of `completion`; None if reasoning is not parsed
    times: RequestTimes | None = None  # set at the end only
