"""The words that cross the seam between server (text) and engine (token ids).

Plain msgspec structs, no torch, no behaviour beyond small properties. Everything here is already valid: the server
parses and checks what a client sent (`server/prompt/validate`), the engine trusts it. May be imported by anyone.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a request ended. Every accepted request ends in exactly one of these."""

    STOP = "stop"  # end-of-sequence id, a stop id, or (server) a stop string
    LENGTH = "length"  # max_tokens reached, or the context is full
    ABORT = "abort"  # the client left, or the server asked for it
    ERROR = "error"  # the engine failed; Output.error says how


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token of one sequence is chosen. Id-level: strings never reach the engine.

    Noise is a pure function of (seed, choice, position of the new token in the output), so a request can be cut at any
    token and continued to the same end.
    """

    max_tokens: int  # 0: only the prompt is computed (prompt_logprobs)
    seed: int  # 0 .. 2**64 - 1; the server gives one to a request without
    choice: int = 0  # index among the n choices of one request
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # the last id of a sequence is forbidden after the ids before it
    stop_token_ids: tuple[int, ...] = ()  # the model's end-of-sequence ids included, unless ignore_eos
    min_tokens: int = 0  # stop_token_ids cannot be sampled before so many output tokens
    logprobs: int | None = None  # None: off; k: the chosen token's and the k likeliest, of the raw distribution
    prompt_logprobs: int | None = None  # the same for every prompt token but the first

    @property
    def reads_history(self) -> bool:
        """Whether the logits of a token are changed by which ids, not only how many, stand before it."""
        return bool(
            self.repetition_penalty != 1.0
            or self.frequency_penalty
            or self.presence_penalty
            or any(len(word) > 1 for word in self.bad_words_ids)
        )


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to continue. n choices of one HTTP request are n of these, with `sampling.choice` 0..n-1."""

    id: int  # chosen by the client, unique among its open requests
    prompt_ids: list[int]
    sampling: Sampling
    output_ids: list[int] = []  # already generated earlier (a request that is continued); counted as output
    priority: int = 0  # smaller goes first
    tenant: int = 0  # whose it is, as the number of an API key: of equal priority, who was served least goes first
    cache_salt: str = ""  # prefix blocks are shared only between equal salts


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log, raw logits: before temperature, penalties and masks) at one position."""

    logprob: float  # of the token that stands there
    rank: int  # 1: it is the likeliest
    top_ids: list[int]  # the k likeliest, best first
    top_logprobs: list[float]


class Output(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step brought for one request."""

    id: int
    token_ids: list[int]  # new ones, usually one
    finish_reason: FinishReason | None = None
    stop_id: int | None = None  # the id that ended it, when finish_reason is STOP; it is the last of token_ids
    cached_tokens: int | None = None  # set once, with the first output: prompt tokens found in the prefix cache
    queued_seconds: float | None = None  # set once, with the first output: from arrival to first scheduling
    logprobs: list[TokenLogprobs] | None = None  # one per entry of token_ids
    prompt_logprobs: list[TokenLogprobs] | None = None  # once, complete: one per prompt token but the first
    error: str | None = None


class Stats(msgspec.Struct, array_like=True, omit_defaults=True):
    """State of the engine after a step. Gauges are current; counters are totals since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of the blocks in use by live sequences, 0..1
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    num_preemptions: int = 0
    num_steps: int = 0
    step_tokens: int = 0  # tokens computed in this step, prompt and generation


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is true of the served model and its memory; the server gets it once, in Ready."""

    architecture: str
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int  # ids 0..vocab_size-1 exist in the embedding
    block_size: int  # tokens per KV block
    num_kv_blocks: int
    kv_cache_tokens: int
    max_num_seqs: int
    dtype: str
    device: str
