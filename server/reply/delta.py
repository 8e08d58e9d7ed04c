"""What is new in one choice: the unit of streaming. A reply without streaming is one delta that holds everything.

Plain data; knows neither tokenizers nor HTTP.
"""

from __future__ import annotations

import msgspec

from serve_llm.engine.types import FinishReason, TokenLogprobs


class TokenEntry(msgspec.Struct):
    """One token with its log-probabilities (None at the very first position of a prompt)."""

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int  # characters of the choice's text (echoed prompt included) before this token


class Delta(msgspec.Struct):
    index: int  # of the choice: prompt * n + k
    text: str
    token_ids: list[int]  # generated ones; the id that ended the text included
    entries: list[TokenEntry]  # empty unless logprobs were asked for
    first: bool  # of its choice
    finish_reason: FinishReason | None = None  # set in the last one of its choice
    stop_reason: int | str | None = None  # the stop id or stop string that ended the text, if one did
    prompt_logprobs: list[TokenLogprobs] | None = None  # in the first one, if they were asked for
    prompt_start: int = 1  # position in the prompt of the first of them


class TokenCounts(msgspec.Struct, frozen=True):
    """Of one HTTP request: a prompt counts once however many choices it has."""

    prompt: int
    completion: int
    cached: int  # prompt tokens found in the prefix cache by each prompt's first choice
